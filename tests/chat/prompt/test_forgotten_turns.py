"""Memory changes tokens, never content: forgotten turns change the spelling of a prompt alone."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.conversation import Conversation, Message, Role, ToolResult
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.prompt.turn_memory import TurnMemory
from rekindle.config.choices import ReasoningHistory
from rekindle.errors import InvalidRequest
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.stored_turns import StoredTurn
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.campaigns.templates import user
from tests.support.prompt_meaning import SaidTurn, meaning, turns
from tests.support.turn_bench import TurnBench, extended
from tests.support.turn_client import KWARGS, READ, WORDS, WRITE, Chat, beginning, bounded
from tests.support.turn_edits import EDITS
from tests.support.turn_templates import SOURCES, Kind

Benches = Callable[[Kind, ReasoningHistory], TurnBench]
CHATML_KINDS = [kind for kind in Kind if kind is not Kind.BARE]


class NotedTurns(MemoryTurns):
    """Notes every turn, so that a test can choose which of them stay."""

    def __init__(self) -> None:
        super().__init__(Tombstones())
        self.noted: list[StoredTurn] = []

    def keep(self, turn: StoredTurn) -> None:
        self.noted.append(turn)
        super().keep(turn)


@pytest.fixture(scope="module")
def benches(embedded_model: object) -> Iterator[Benches]:
    model = GgufModel(embedded_model, gpu_layers=0)  # type: ignore[arg-type]
    vocabulary: Vocabulary = model.vocabulary
    yield cache(lambda kind, history: TurnBench(SOURCES[kind], vocabulary, history=history))
    model.close()


@bounded
@given(
    kind=st.sampled_from(CHATML_KINDS), history=st.sampled_from(ReasoningHistory), data=st.data()
)
def test_forgotten_turns_change_no_text_no_call_and_no_reasoning_before_the_tool_loop(
    benches: Benches, kind: Kind, history: ReasoningHistory, data: st.DataObject
) -> None:
    bench = benches(kind, history)
    chat = Chat(bench, kind, data)
    servers = (NotedTurns(), NotedTurns())  # each knows what it has answered
    conversation = beginning(chat, WORDS, data.draw(st.sampled_from([(), (READ, WRITE)])))
    conversation = replace(conversation, template_kwargs=data.draw(KWARGS))
    for _ in range(data.draw(st.integers(1, 4))):
        bench.forget(data.draw(st.sampled_from(servers)))
        message = chat.sent_back(chat.reply(conversation, WORDS))
        conversation = extended(conversation, message, *chat.follow_up(message, WORDS))
        noted = [turn for server in servers for turn in server.noted]
        for store in (*servers, _only(data.draw(st.lists(st.sampled_from(noted))))):
            bench.forget(store)
            check_equal(chat, conversation)
    edited = data.draw(st.sampled_from(EDITS))(chat, conversation)
    for store in servers:
        bench.forget(store)
        with suppress(InvalidRequest):  # the template may refuse it
            check_equal(chat, edited)


def _only(kept: Iterable[StoredTurn]) -> MemoryTurns:
    store = MemoryTurns(Tombstones())
    for turn in kept:
        store.keep(turn)
    return store


def check_equal(chat: Chat, conversation: Conversation) -> None:
    """Assert that the prompt says what it says without memory, but for restored reasoning."""
    bench = chat.bench
    prompt, plain = bench.prompts.from_conversation(conversation), bench.plain(conversation)
    assert len(plain) <= prompt.max_plain
    shown, expected = (meaning(tokens, bench.tokenizer) for tokens in (prompt.tokens, plain))
    indexes = iter(i for i, m in enumerate(conversation.messages) if m.role is Role.ASSISTANT)
    sampled = {exchange.said.reasoning.strip() for exchange in chat.exchanges}
    for one, other in zip(shown, expected, strict=True):
        if isinstance(one, SaidTurn) and isinstance(other, SaidTurn):
            is_restored = chat.oracle.restores(conversation, next(indexes))
            if is_restored and one.reasoning in sampled:
                other = replace(other, reasoning=one.reasoning)
        assert one == other


CALL = '<tool_call>\n{"name": "read", "arguments": {"path":  "a"}}\n</tool_call>'
REPLIES = (CALL, "It is red.", CALL, CALL)


@pytest.mark.parametrize("history", ReasoningHistory)
@pytest.mark.parametrize("kind", [Kind.THINKING, Kind.SWITCHED, Kind.OPENED, Kind.TRIMMED])
def test_the_setting_decides_where_remembered_turns_restore_dropped_reasoning(
    benches: Benches, kind: Kind, history: ReasoningHistory
) -> None:
    """Two tool loops by a client that drops reasoning, with every subset of turns remembered."""
    bench = benches(kind, history)
    store = NotedTurns()
    bench.forget(store)
    opening = "" if kind is Kind.OPENED else "<think>\n"
    conversation = Conversation((user("Look."),), (READ,))
    for number, text in enumerate(REPLIES):
        exchange = bench.reply(conversation, f"{opening}Thought {number}.\n</think>\n\n{text}")
        calls = exchange.message.calls
        then = [Message(Role.TOOL, (ToolResult(call.id, None, "Red."),)) for call in calls]
        conversation = extended(conversation, exchange.message, *(then or [user("And?")]))
    may_restore = {
        ReasoningHistory.TEMPLATE: set[int](),
        ReasoningHistory.AUTO: {2, 3},
        ReasoningHistory.KEEP: {0, 1, 2, 3},
    }[history]
    seen = set()
    for n_kept in range(len(REPLIES) + 1):
        for kept in combinations(store.noted, n_kept):
            bench.forget(_only(kept))
            said = turns(bench.prompts.from_conversation(conversation).tokens, bench.tokenizer)
            restored = {i for i, turn in enumerate(said) if turn.reasoning == f"Thought {i}."}
            assert [i for i, turn in enumerate(said) if turn.reasoning] == sorted(restored)
            assert [bool(turn.calls) for turn in said] == [True, False, True, True]
            seen |= restored
    assert seen == may_restore


def test_forgotten_turns_do_not_change_which_messages_a_short_context_drops(
    benches: Benches,
) -> None:
    bench = benches(Kind.TRIMMED, ReasoningHistory.AUTO)
    bench.forget()
    conversation = Conversation((user("Look."),))
    for number in range(12):
        exchange = bench.reply(conversation, f"Answer {number} is what I have said before.")
        conversation = extended(conversation, exchange.message, user("And then?"))
    sizes = [len(bench.prompts.from_conversation(conversation).tokens)]
    sizes.append(len(bench.plain(conversation)))
    assert sizes[0] > sizes[1]  # the sampled tokens are more than a tokeniser's
    forgetful = bench.builder(TurnMemory(MemoryTurns(Tombstones())))
    n_remembered = set()
    for n_ctx in range(sizes[1] // 2, sizes[0] * 2):
        known, unknown = (
            prompts.from_trimmed(conversation, n_ctx=n_ctx)
            for prompts in (bench.prompts, forgetful)
        )
        said, expected = (meaning(each.tokens, bench.tokenizer) for each in (known, unknown))
        assert (said, known.n_dropped) == (expected, unknown.n_dropped)
        assert len(known.tokens) <= n_ctx
        n_remembered.add(len(known.remembered))
    assert n_remembered == {0, 12}


def test_a_prompt_that_clearly_fits_is_built_once(
    benches: Benches, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(Kind.TRIMMED, ReasoningHistory.AUTO)
    bench.forget()
    conversation = Conversation((user("Look."),))
    for number in range(4):
        exchange = bench.reply(conversation, f"Answer {number} is what I have said before.")
        conversation = extended(conversation, exchange.message, user("And then?"))
    build = PromptBuilder.from_conversation
    built: list[Prompt] = []

    def noted(self: PromptBuilder, *args: Any, **options: Any) -> Prompt:
        built.append(build(self, *args, **options))
        return built[-1]

    monkeypatch.setattr(PromptBuilder, "from_conversation", noted)
    prompt = bench.prompts.from_trimmed(conversation, n_ctx=4096)
    assert len(prompt.remembered) == 4
    assert built == [prompt]
    bench.prompts.from_trimmed(conversation, n_ctx=len(prompt.tokens))
    assert len(built) > 2
    assert prompt.max_plain >= len(bench.plain(conversation))
