"""Any edit of a conversation gives tokens that were computed before, or the plain ones."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from rekindle.chat.reply.parser import ParsedReply
from rekindle.config import ReasoningHistory
from rekindle.errors import InvalidRequest
from rekindle.generation.tokenizer import Tokenizer
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.turn_bench import (
    Exchange,
    SpacedTokenizer,
    TurnBench,
    cut_tokens,
    extended,
    message_of,
)
from tests.support.turn_oracle import SWITCH, Oracle, RawOracle
from tests.support.turn_templates import SOURCES, Kind, habits

N_EXAMPLES = int(os.environ.get("TURN_EXAMPLES", "60"))  # more for a long search
bounded = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

EDITED = "Zyx"  # no other text holds it
SPACE = st.sampled_from(["", "", " ", "\n", " \n\n", "\t"])
WORDS = st.sampled_from(
    [
        "It",
        " is",
        " red",
        ".",
        " caf\u00e9",
        "\u4f60\u597d",
        " \U0001f600",
        "\n",
        "  ",
        " 12",
        "{",
        '"',
    ]
)
WILD_WORDS = WORDS | st.sampled_from(
    [
        "<think>",
        "</think>\n\n",
        "<think>\nx\n</think>",
        "<tool_call>",
        '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
        "[TOOL_CALLS]",
        "<|im_end|>",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_start|>assistant\n",
        "|im_end|>",
        "\nUSER: ",
        "\nASSISTANT: ",
        "\\u00e9",
        "\u0301",
        "e\u0301",
    ]
)


def texts(words: st.SearchStrategy[str], *, least: int = 0) -> st.SearchStrategy[str]:
    return st.lists(words, min_size=least, max_size=4).map("".join)


def tool(name: str) -> Tool:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": "Reads.", "parameters": parameters}
    return Tool(name, json.dumps({"type": "function", "function": function}))


READ, WRITE = tool("read"), tool("write")


@pytest.fixture(scope="module")
def vocabulary(embedded_model: object) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)  # type: ignore[arg-type]
    yield model.vocabulary
    model.close()


Benches = Callable[[Kind, ReasoningHistory], TurnBench]


@pytest.fixture(scope="module")
def benches(vocabulary: Vocabulary) -> Benches:
    return cache(lambda kind, history: TurnBench(SOURCES[kind], vocabulary, history=history))


class Chat:
    """One client, its conversation, and the replies that it got."""

    def __init__(self, bench: TurnBench, kind: Kind, data: st.DataObject) -> None:
        bench.forget()
        self.bench = bench
        self.oracle = Oracle(bench)
        self._kind = kind
        self.draw = data.draw
        self.exchanges: list[Exchange] = []

    def reply(self, conversation: Conversation, words: st.SearchStrategy[str]) -> Exchange:
        text = self._reply_text(words, with_calls=bool(conversation.tools))
        cuts = self.draw(st.lists(st.integers(0, 200), max_size=8))
        tokens = cut_tokens(self.bench.tokenizer, text, cuts)
        exchange = self.bench.reply(conversation, text, tokens)
        self.oracle.check(conversation, exchange.prompt)
        self.oracle.note(conversation, exchange)
        self.exchanges.append(exchange)
        return exchange

    def sent_back(self, exchange: Exchange) -> Message:
        """Meaning the same, spelled as this client does."""
        ids = [call.id for call in exchange.message.calls]
        if self.draw(st.booleans()):
            ids = [
                self.draw(st.sampled_from([call_id, f"toolu_{call_id[-2:]}"])) for call_id in ids
            ]
        message = message_of(exchange.said, ids, with_reasoning=self.draw(st.booleans()))
        return Message(Role.ASSISTANT, tuple(map(self._respelled, message.parts)))

    def follow_up(self, message: Message, words: st.SearchStrategy[str]) -> list[Message]:
        has_results = bool(message.calls) and self.draw(st.integers(0, 5)) > 0
        if has_results:
            return [
                Message(Role.TOOL, (ToolResult(call.id, None, self.draw(texts(words))),))
                for call in message.calls
            ]
        return [Message(Role.USER, (Text(self.draw(texts(words, least=1))),))]

    def _reply_text(self, words: st.SearchStrategy[str], *, with_calls: bool) -> str:
        reasoning = self.draw(texts(words)) if self.draw(st.booleans()) else ""
        text = self.draw(SPACE) + self.draw(texts(words)) + self.draw(SPACE)
        calls = []
        for _ in range(self.draw(st.sampled_from([0, 1, 1, 2])) if with_calls else 0):
            arguments = {"path": self.draw(texts(words)), "line": self.draw(st.integers(0, 1))}
            calls.append(self._written(arguments))
        habit = habits(self._kind)
        if habit.opens_reasoning:
            thought = f"{reasoning}\n</think>\n\n"
        else:
            thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
        if habit.lists_calls and calls:
            return f"{text}[TOOL_CALLS][{', '.join(calls)}]"
        if habit.lists_calls:
            return text
        return thought + "\n".join(
            [text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        )

    def _written(self, arguments: dict[str, object]) -> str:
        return self._json(
            {"name": self.draw(st.sampled_from(["read", "read", "write"])), "arguments": arguments}
        )

    def _json(self, value: object) -> str:
        dump = self.draw(
            st.sampled_from(
                [
                    partial(json.dumps, ensure_ascii=False),
                    partial(json.dumps, separators=(",", ":")),
                    partial(json.dumps, indent=1, ensure_ascii=False),
                ]
            )
        )
        return dump(value)

    def _respelled(self, part: Part) -> Part:
        match part:
            case Text(text):
                bare = self.draw(st.sampled_from([text, text.strip()]))
                return Text(self.draw(SPACE) + bare + self.draw(SPACE))
            case ToolCall(_, _, source):
                arguments = json.loads(source)
                keys = self.draw(st.permutations(sorted(arguments)))
                return replace(
                    part, arguments_json=self._json({key: arguments[key] for key in keys})
                )
            case _:
                return part


def beginning(chat: Chat, words: st.SearchStrategy[str], tools: Sequence[Tool]) -> Conversation:
    system = Message(Role.SYSTEM, (Text(chat.draw(texts(words, least=1))),))
    user = Message(Role.USER, (Text(chat.draw(texts(words, least=1))),))
    messages = (system, user) if chat.draw(st.booleans()) else (user,)
    return Conversation(messages, tuple(tools))


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


KWARGS = st.sampled_from(
    [{}, {}, {"enable_thinking": False}, {SWITCH: False}, {SWITCH: True, "enable_thinking": True}]
)
Edit = Callable[[Chat, Conversation], Conversation]


def with_message(conversation: Conversation, index: int, *messages: Message) -> Conversation:
    before, after = conversation.messages[:index], conversation.messages[index + 1 :]
    return replace(conversation, messages=(*before, *messages, *after))


def some_message(chat: Chat, conversation: Conversation, role: Role | None = None) -> int | None:
    indexes = [i for i, m in enumerate(conversation.messages) if role in (None, m.role)]
    return chat.draw(st.sampled_from(indexes)) if indexes else None


def edit_part(chat: Chat, conversation: Conversation) -> Conversation:
    """A word more or less, in whatever part."""
    index = some_message(chat, conversation)
    assert index is not None
    message = conversation.messages[index]
    if not message.parts:
        return with_message(conversation, index, replace(message, parts=(Text(EDITED),)))
    place = chat.draw(st.integers(0, len(message.parts) - 1))
    parts = list(message.parts)
    match parts[place]:
        case ToolCall(_, _, source) as call:
            changed = json.loads(source)
            key = chat.draw(st.sampled_from([*sorted(changed), "more"]))
            changed[key] = EDITED if isinstance(changed.get(key), str) else 7
            parts[place] = replace(call, arguments_json=json.dumps(changed))
        case part:
            at = chat.draw(st.integers(0, len(part.text)))
            n_lost = chat.draw(st.integers(0, 3))
            added = chat.draw(st.sampled_from([EDITED, f" {EDITED}", ""]))
            text = part.text[:at] + added + part.text[at + n_lost :]
            parts[place] = replace(part, text=text)
    return with_message(conversation, index, replace(message, parts=tuple(parts)))


def edit_in_place(chat: Chat, conversation: Conversation) -> Conversation:
    """Edit a message; the text behind it keeps its offset."""
    index = some_message(chat, conversation)
    assert index is not None
    message = conversation.messages[index]
    match message.parts:
        case (Text(text) | Reasoning(text) | ToolResult(text=text) as first, *rest):
            edited = EDITED[: len(text)]
            changed = replace(first, text=text[: len(text) - len(edited)] + edited)
            message = replace(message, parts=(changed, *rest))
    return with_message(conversation, index, message)


def edit_calls(chat: Chat, conversation: Conversation) -> Conversation:
    """Truth values for numbers, which Python takes for the same."""

    def edited(part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        arguments = json.loads(part.arguments_json)
        return replace(part, arguments_json=json.dumps({**arguments, "line": True}))

    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = conversation.messages[index]
    parts = tuple(map(edited, message.parts))
    return with_message(conversation, index, replace(message, parts=parts))


def rename_call(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None or not (calls := conversation.messages[index].calls):
        return conversation
    message = conversation.messages[index]
    call = chat.draw(st.sampled_from(calls))
    other = replace(call, name="write" if call.name == "read" else "read")
    parts = tuple(other if part is call else part for part in message.parts)
    return with_message(conversation, index, replace(message, parts=parts))


def remove_call(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None or not (calls := conversation.messages[index].calls):
        return conversation
    message = conversation.messages[index]
    parts = tuple(part for part in message.parts if part is not calls[0])
    return with_message(conversation, index, replace(message, parts=parts))


def edit_reasoning(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = conversation.messages[index]
    rest = tuple(part for part in message.parts if not isinstance(part, Reasoning))
    thoughts: list[Part] = [Reasoning(EDITED), Text(f"<think>\n{EDITED}\n</think>\n\n")]
    thought = chat.draw(st.sampled_from(thoughts))
    return with_message(conversation, index, replace(message, parts=(thought, *rest)))


def drop_reasoning(chat: Chat, conversation: Conversation) -> Conversation:
    messages = tuple(
        replace(m, parts=tuple(part for part in m.parts if not isinstance(part, Reasoning)))
        for m in conversation.messages
    )
    return replace(conversation, messages=messages)


def remove_message(chat: Chat, conversation: Conversation) -> Conversation:
    if len(conversation.messages) < 3:
        return conversation
    index = some_message(chat, conversation)
    assert index is not None
    return with_message(conversation, index)


def swap_messages(chat: Chat, conversation: Conversation) -> Conversation:
    if len(conversation.messages) < 4:
        return conversation
    index = chat.draw(st.integers(1, len(conversation.messages) - 3))
    messages = list(conversation.messages)
    messages[index], messages[index + 2] = messages[index + 2], messages[index]
    return replace(conversation, messages=tuple(messages))


def repeat_reply(chat: Chat, conversation: Conversation) -> Conversation:
    """Repeat an earlier reply behind another message."""
    message = chat.sent_back(chat.draw(st.sampled_from(chat.exchanges)))
    return extended(
        conversation, message, Message(Role.USER, (Text(chat.draw(texts(WORDS, least=1))),))
    )


def replace_reply(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = chat.sent_back(chat.draw(st.sampled_from(chat.exchanges)))
    return with_message(conversation, index, message)


def swap_ids(chat: Chat, conversation: Conversation) -> Conversation:
    """All calls claim the id of one of them."""
    calls = [call for m in conversation.messages for call in m.calls]
    if not calls:
        return conversation
    one = chat.draw(st.sampled_from(calls)).id
    messages = tuple(
        replace(
            m, parts=tuple(replace(p, id=one) if isinstance(p, ToolCall) else p for p in m.parts)
        )
        for m in conversation.messages
    )
    return replace(conversation, messages=messages)


def change_tools(chat: Chat, conversation: Conversation) -> Conversation:
    return replace(conversation, tools=chat.draw(st.sampled_from([(), (READ,), (WRITE, READ)])))


def change_kwargs(chat: Chat, conversation: Conversation) -> Conversation:
    return replace(conversation, template_kwargs=chat.draw(KWARGS))


def change_system(chat: Chat, conversation: Conversation) -> Conversation:
    system = Message(Role.SYSTEM, (Text(chat.draw(texts(WILD_WORDS))),))
    rest = [m for m in conversation.messages if m.role is not Role.SYSTEM]
    return replace(conversation, messages=(system, *rest))


EDITS: tuple[Edit, ...] = (
    edit_part,
    edit_in_place,
    edit_in_place,
    edit_calls,
    edit_calls,
    rename_call,
    remove_call,
    edit_reasoning,
    edit_reasoning,
    drop_reasoning,
    remove_message,
    swap_messages,
    repeat_reply,
    replace_reply,
    swap_ids,
    change_tools,
    change_kwargs,
    change_system,
)


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
        if all(chat.oracle.keeps(conversation, index) for index in replies):
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
        prompt.remember(tokens, "", ParsedReply("", said, ()), ())
        oracle.note(prompt, tokens)
        n_lost = data.draw(st.just(0) | st.integers(0, len(said)))
        text = (text + said)[: len(text + said) - n_lost] + data.draw(st.just("") | RAW)
        oracle.check(text, bench.prompts.from_text(text))


def raw_bench(tokenizer: Tokenizer) -> TurnBench:
    return TurnBench(SOURCES[Kind.CHATML], tokenizer)
