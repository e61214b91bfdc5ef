"""Any edit of a conversation gives tokens that were computed before, or the plain ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.conversation import Role
from rekindle.chat.reply.parser import ParsedReply
from rekindle.config.choices import ReasoningHistory
from rekindle.errors import InvalidRequest
from rekindle.generation.request import USUAL_TERMS
from rekindle.generation.tokenizer import Tokenizer
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.turn_bench import SpacedTokenizer, TurnBench, cut_tokens, extended
from tests.support.turn_client import (
    KWARGS,
    READ,
    WILD_WORDS,
    WORDS,
    WRITE,
    Chat,
    beginning,
    bounded,
)
from tests.support.turn_edits import EDITED, EDITS
from tests.support.turn_oracle import RawOracle
from tests.support.turn_templates import SOURCES, Kind


@pytest.fixture(scope="module")
def vocabulary(embedded_model: object) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)  # type: ignore[arg-type]
    yield model.vocabulary
    model.close()


Benches = Callable[[Kind, ReasoningHistory], TurnBench]


@pytest.fixture(scope="module")
def benches(vocabulary: Vocabulary) -> Benches:
    return cache(lambda kind, history: TurnBench(SOURCES[kind], vocabulary, history=history))


@bounded
@given(kind=st.sampled_from(Kind), history=st.sampled_from(ReasoningHistory), data=st.data())
def test_every_prompt_is_what_was_computed_and_the_plain_rest(
    benches: Benches, kind: Kind, history: ReasoningHistory, data: st.DataObject
) -> None:
    chat = Chat(benches(kind, history), kind, data)
    conversation = beginning(chat, WILD_WORDS, data.draw(st.sampled_from([(), (READ, WRITE)])))
    conversation = replace(conversation, template_kwargs=data.draw(KWARGS))
    for _ in range(data.draw(st.integers(1, 4))):
        exchange = chat.reply(conversation, WILD_WORDS)
        message = chat.sent_back(exchange)
        conversation = extended(conversation, message, *chat.follow_up(message, WILD_WORDS))
        for _ in range(data.draw(st.integers(1, 3))):
            edited = data.draw(st.sampled_from(EDITS))(chat, conversation)
            try:
                prompt = chat.bench.prompts.from_conversation(edited)
            except InvalidRequest:
                continue  # the template refuses it, as it may
            chat.oracle.check(edited, prompt)
            chat.oracle.check_edited(edited, prompt, EDITED)
            if data.draw(st.booleans()):
                conversation = edited
    chat.oracle.check(conversation, chat.bench.prompts.from_conversation(conversation))


STABLE = [kind for kind in Kind if kind not in (Kind.BARE, Kind.CALLS_ALONE)]


@bounded
@given(kind=st.sampled_from(STABLE), history=st.sampled_from(ReasoningHistory), data=st.data())
def test_a_client_that_edits_nothing_gets_every_token_back_that_it_may(
    benches: Benches, kind: Kind, history: ReasoningHistory, data: st.DataObject
) -> None:
    chat = Chat(benches(kind, history), kind, data)
    conversation = beginning(chat, WORDS, data.draw(st.sampled_from([(), (READ, WRITE)])))
    for _ in range(data.draw(st.integers(1, 4))):
        exchange = chat.reply(conversation, WORDS)
        message = chat.sent_back(exchange)
        conversation = extended(conversation, message, *chat.follow_up(message, WORDS))
        prompt = chat.bench.prompts.from_conversation(conversation)
        chat.oracle.check(conversation, prompt)
        replies = [i for i, m in enumerate(conversation.messages) if m.role is Role.ASSISTANT]
        if all(chat.is_whole(conversation, index) for index in replies):
            assert prompt.tokens[: len(exchange.all_tokens)] == exchange.all_tokens
            assert len(prompt.remembered) == len(replies)


RAW_WORDS = st.sampled_from(
    [
        *("It", " is", " red", ".", "sl", "ept", " caf\u00e9", "\u4f60\u597d", "\U0001f600"),
        *(" ", "\n", "    ", "1", "23", "e\u0301", "<|im_end|>", "<|im_", "end|>", " \u0c95\u0ccd"),
        *("\r\n", "''", "don't", "https://", "=====", "\t\t", "\u200d", "A" * 40, " " * 40),
    ]
)
RAW = st.builds("".join, st.lists(RAW_WORDS, min_size=1, max_size=12))
LONG_RAW = st.builds("{}{}".format, st.sampled_from(["x " * 40, "The waves. " * 7, ""]), RAW)


@pytest.mark.parametrize("spaced", [False, True])
@bounded
@given(start=LONG_RAW, data=st.data())
def test_raw_text_is_never_changed_and_known_tokens_end_where_a_tokeniser_would_cut(
    vocabulary: Vocabulary, *, spaced: bool, start: str, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = SpacedTokenizer(vocabulary) if spaced else vocabulary
    bench = raw_bench(tokenizer)
    oracle = RawOracle(tokenizer)
    text = start
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = bench.prompts.from_text(text)
        oracle.check(text, prompt)
        said = data.draw(RAW)
        cuts = data.draw(st.lists(st.integers(0, 200)) | st.just(range(len(said))))
        tokens = cut_tokens(vocabulary, said, cuts)
        prompt.remember(tokens, "", ParsedReply("", said, ()), (), USUAL_TERMS.owner)
        oracle.note(prompt, tokens)
        n_lost = data.draw(st.just(0) | st.integers(0, len(said)))
        text = (text + said)[: len(text + said) - n_lost] + data.draw(st.just("") | RAW)
        oracle.check(text, bench.prompts.from_text(text))


def raw_bench(tokenizer: Tokenizer) -> TurnBench:
    return TurnBench(SOURCES[Kind.CHATML], tokenizer)
