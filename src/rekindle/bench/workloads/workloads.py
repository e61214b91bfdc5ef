"""The workloads: each plays the traffic of one or several clients.

Sizes are for a model of 135M parameters on two cores: a server that recomputes nothing needs half
a minute for each. Most agents write their tool calls as text, because a small model does not make
calls by the API on every server. Only the client that re-serialises calls needs real ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rekindle.bench.stage import Stage
from rekindle.bench.workloads.conversation import Chat, reserialised

TEMPLATES = Path(__file__).parent / "templates"
TOOLS_TEMPLATE = TEMPLATES / "tools.jinja"
NO_THINKING_TEMPLATE = TEMPLATES / "no_thinking.jinja"
READING_SECONDS = 2.0
TOOL_SECONDS = 2.0
LONG_REPLY_TOKENS = 150
SMALL_CONTEXT_TOKENS = 1024
CLIENT_TURNS = 8  # kept in a history; picked: they leave room for a reply
SMALL_CACHE_MIB = 48


async def agent_loop(stage: Stage, n_rounds: int = 12) -> None:
    chat = Chat(stage, "agent", stage.texts.system("agent"), has_tools=True)
    await _work(stage, chat, stage.times(n_rounds))


async def strangers(stage: Stage) -> None:
    """Each conversation has its own system prompt and returns after all the others."""
    n = stage.n_slots * 2 + 2
    chats = [
        Chat(stage, f"stranger {each}", stage.texts.system(f"stranger {each}", 400))
        for each in range(1, n + 1)
    ]
    for turn in range(1, stage.times(3) + 1):
        for chat in chats:
            await chat.say(stage.texts.question(f"{chat.name} {turn}"))


async def fan_out(stage: Stage) -> None:
    """An agent starts 8 sub-agents at once, and continues with their reports."""
    system = stage.texts.system("agent")
    parent = Chat(stage, "agent", system, has_tools=True)
    parent.messages.append({"role": "user", "content": stage.texts.question("agent")})
    await parent.act(stage.texts.tool_result("agent"))

    async def work(number: int) -> str:
        chat = Chat(stage, f"sub-agent {number}", system, has_tools=True)
        await _work(stage, chat, stage.times(3))
        return str(chat.messages[-1]["content"])

    reports = await asyncio.gather(*(work(number) for number in range(1, 9)))
    await parent.answer()
    await parent.say("\n".join(reports))


async def return_after_eviction(stage: Stage) -> None:
    """A client returns after others have filled the memory for prefixes."""
    first = Chat(stage, "first", stage.texts.system("first", 1000))
    await first.say(stage.texts.question("first 1"))
    await first.say(stage.texts.question("first 2"))
    for number in range(1, stage.times(5) + 1):
        name = f"passer-by {number}"
        await Chat(stage, name, stage.texts.system(name, 800)).say(stage.texts.question(name))
    await first.say(stage.texts.question("first 3"))
    await first.say(stage.texts.question("first 4"))


async def restart(stage: Stage) -> None:
    """The server is killed while a tool runs, and restarted in the same folder."""
    chat = Chat(stage, "agent", stage.texts.system("agent"), has_tools=True)
    other = Chat(stage, "other", stage.texts.system("other"))
    n = stage.times(5)
    await other.say(stage.texts.question("other 1"))
    await _work(stage, chat, n)
    await stage.pause(TOOL_SECONDS)
    await stage.kill_and_restart()
    await _work(stage, chat, n, begin=n)
    await other.say(stage.texts.question("other 2"))


async def mass_return(stage: Stage) -> None:
    """Every client returns in the same moment, right after a kill and a start."""
    system = stage.texts.system("office")
    chats = [
        Chat(stage, f"client {number}", system, has_tools=True)
        for number in range(1, stage.times(64) + 1)
    ]
    for chat in chats:
        await chat.say(stage.texts.question(f"{chat.name} 1", 200))
    await stage.pause(TOOL_SECONDS)
    await stage.kill_and_restart()
    questions = [stage.texts.question(f"{chat.name} 2") for chat in chats]
    await asyncio.gather(*(chat.say(text) for chat, text in zip(chats, questions, strict=True)))


async def regenerate_and_edit(stage: Stage) -> None:
    chat = Chat(stage, "chat", stage.texts.system("chat"))
    n_turns = stage.times(6)
    for turn in range(1, n_turns + 1):
        await chat.say(stage.texts.question(f"chat {turn}", 80))
    for _ in range(2):  # the last reply again
        chat.messages.pop()
        await chat.ask()
    whole = list(chat.messages)
    del chat.messages[n_turns:]  # back to the middle, where a question is edited
    for turn in range(1, 4):
        await chat.say(stage.texts.question(f"edited {turn}", 80))
    chat.messages = whole
    await chat.say(stage.texts.question("on the first branch", 80))


async def reserialising_client(stage: Stage) -> None:
    system = stage.texts.system("agent")
    chat = Chat(stage, "agent", system, calls_tools=True, keep=reserialised)
    await _work(stage, chat, stage.times(8))


async def reasoning_template(stage: Stage) -> None:
    """The template renders a reply in the history differently from how it was sampled.

    The user reads for two seconds. A server may use that time to prefill the new rendering.
    """
    chat = Chat(stage, "chat", stage.texts.system("chat", 500))
    for turn in range(1, stage.times(5) + 1):
        if turn > 1:
            await stage.pause(READING_SECONDS)
        await chat.say(stage.texts.question(f"chat {turn}"), max_tokens=LONG_REPLY_TOKENS)


async def overflow_chat(stage: Stage) -> None:
    """A chat outgrows a context of 1024 tokens.

    Servers truncate differently, so the client itself drops the older half of its turns, at the
    same points for every server.
    """
    chat = Chat(stage, "chat", stage.texts.system("chat", 200))
    for turn in range(1, stage.times(24) + 1):
        if len(chat.messages) > 2 * CLIENT_TURNS:
            del chat.messages[1 : 1 + CLIENT_TURNS // 2 * 2]
        await chat.say(stage.texts.question(f"chat {turn}", 50))


async def _work(stage: Stage, chat: Chat, n_rounds: int, *, begin: int = 0) -> None:
    """Play a question, rounds with tools, and the agent's final answer."""
    question = stage.texts.question(f"{chat.name} {begin}")
    chat.messages.append({"role": "user", "content": question})
    for number in range(begin + 1, begin + n_rounds + 1):
        await chat.act(stage.texts.tool_result(f"{chat.name} {number}"))
    await chat.answer()


async def windows(stage: Stage, n_windows: int, n_turns: int) -> None:
    """Windows of one client share its system prompt and are used in turn."""
    system = stage.texts.system("windows")
    chats = [
        Chat(stage, f"window {each}", system, has_tools=True) for each in range(1, n_windows + 1)
    ]
    for turn in range(1, stage.times(n_turns) + 1):
        for chat in chats:
            await chat.say(stage.texts.question(f"{chat.name} {turn}", 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    about: str
    play: Callable[[Stage], Awaitable[None]]
    parallel: int = 4
    ctx_size: int = 16384
    cache_ram_mib: int | None = None
    calls_tools: bool = False  # by the API; else as text
    template: Path | None = None  # None: the model's own
    measures_decode: bool = False  # of its replies, also on servers with other draft settings

    def template_for(self, *, shows_tools: bool) -> Path | None:
        """Return the template to set. None: the model's own will do."""
        if self.template is None and self.calls_tools and not shows_tools:
            return TOOLS_TEMPLATE
        return self.template


WORKLOADS = (
    Workload(name="agent-loop", about="one agent, 12 rounds with tools", play=agent_loop),
    Workload(
        name="windows-3",
        about="3 windows with one system prompt, used in turn",
        play=partial(windows, n_windows=3, n_turns=4),
    ),
    Workload(
        name="windows-8",
        about="8 windows on 4 slots, used in turn",
        play=partial(windows, n_windows=8, n_turns=3),
    ),
    Workload(
        name="strangers",
        about="10 conversations on 4 slots that share nothing, in turn",
        play=strangers,
    ),
    Workload(
        name="fan-out",
        about="8 sub-agents at once, with one system prompt",
        play=fan_out,
        parallel=8,
    ),
    Workload(
        name="return-after-eviction",
        about=f"a return after others, with {SMALL_CACHE_MIB} MiB for stored prefixes and one slot",
        play=return_after_eviction,
        parallel=1,
        ctx_size=4096,
        cache_ram_mib=SMALL_CACHE_MIB,
    ),
    Workload(name="restart", about="kill -9 in the middle of an agent's work", play=restart),
    Workload(
        name="mass-return",
        about="64 clients return at once after kill -9",
        play=mass_return,
        parallel=8,
    ),
    Workload(
        name="regenerate-edit",
        about="the last reply twice more, a message in the middle edited, and back",
        play=regenerate_and_edit,
    ),
    Workload(
        name="reserialised-calls",
        about="an agent whose client re-serialises tool calls, 8 rounds",
        play=reserialising_client,
        calls_tools=True,
    ),
    Workload(
        name="reasoning-template",
        about="a template that drops thinking from history; the user reads for 2 s",
        play=reasoning_template,
        template=NO_THINKING_TEMPLATE,
    ),
    Workload(
        name="overflow-chat",
        about=f"a chat that outgrows {SMALL_CONTEXT_TOKENS} tokens; the client drops old turns",
        play=overflow_chat,
        parallel=1,
        ctx_size=SMALL_CONTEXT_TOKENS,
    ),
)
