"""Why a prompt did not find more: the reason names what was changed, and nothing else."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.accounts.miss_reasons import CacheOutcome, explain
from rekindle.chat.accounts.recent_prompts import (
    MAX_PER_SESSION,
    PastPrompt,
    RecentPrompts,
    n_shared,
    past_prompt,
)
from rekindle.chat.accounts.seen_prefixes import GRAIN
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from rekindle.chat.prompt.prompt import Prompt
from rekindle.generation.request import CacheTerms
from rekindle.observe.request_record import Miss, MissReason

END = "<end of a message>"  # longer than a grain: every change costs one at least
WORDS = st.text("abcdefghij ", min_size=1, max_size=30).map(lambda text: f"({text})")


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def rendered(conversation: Conversation) -> str:
    tools = "".join(tool.definition_json for tool in conversation.tools)
    return tools + "".join(f"{m.role}: {m.parts}{END}" for m in conversation.messages)


def past(
    conversation: Conversation | str, *, model: str = "m", session: str = "s", namespace: str = ""
) -> PastPrompt:
    """One byte is one token."""
    if isinstance(conversation, str):
        prompt = Prompt(tuple(conversation.encode()), (), conversation)
    else:
        text = rendered(conversation)
        prompt = Prompt(tuple(text.encode()), (), text, conversation)
    terms = CacheTerms(namespace=namespace, session=session)
    return past_prompt(prompt, terms, model=model)


def found(now: PastPrompt, earlier: PastPrompt, **facts: Any) -> CacheOutcome:
    """As a cache that keeps everything finds it."""
    shared = min(n_shared(now.tokens, earlier.tokens), len(now.tokens) - 1)
    return replace(CacheOutcome(n_cached=shared, n_known=shared // GRAIN * GRAIN), **facts)


def why(now: PastPrompt, earlier: PastPrompt, **facts: Any) -> Miss | None:
    return explain(now, earlier, found(now, earlier, **facts), text_of)


def user(text: str) -> Message:
    return Message(Role.USER, (Text(text),))


def assistant(*parts: Part | str) -> Message:
    return Message(
        Role.ASSISTANT, tuple(Text(part) if isinstance(part, str) else part for part in parts)
    )


def tool(name: str, description: str) -> Tool:
    return Tool(name, json.dumps({"function": {"name": name, "description": description}}))


@st.composite
def histories(draw: st.DrawFn) -> Conversation:
    """Ends with an assistant's turn, as what a client sends back does."""
    messages = [Message(Role.SYSTEM, (Text(draw(WORDS)),))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 4))):
        messages.append(user(draw(WORDS)))
        if draw(st.booleans()):
            call_id = f"call_{turn}"
            arguments = json.dumps({"q": draw(WORDS)})
            messages.append(assistant(draw(WORDS), ToolCall(call_id, "look", arguments)))
            messages.append(Message(Role.TOOL, (ToolResult(call_id, "look", draw(WORDS)),)))
        thought = (Reasoning(draw(WORDS)),) if draw(st.booleans()) else ()
        messages.append(assistant(*thought, draw(WORDS)))
    names = draw(st.lists(st.sampled_from("abc"), unique=True))
    return Conversation(tuple(messages), tuple(tool(name, draw(WORDS)) for name in names))


@dataclass(frozen=True)
class Edit:
    after: Conversation
    reason: MissReason
    message: int | None
    part: str | None


def edited(part: Part, change: Callable[[str], str]) -> tuple[Part, str]:
    match part:
        case Text(text):
            return Text(change(text)), "text"
        case Reasoning(text):
            return Reasoning(change(text)), "reasoning"
        case ToolCall(id, name, arguments):
            query = json.loads(arguments)["q"]
            return ToolCall(id, name, json.dumps({"q": change(query)})), "tool_call"
        case ToolResult(id, name, text):
            return ToolResult(id, name, change(text)), "tool_result"


def all_edits(before: Conversation, change: Callable[[str], str]) -> list[Edit]:
    edits = []
    for index, message in enumerate(before.messages):
        for at, part in enumerate(message.parts):
            new, kind = edited(part, change)
            parts = (*message.parts[:at], new, *message.parts[at + 1 :])
            messages = list(before.messages)
            messages[index] = replace(message, parts=parts)
            is_system = message.role is Role.SYSTEM
            reason = MissReason.SYSTEM_CHANGED if is_system else MissReason.TEXT_CHANGED
            edits.append(Edit(replace(before, messages=tuple(messages)), reason, index, kind))
    for index, each in enumerate(before.tools):
        tools = list(before.tools)
        tools[index] = tool(each.name, change(each.definition_json))
        after = replace(before, tools=tuple(tools))
        edits.append(Edit(after, MissReason.TOOLS_CHANGED, None, each.name))
    return edits


@given(histories(), st.data())
def test_the_reason_names_the_one_edit(before: Conversation, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, 30))
    edit = data.draw(st.sampled_from(all_edits(before, lambda t: f"{t[:place]}X{t[place:]}")))
    now = replace(edit.after, messages=(*edit.after.messages, user("And now?")))
    miss = why(past(now), past(before))
    assert miss is not None
    assert (miss.reason, miss.message, miss.part) == (edit.reason, edit.message, edit.part)
    assert miss.tokens_lost >= GRAIN
    assert "X" in miss.got
    assert "X" not in miss.before + miss.expected


@given(histories(), st.lists(WORDS, max_size=3))
def test_a_continued_conversation_has_no_miss(before: Conversation, more: list[str]) -> None:
    now = replace(before, messages=(*before.messages, *map(user, more)))
    assert why(past(now), past(before)) is None
    assert why(past(before), past(now)) is None  # and one that is asked again


@given(histories(), WORDS)
def test_another_question_after_the_same_history_is_a_new_branch(
    history: Conversation, question: str
) -> None:
    before = replace(history, messages=(*history.messages, user(f"{question}?"), assistant("Yes")))
    now = replace(history, messages=(*history.messages, user(f"other {question}")))
    assert why(past(now), past(before)) is None


HELLO = Conversation(
    (
        Message(Role.SYSTEM, (Text("You are an agent of few words."),)),
        user("What is the capital of France, and why?"),
        assistant("Paris, for reasons of history."),
    )
)
MORE = replace(HELLO, messages=(*HELLO.messages, user("Go on, tell me all of it.")))


def test_a_new_conversation_with_the_same_system_prompt_lost_nothing() -> None:
    fresh = replace(HELLO, messages=(HELLO.messages[0], user("Something else")))
    two = replace(HELLO, messages=(*fresh.messages, user("and another thing")))
    assert why(past(fresh), past(HELLO)) is None
    assert why(past(two), past(HELLO)) is None


def test_known_tokens_that_are_not_found_were_evicted() -> None:
    now, earlier = past(MORE), past(HELLO)
    n_known = found(now, earlier).n_known
    miss = why(now, earlier, n_cached=GRAIN)
    assert miss == Miss(reason=MissReason.EVICTED, tokens_lost=n_known - GRAIN)
    assert why(now, earlier, n_cached=n_known - GRAIN + 1) is None
    refused = why(now, earlier, n_cached=0, n_refused=40)
    assert refused is not None
    assert refused.reason is MissReason.RECOMPUTE_FASTER
    for n_missing_checkpoint_tokens, reason in ((n_known, "no_checkpoint"), (40, "evicted")):
        stateless = why(
            now, earlier, n_cached=0, n_missing_checkpoint_tokens=n_missing_checkpoint_tokens
        )
        assert stateless is not None
        assert stateless.reason == reason  # what explains most of it
    after_restart = explain(now, None, CacheOutcome(n_cached=0, n_known=0, n_refused=40), text_of)
    assert after_restart == Miss(reason=MissReason.RECOMPUTE_FASTER, tokens_lost=40)
    off = why(now, earlier, n_cached=0, can_store=False)
    assert off is not None
    assert off.reason is MissReason.CACHE_OFF


def test_the_last_prompt_token_is_never_counted_as_lost() -> None:
    raw = past("x" * (GRAIN + 1))
    nothing = CacheOutcome(n_cached=1, n_known=GRAIN + 1)
    assert explain(raw, raw, nothing, text_of) is None


def test_a_request_without_the_cache_says_so() -> None:
    miss = why(past(MORE), past(HELLO), n_cached=0, n_known=0, uses_cache=False)
    assert miss == Miss(reason=MissReason.CACHE_OFF)


def test_the_first_request_is_only_the_first() -> None:
    nothing = CacheOutcome(n_cached=0, n_known=0)
    assert explain(past(MORE), None, nothing, text_of) == Miss(reason=MissReason.FIRST_REQUEST)
    from_disk = CacheOutcome(n_cached=64, n_known=0)
    assert explain(past(MORE), None, from_disk, text_of) is None


def test_another_model_computed_it() -> None:
    miss = why(past(MORE, model="b"), past(HELLO, model="a"), n_cached=0, n_known=0)
    assert miss is not None
    assert (miss.reason, miss.expected, miss.got) == (MissReason.OTHER_MODEL, "a", "b")
    fresh = replace(HELLO, messages=(HELLO.messages[0], user("Something else")))
    first = why(past(fresh, model="b"), past(HELLO, model="a"), n_cached=0, n_known=0)
    assert first == Miss(reason=MissReason.FIRST_REQUEST)


def test_equal_messages_that_render_differently_are_template_rewrites() -> None:
    earlier = past(HELLO)
    text = rendered(MORE).replace("Paris", "<think></think>Paris")
    now = past(MORE)
    now = replace(now, tokens=past(text).tokens, text=text, n_prompt=len(text))
    miss = why(now, earlier)
    assert miss is not None
    assert (miss.reason, miss.message) == (MissReason.TEMPLATE_REWROTE_TURN, 2)
    assert miss.expected.startswith("Paris")
    assert miss.got.startswith("<think></think>")


def test_dropped_reasoning_is_not_a_change_by_the_client() -> None:
    thinking = replace(
        HELLO, messages=(*HELLO.messages[:2], assistant(Reasoning("Hm. " * 9), "Paris."))
    )
    bare = replace(HELLO, messages=(*HELLO.messages[:2], assistant("Paris."), user("And?" * 20)))
    miss = why(past(bare), past(thinking))
    assert miss is not None
    assert miss.reason is MissReason.TEMPLATE_REWROTE_TURN


def test_white_space_counts_where_nothing_else_differs() -> None:
    system, asked, *rest = MORE.messages
    now = replace(MORE, messages=(system, user(asked.text + "\n"), *rest))
    miss = why(past(now), past(HELLO))
    assert miss is not None
    assert (miss.reason, miss.message, miss.part) == (MissReason.TEXT_CHANGED, 1, "text")
    assert (miss.before, miss.expected, miss.got) == (asked.text[-24:], "", "\n")


def test_tools_in_another_spelling_are_the_same_and_a_missing_one_is_named() -> None:
    a, b = tool("a", "first of them"), tool("b", "second of them")
    swapped = Tool("a", '{"function": {"description": "first of them", "name": "a"}}')
    before = replace(HELLO, tools=(a, b))
    same = why(past(replace(MORE, tools=(swapped, b))), past(before))
    assert same is not None
    assert same.reason is not MissReason.TOOLS_CHANGED
    miss = why(past(replace(MORE, tools=(a,))), past(before))
    assert miss is not None
    assert (miss.reason, miss.part, miss.got) == (MissReason.TOOLS_CHANGED, "b", "")


STORY = "Once upon a time there was a king who had three sons, and all of them were idle. "


def test_raw_text_has_edits_and_branches() -> None:
    earlier = past(STORY * 2)
    edit = why(past((STORY * 2).replace("king", "queen", 1) + "One day"), earlier)
    assert edit is not None
    assert (edit.reason, edit.message, edit.part) == (MissReason.TEXT_CHANGED, None, "text")
    assert edit.before.endswith("there was a ")
    assert edit.expected.startswith("king")
    assert edit.got.startswith("queen")
    assert why(past(STORY + "He sent them away, for good, and was glad of it."), earlier) is None
    gone = why(past(STORY * 3), earlier, n_cached=0)
    assert gone is not None
    assert gone.reason is MissReason.EVICTED


def test_an_earlier_prompt_that_does_not_explain_what_was_found_is_not_blamed() -> None:
    system, _, *rest = MORE.messages
    other = replace(MORE, messages=(system, user("Who are you, then? " * 5), *rest))
    now, recent = past(MORE), RecentPrompts()
    recent.add(past(other))
    assert recent.most_like(now, n_cached=0) is not None
    assert recent.most_like(now, n_cached=len(now.tokens) - 20) is None


def test_between_equally_similar_prompts_the_one_with_the_same_tools_is_compared() -> None:
    recent, tools = RecentPrompts(), (tool("a", "first of them"),)
    with_tools = past(replace(HELLO, tools=tools))
    recent.add(with_tools)
    recent.add(past(HELLO))
    assert recent.most_like(past(replace(MORE, tools=tools))) is with_tools


def test_the_most_similar_prompt_is_compared_with() -> None:
    recent = RecentPrompts()
    system = HELLO.messages[0]
    alike, fresh = past(HELLO, session="t"), past(Conversation((system, user("Hm"))))
    for each in (alike, fresh, past(MORE, namespace="other")):
        recent.add(each)
    assert recent.most_like(past(MORE)) is alike
    assert recent.most_like(past(Conversation((user("Nothing of that"),)))) is None
    mine, later = past(HELLO), past(HELLO, session="t")
    recent.add(mine)
    recent.add(later)
    assert recent.most_like(past(MORE)) is mine  # one of its session


@pytest.mark.parametrize("n_sessions", [1, 40])
def test_recent_prompts_are_bounded_in_number_and_bytes(n_sessions: int) -> None:
    recent = RecentPrompts(max_bytes=50_000)
    for number in range(200):
        recent.add(past(f"{number} {STORY}", session=str(number % n_sessions)))
        assert recent._prompts.n_bytes <= 50_000
    n_kept = len(recent._prompts)
    assert n_kept == MAX_PER_SESSION if n_sessions == 1 else n_kept > 20
    newest = past(f"199 {STORY}", session="new")
    best = recent.most_like(newest)
    assert best is not None
    assert best.text == newest.text
