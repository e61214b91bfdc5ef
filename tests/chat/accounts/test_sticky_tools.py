"""Sticky tools, with a real template and an engine that keeps everything."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Role,
    StickyTools,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    ToolsChange,
)
from rekindle.chat.reply.events import ReplyDone, ReplyOptions, ReplyStats, ToolChoice, ToolMode
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import ChatTemplate
from rekindle.config.choices import Overflow
from rekindle.generation.forgetting import Scope, Tombstone, Tombstones
from rekindle.generation.request import DEFAULT_SESSION, CacheTerms, Sampling
from rekindle.generation.status import EngineStatus
from tests.chat.accounts.test_accounts import REPLY, KeepingEngine
from tests.chat.test_responder import ByteTokenizer
from tests.support.chat import chat_responder
from tests.support.dialects import dialect_of
from tests.support.turn_templates import SOURCES, Kind


def tool(name: str, about: str = "Reads.") -> Tool:
    function = {"name": name, "description": about, "parameters": {"type": "object"}}
    return Tool(name, json.dumps({"type": "function", "function": function}))


READ, WRITE = tool("read"), tool("write")
SYSTEM = Message(Role.SYSTEM, (Text("You are an agent of few words, and they are kind."),))
ASKED = Message(Role.USER, (Text("Read the notes."),))
CALL = ToolCall("call_1", "read", "{}")
LOOP = (
    SYSTEM,
    ASKED,
    Message(Role.ASSISTANT, (CALL,)),
    Message(Role.TOOL, (ToolResult("call_1", "read", "Buy milk, bread and a long rope."),)),
)
SUMMARISE = Message(Role.USER, (Text("Summarise the conversation."),))


class RoomyEngine(KeepingEngine):
    n_ctx = 4096

    def status(self) -> EngineStatus:
        return EngineStatus(1, 0, 0, 1, self.n_ctx, self.n_ctx, 0)


class Bench:
    def __init__(self, *, sticky_tools: bool = True) -> None:
        self.engine = RoomyEngine()
        self.forgotten = Tombstones()
        self.accounts = Accounts(self.forgotten)
        source = SOURCES[Kind.CHATML]
        self.responder = chat_responder(
            self.engine,
            ByteTokenizer(),
            ChatTemplate(source, bos_text="", eos_text="", guard=Guard(())),
            dialect_of(source),
            model="m",
            accounts=self.accounts,
            sticky_tools=sticky_tools,
        )

    def ask(
        self,
        messages: tuple[Message, ...],
        *tools: Tool,
        session: str = "s",
        namespace: str = "",
        choice: ToolChoice | None = None,
    ) -> ReplyStats:
        asked = Conversation(messages, tools)
        return asyncio.run(self._ask(asked, session, namespace, choice or ToolChoice()))

    async def _ask(
        self, asked: Conversation, session: str, namespace: str, choice: ToolChoice
    ) -> ReplyStats:
        terms = CacheTerms(session=session, namespace=namespace, asked_at=1.0)
        prompt = await self.responder.prepare_chat(asked, namespace=namespace, session=session)
        options = ReplyOptions(sampling=Sampling(), terms=terms, tool_choice=choice)
        stream = await self.responder.start(prompt, options, request_id="id")
        done = [event async for event in stream][-1]
        assert isinstance(done, ReplyDone)
        return done.stats


def after(messages: tuple[Message, ...], *more: Message) -> tuple[Message, ...]:
    """Continue the conversation behind the engine's reply."""
    return (*messages, Message(Role.ASSISTANT, (Text(REPLY),)), *more)


@pytest.mark.parametrize("session", ["s", DEFAULT_SESSION])
def test_a_summary_without_tools_finds_the_whole_conversation(session: str) -> None:
    plain, sticky = Bench(sticky_tools=False), Bench()
    costs = []
    for bench in (plain, sticky):
        bench.ask(LOOP, READ, WRITE, session=session)
        costs.append(bench.ask(after(LOOP, SUMMARISE), session=session))
    before, now = costs
    assert before.sticky is None
    assert now.sticky == StickyTools(ToolsChange.DROPPED, 2, before.n_prefilled)
    n_new = len(f"<|im_end|>\n<|im_start|>user\n{SUMMARISE.parts[0].text}<|im_end|>\n")  # type: ignore[union-attr]
    assert now.n_prefilled <= n_new + len("<|im_start|>assistant\n")
    assert now.n_sticky_saved == before.n_prefilled - now.n_prefilled > 100


def test_dropped_tools_stand_in_the_prompt_and_cannot_be_called() -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    stats = bench.ask(after(LOOP, SUMMARISE), choice=ToolChoice(ToolMode.AUTO))
    assert READ.definition_json[:40] in stats.prompt_text
    assert bench.engine.requests[-2].sampling.grammar is not None
    assert bench.engine.requests[-1].sampling.grammar is None


def test_reordered_tools_keep_the_order_of_the_session_and_may_be_called() -> None:
    bench = Bench()
    bench.ask(LOOP, READ, WRITE)
    stats = bench.ask(after(LOOP, SUMMARISE), WRITE, READ)
    assert stats.sticky is not None
    assert stats.sticky.change == "reordered"
    assert stats.prompt_text.index('"read"') < stats.prompt_text.index('"write"')
    assert bench.engine.requests[-1].sampling.grammar is not None


@pytest.mark.parametrize(
    "tools",
    [(READ, WRITE), (READ,), (tool("read", "Reads well."), WRITE), (READ, WRITE, tool("run"))],
    ids=["same", "fewer", "changed", "added"],
)
def test_other_tools_are_the_requests_own(tools: tuple[Tool, ...]) -> None:
    bench = Bench()
    bench.ask(LOOP, READ, WRITE)
    stats = bench.ask(after(LOOP, SUMMARISE), *tools)
    assert stats.sticky is None
    assert ('"write"' in stats.prompt_text) == (WRITE in tools)


@pytest.mark.parametrize("other", [{"session": "t"}, {"namespace": "n"}], ids=str)
def test_tools_never_leave_their_session_and_namespace(other: dict[str, str]) -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    assert bench.ask(after(LOOP, SUMMARISE), **other).sticky is None  # type: ignore[arg-type]


def test_a_conversation_that_only_begins_alike_is_not_a_continuation() -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    changed = replace(LOOP[3], parts=(ToolResult("call_1", "read", "Nothing."),))
    assert bench.ask((*LOOP[:3], changed, SUMMARISE)).sticky is None
    assert bench.ask((SYSTEM, SUMMARISE)).sticky is None


def test_clients_without_a_session_need_a_common_reply() -> None:
    """Two clients may begin with the same words, one of them with tools."""
    bench = Bench()
    bench.ask((SYSTEM, ASKED), READ, session=DEFAULT_SESSION)
    other = Message(Role.ASSISTANT, (Text("I am another client's reply."),))
    assert bench.ask((SYSTEM, ASKED, other, SUMMARISE), session=DEFAULT_SESSION).sticky is None
    same = after((SYSTEM, ASKED), SUMMARISE)
    assert bench.ask(same, session=DEFAULT_SESSION).sticky is not None


def test_a_deletion_forgets_the_tools() -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    tombstone = Tombstone(scope=Scope(namespace="", session="s"), at=2.0)
    bench.accounts.forget(tombstone)
    assert bench.ask(after(LOOP, SUMMARISE)).sticky is None


def test_a_prompt_that_would_leave_no_room_for_the_reply_is_rendered_as_sent() -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    n_sticky = bench.ask(after(LOOP, SUMMARISE)).n_prompt
    bench.engine.n_ctx = n_sticky * 5 // 4
    stats = bench.ask(after(LOOP, SUMMARISE))
    assert stats.sticky is None
    assert stats.n_prompt < n_sticky


def test_a_request_without_cache_is_rendered_as_sent() -> None:
    bench = Bench()
    bench.ask(LOOP, READ)
    asked = Conversation(after(LOOP, SUMMARISE))
    prompt = asyncio.run(bench.responder.prepare_chat(asked, session="s", cache_prompt=False))
    assert prompt.sticky is None


def test_no_turn_is_left_out_for_sticky_tools() -> None:
    bench = Bench()
    bench.ask(LOOP, *(tool(f"read{n}", "Reads a file. " * 20) for n in range(4)))
    asked = Conversation(after(LOOP, SUMMARISE))
    as_sent = asyncio.run(bench.responder.prepare_chat(asked, session="t"))
    bench.engine.n_ctx = len(as_sent.tokens) * 2
    trimmed = partial(bench.responder.prepare_chat, asked, overflow=Overflow.TRIM)
    assert asyncio.run(trimmed(session="s")).tokens == as_sent.tokens
