"""Cache controls of all dialects: what they mark, how that is pinned, and how prompts are named."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.anthropic.messages import conversation_of as messages_conversation
from rekindle.api.anthropic.messages import n_messages_of
from rekindle.api.anthropic.request import marks_of as messages_marks
from rekindle.api.anthropic.response import usage_of
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.cache_controls import (
    CommonFields,
    Mark,
    auto_key,
    pins_of,
    position_of,
    terms_of,
)
from rekindle.api.http.caller import Caller
from rekindle.api.openai.messages import conversation_of as chat_conversation
from rekindle.api.openai.messages import marks_of as chat_marks
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.requests.media import MediaReader
from rekindle.api.responses.items import Placed, read_items
from rekindle.api.responses.request import conversation_of as responses_conversation
from rekindle.api.responses.request import marks_of as responses_marks
from rekindle.api.responses.schema import CreateResponseRequest
from rekindle.api.responses.tools import toolbox_of
from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.config.choices import MediaPolicy
from rekindle.errors import InvalidRequest
from rekindle.generation.request import CacheTerms, Pin, Rank
from tests.api.anthropic.test_messages import CALLED, result, tool_of, user
from tests.api.client import post
from tests.api.fakes import ByteTokenizer, FakeResponder, envelope
from tests.support.chat import prompt_builder
from tests.support.dialects import dialect_of

END = "<|im_end|>"
MINUTES_5, MINUTES_30, HOUR, DAY = 300.0, 1800.0, 3600.0, 86400.0
MARKED = {"cache_control": {"type": "ephemeral"}}
MARKED_FOR_AN_HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
FIRST, SECOND = {"type": "text", "text": "one"}, {"type": "text", "text": "two"}
SYSTEM = [{"type": "text", "text": "Be brief."}]
ANSWER = {"role": "assistant", "content": [FIRST]}
CALLER = Caller("s", None, "ns")


class FakePrompt(Prompt):
    """Ten tokens for the head, ten for each message, three to begin the reply."""

    def __init__(self, n_messages: int = 9, n_dropped: int = 0, text: str = "raw") -> None:
        super().__init__((0,) * (13 + 10 * n_messages), (), text, n_dropped=n_dropped)

    def position_of(self, n_messages: int) -> int:
        return 10 + 10 * n_messages


def of_messages(messages: list[Any], **fields: Any) -> tuple[Mark, ...]:
    body = MessagesRequest.model_validate({"messages": messages, "max_tokens": 1, **fields})
    return messages_marks(body, messages_conversation(body, MediaReader(MediaPolicy.TEXT)))


def of_chat(messages: list[Any], **fields: Any) -> tuple[Mark, ...]:
    body = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    return chat_marks(body, chat_conversation(body, MediaReader(MediaPolicy.TEXT)))


def of_responses(items: list[Any], **fields: Any) -> tuple[Mark, ...]:
    body = CreateResponseRequest.model_validate({"input": items, **fields})
    assert isinstance(body.input, list)
    read = read_items([Placed(item, "input") for item in body.input], MediaReader(MediaPolicy.TEXT))
    return responses_marks(body, read, responses_conversation(body, read.messages, toolbox_of(())))


@pytest.mark.parametrize(
    ("messages", "fields", "marks"),
    [
        ([user(FIRST)], {}, ()),
        ([user(FIRST)], {"tools": [tool_of("f", **MARKED)]}, ((0, MINUTES_5),)),
        ([user(FIRST)], {"system": [SYSTEM[0] | MARKED_FOR_AN_HOUR]}, ((0, HOUR),)),
        ([user(FIRST | MARKED)], {}, ((1, MINUTES_5),)),
        ([user(FIRST | MARKED)], {"system": SYSTEM}, ((2, MINUTES_5),)),
        ([user(FIRST | MARKED, SECOND)], {}, ((1, MINUTES_5),)),
        ([user(FIRST), ANSWER, user(SECOND | MARKED)], {}, ((3, MINUTES_5),)),
        ([user(FIRST)], MARKED_FOR_AN_HOUR, ((1, HOUR),)),
        ([{"role": "user", "content": "hi"}], {**MARKED, "system": "Be."}, ((2, MINUTES_5),)),
        # The top level stands for the last block, which has a mark of its own here.
        ([user(FIRST | MARKED_FOR_AN_HOUR)], MARKED, ((1, HOUR),)),
        # A result and a text are two messages.
        ([user(FIRST), CALLED, user(result("x") | MARKED, SECOND)], {}, ((3, MINUTES_5),)),
        ([user(FIRST), CALLED, user(result("x"), SECOND | MARKED)], {}, ((4, MINUTES_5),)),
        ([user(FIRST), CALLED, user(result([FIRST | MARKED]))], {}, ((3, MINUTES_5),)),
        # Results are read first, wherever they stand.
        (
            [user(FIRST), CALLED, user(SECOND | MARKED_FOR_AN_HOUR, result("x") | MARKED)],
            {},
            ((3, MINUTES_5), (4, HOUR)),
        ),
        ([user(FIRST), CALLED, user(result("x")), user(FIRST | MARKED)], {}, ((4, MINUTES_5),)),
        ([user(FIRST), {"role": "assistant", "content": [FIRST | MARKED]}], {}, ((2, MINUTES_5),)),
        ([{"role": "system", "content": [FIRST | MARKED]}, user(FIRST)], {}, ((0, MINUTES_5),)),
        (
            [user(FIRST | MARKED), ANSWER, user(SECOND | MARKED)],
            {"tools": [tool_of("f", **MARKED_FOR_AN_HOUR)], "system": [SYSTEM[0] | MARKED]},
            ((0, HOUR), (0, MINUTES_5), (2, MINUTES_5), (4, MINUTES_5)),
        ),
    ],
)
def test_every_place_of_cache_control_marks_the_messages_up_to_it(
    messages: list[Any], fields: dict[str, Any], marks: tuple[tuple[int, float], ...]
) -> None:
    assert of_messages(messages, **fields) == tuple(Mark(*mark) for mark in marks)


@pytest.mark.parametrize(
    "entry",
    [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": ""},
        user(),
        user({"type": "text", "text": ""}),
        user(FIRST, SECOND),
        user(result("x")),
        user(result("x"), {"type": "text", "text": ""}),
        user(SECOND, result("x")),
        user(result("x"), result("y"), FIRST, SECOND),
        {"role": "system", "content": [FIRST]},
        {"role": "assistant", "content": []},
        CALLED,
    ],
)
def test_the_messages_of_an_entry_are_counted_as_they_are_read(entry: dict[str, Any]) -> None:
    body = MessagesRequest.model_validate(
        {"messages": [user(FIRST), CALLED, entry], "system": SYSTEM, "max_tokens": 1}
    )
    n_read = len(messages_conversation(body, MediaReader(MediaPolicy.TEXT)).messages)
    assert 3 + n_messages_of(body.messages[-1]) == n_read


def test_a_mark_that_moves_forward_still_covers_earlier_messages() -> None:
    turns: list[Any] = [user(FIRST), CALLED, user(result("x")), ANSWER, user(FIRST, SECOND)]
    covered = []
    for n_sent in (1, 3, 5):
        *before, last = turns[:n_sent]
        *rest, end = last["content"]
        [mark] = of_messages([*before, {**last, "content": [*rest, {**end, **MARKED}]}])
        covered.append(mark.n_messages)
    assert covered == [1, 3, 5]


def test_five_breakpoints_are_refused_in_anthropics_words() -> None:
    four = [user(FIRST | MARKED), ANSWER] * 4
    assert len(of_messages(four)) == 4
    with pytest.raises(
        InvalidRequest,
        match=r"^A maximum of 4 blocks with cache_control may be provided\. Found 5\.$",
    ):
        of_messages(four, **MARKED)


def test_usage_is_divided_at_the_last_breakpoint() -> None:
    prompt = FakePrompt(n_messages=2)

    def created(*marks: Mark) -> tuple[int, int]:
        """For five minutes, for an hour; with a prompt of 33 tokens and 4 of them cached."""
        pinned = envelope(terms=CacheTerms(pins=pins_of(marks, prompt)))
        usage = usage_of(pinned, n_prompt=33, n_cached=4, n_generated=0)["cache_creation"]
        return usage["ephemeral_5m_input_tokens"], usage["ephemeral_1h_input_tokens"]

    assert created() == (0, 0)
    assert created(Mark(0, HOUR)) == (0, 6)
    assert created(Mark(0, HOUR), Mark(2, MINUTES_5)) == (26, 0)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [FIRST | BREAKPOINT, SECOND]},
]


@pytest.mark.parametrize(
    ("fields", "marks"),
    [
        ({}, ()),
        ({"prompt_cache_options": {}}, ()),
        ({"prompt_cache_options": {"prewarm": True}}, ()),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, ((None, MINUTES_30),)),
        ({"prompt_cache_options": {"ttl": "1h"}}, ((None, HOUR),)),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, ()),
        ({"prompt_cache_retention": "in_memory"}, ()),
        ({"prompt_cache_retention": "24h"}, ((None, DAY),)),
    ],
)
def test_openais_request_fields_mark_the_whole_prompt_or_nothing(
    fields: dict[str, Any], marks: tuple[tuple[int | None, float], ...]
) -> None:
    expected = tuple(Mark(*mark) for mark in marks)
    assert of_chat([{"role": "user", "content": "hi"}], **fields) == expected
    assert of_responses([{"role": "user", "content": "hi"}], **fields) == expected


def test_openais_breakpoints_mark_the_messages_up_to_them() -> None:
    assert of_chat(CHAT) == (Mark(2, MINUTES_30),)
    assert of_responses(CHAT) == (Mark(2, MINUTES_30),)
    assert of_responses(CHAT[1:], instructions="Be brief.") == (Mark(2, MINUTES_30),)
    system = [{"role": "developer", "content": [FIRST | BREAKPOINT]}, CHAT[1]]
    both = (Mark(0, HOUR), Mark(2, HOUR))
    for options, whole in (
        ({"mode": "explicit", "ttl": "1h"}, ()),
        ({"mode": "implicit", "ttl": "1h"}, (Mark(None, HOUR),)),
    ):
        assert of_chat(system, prompt_cache_options=options) == (*both, *whole)
        assert of_responses(system, prompt_cache_options=options) == (*both, *whole)


def test_breakpoints_on_the_items_of_one_turn_and_on_outputs_find_their_messages() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c"}
    parts = [{"type": "input_text", "text": "x"} | BREAKPOINT]
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "y"} | BREAKPOINT]}
    items = [CHAT[0], said, call, output | {"output": parts}, said]
    assert [mark.n_messages for mark in of_responses(items)] == [2, 3, 4]


def test_of_many_breakpoints_the_last_four_count() -> None:
    marks = of_chat([CHAT[1]] * 6, prompt_cache_options={"ttl": "30m"})
    assert [mark.n_messages for mark in marks] == [4, 5, 6, None]


def test_pins_are_the_fewest_that_keep_what_is_marked() -> None:
    prompt = FakePrompt(n_messages=3)
    assert pins_of((), prompt) == ()
    assert pins_of((Mark(None, DAY),), prompt) == (Pin(43, DAY),)
    marks = (Mark(0, HOUR), Mark(0, MINUTES_5), Mark(2, MINUTES_5), Mark(1, MINUTES_5))
    assert pins_of(marks, prompt) == (Pin(10, HOUR), Pin(30, MINUTES_5))
    assert pins_of((Mark(0, MINUTES_5), Mark(3, HOUR)), prompt) == (Pin(40, HOUR),)


@given(
    st.lists(
        st.builds(Mark, st.none() | st.integers(0, 5), st.sampled_from([MINUTES_5, HOUR, DAY]))
    )
)
def test_each_mark_is_pinned_for_its_own_ttl(marks: list[Mark]) -> None:
    prompt = FakePrompt(n_messages=5)
    pins = pins_of(marks, prompt)
    for mark in marks:
        end = 63 if mark.n_messages is None else prompt.position_of(mark.n_messages)
        assert any(pin.n_tokens >= end and pin.seconds >= mark.seconds for pin in pins)
    assert len(pins) <= 3


def test_marks_behind_dropped_messages_never_reach_too_far() -> None:
    prompt = FakePrompt(n_messages=4, n_dropped=3)
    assert pins_of((Mark(7, HOUR),), prompt) == (Pin(50, HOUR),)
    assert pins_of((Mark(2, HOUR),), prompt) == (Pin(10, HOUR),)


Json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
Schemas = st.dictionaries(st.text(max_size=3), Json, max_size=4)
Functions: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"name": st.sampled_from("fgh"), "parameters": Schemas},
    optional={"description": st.text(max_size=3), "extra": Json},
)
Heads = st.tuples(
    st.lists(st.text(max_size=3), max_size=2),
    st.lists(Functions, max_size=3, unique_by=lambda function: function["name"]),
)
Head = tuple[list[str], list[dict[str, Any]]]


def key_of(head: Head, question: str = "hi") -> str:
    systems, functions = head
    messages = [{"role": "system", "content": text} for text in systems]
    messages.append({"role": "user", "content": question})
    tools = [{"type": "function", "function": function} for function in functions]
    body = ChatCompletionRequest.model_validate({"messages": messages, "tools": tools})
    return auto_key(chat_conversation(body, MediaReader(MediaPolicy.TEXT)))


def shuffled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        names = list(value)
        chance.shuffle(names)
        return {name: shuffled(value[name], chance) for name in names}
    return [shuffled(item, chance) for item in value] if isinstance(value, list) else value


@given(Heads, st.randoms(use_true_random=False))
def test_the_order_of_json_keys_never_changes_the_automatic_key(
    head: Head, chance: random.Random
) -> None:
    systems, functions = head
    key = key_of(head)
    assert key == key_of((systems, shuffled(functions, chance)), "another question")
    assert key.startswith("auto-")
    assert len(key) == 21


@given(Heads, Heads)
def test_any_other_difference_changes_the_automatic_key(one: Head, other: Head) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key_of(one) == key_of(other)) == same


@given(Heads)
def test_the_order_of_tools_changes_the_automatic_key(head: Head) -> None:
    systems, functions = head
    assert (key_of((systems, functions[::-1])) == key_of(head)) == (len(functions) < 2)


def test_all_dialects_give_equal_heads_the_same_automatic_key() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    chat = key_of((["Be."], [{"name": "f", "description": "d", "parameters": schema}]))
    tool = {"name": "f", "description": "d", "input_schema": schema}
    for system in ("Be.", [{"type": "text", "text": "Be.", **MARKED}]):
        body = MessagesRequest.model_validate(
            {"messages": [user(FIRST)], "system": system, "tools": [tool], "max_tokens": 0}
        )
        assert auto_key(messages_conversation(body, MediaReader(MediaPolicy.TEXT))) == chat
    toolbox = toolbox_of(
        CreateResponseRequest.model_validate(
            {"tools": [{"type": "function", "name": "f", "description": "d", "parameters": schema}]}
        ).tools
        or ()
    )
    request = CreateResponseRequest(input="hi", instructions="Be.")
    asked = (Message(Role.USER, (Text("hi"),)),)
    assert auto_key(responses_conversation(request, asked, toolbox)) == chat


def test_a_chosen_key_names_the_prompt_and_only_priming_makes_one_up() -> None:
    conversation = Conversation((Message(Role.USER, (Text("hi"),)),))
    prompt = FakePrompt()
    chosen = CommonFields(cache_key="docs/v1:a.b-c_d", persist=True)
    named = terms_of(CALLER, chosen, (), conversation, prompt, primes=True)
    assert named == CacheTerms(namespace="ns", session="s", name="docs/v1:a.b-c_d", persist=True)
    plain = terms_of(CALLER, CommonFields(), (Mark(None, DAY),), conversation, prompt, primes=False)
    assert plain == CacheTerms(namespace="ns", session="s", pins=(Pin(103, DAY),))
    primed = terms_of(CALLER, CommonFields(), (), conversation, prompt, primes=True)
    assert primed.name == auto_key(conversation)
    raw = [
        terms_of(CALLER, CommonFields(), (), None, FakePrompt(text=text), primes=True).name
        for text in ("a", "b", "a")
    ]
    assert raw[0] == raw[2] != raw[1]


def test_the_caller_chooses_the_class() -> None:
    for declared, expected in ((None, Rank.MAIN), (Rank.EPHEMERAL, Rank.EPHEMERAL)):
        caller = Caller("s", declared, "")
        terms = terms_of(caller, CommonFields(), (), None, FakePrompt(), primes=False)
        assert terms.rank is expected


@pytest.mark.parametrize(
    "fields", [{"prefill": True}, {"prompt_cache_options": {"prewarm": True}}, {}]
)
def test_priming_writes_nothing_in_responses_and_messages(fields: dict[str, Any]) -> None:
    primes = bool(fields)
    responder = FakeResponder()
    post("/v1/responses", {"input": "hi", "max_output_tokens": 5, **fields}, responder)
    asked = {"messages": [user(FIRST)], "max_tokens": 5, "prefill": primes}
    post("/v1/messages", asked, responder)
    n_wanted = 0 if primes else 5
    assert [each.options.max_tokens for each in responder.started] == [n_wanted, n_wanted]


def test_pins_end_exactly_where_the_marked_messages_end_in_a_real_prompt() -> None:
    tokenizer = ByteTokenizer()
    template = ChatTemplate(
        CHATML, bos_text="<s>", eos_text=END, guard=Guard(tokenizer.special_strings)
    )
    dialect = dialect_of(CHATML)
    prompts = prompt_builder(template, tokenizer, dialect)
    body = MessagesRequest.model_validate(
        {
            "messages": [user(FIRST | MARKED_FOR_AN_HOUR), ANSWER, user(SECOND | MARKED)],
            "system": [SYSTEM[0] | MARKED_FOR_AN_HOUR],
            "max_tokens": 1,
        }
    )
    conversation = messages_conversation(body, MediaReader(MediaPolicy.TEXT))
    prompt = prompts.from_conversation(conversation)
    marks = messages_marks(body, conversation)
    head, asked, last = (position_of(mark, prompt) for mark in marks)
    texts = [
        tokenizer.detokenize(prompt.tokens[:position], render_special=True).decode()
        for position in (head, asked)
    ]
    assert texts[0].endswith(f"Be brief.{END}\n")
    assert texts[1].endswith(f"one{END}\n")
    assert last == len(prompt.tokens)
    assert pins_of(marks, prompt) == (Pin(asked, HOUR), Pin(last, MINUTES_5))
    assert pins_of(marks[:1], prompt) == (Pin(head, HOUR),)
