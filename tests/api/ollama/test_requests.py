"""Requests in Ollama's words: what reaches the model, and what is refused."""

import json
from typing import Any

import pytest

from rekindle.chat.conversation import Role, Text, ToolCall, ToolResult
from rekindle.chat.reply.events import ReplyOptions
from rekindle.config.choices import Overflow
from rekindle.generation.tokenizer import InfillMarks
from tests.api.client import USER, post
from tests.api.fakes import BOS, FakeResponder

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def asked(responder: FakeResponder | None = None, **fields: Any) -> ReplyOptions:
    """Return the options of the reply to this chat."""
    responder = responder or FakeResponder()
    reply = post(CHAT, {"model": "m", "messages": [USER], **fields}, responder)
    assert reply.status_code == 200, reply.text
    return responder.started[0].options


def conversed(path: str, body: dict[str, Any]) -> FakeResponder:
    responder = FakeResponder()
    reply = post(path, body, responder)
    assert reply.status_code == 200, reply.text
    return responder


def test_options_reach_the_sampler() -> None:
    options = {
        "temperature": 0,
        "top_k": 40.0,
        "top_p": 0.5,
        "min_p": 0.25,
        "typical_p": 0.75,
        "repeat_last_n": -1,
        "repeat_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "mirostat": 2,
        "mirostat_tau": 4,
        "mirostat_eta": 0.5,
        "seed": 7,
        "stop": ["a", "b"],
        "num_predict": 5.0,
        "num_ctx": 4096.0,
    }
    got = asked(options=options)
    for name in options.keys() - {"stop", "num_predict", "num_ctx"}:
        assert getattr(got.sampling, name) == options[name], name
    assert (got.stop, got.max_tokens) == (("a", "b"), 5)


def test_defaults_are_the_servers() -> None:
    got = asked(options={"seed": -1, "stop": "x", "num_predict": -1})
    assert got.sampling == FakeResponder().default_sampling
    assert (got.stop, got.max_tokens) == (("x",), None)
    assert asked(options={"num_predict": 0}).max_tokens is None
    assert asked().n_top_logprobs is None
    assert asked(logprobs=True).n_top_logprobs == 0
    assert asked(logprobs=True, top_logprobs=3).n_top_logprobs == 3


def test_drafts_can_be_switched_off() -> None:
    assert asked().speculate
    assert asked(options={"draft_num_predict": 4}).speculate
    assert not asked(options={"draft_num_predict": 0}).speculate
    assert asked(options={"draft_num_predict": 0}, speculative=True).speculate


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ("json", {"type": "object"}),
        ({"type": "array"}, {"type": "array"}),
        ("", None),
        (None, None),
    ],
)
def test_format_is_a_grammar(given: object, schema: object) -> None:
    grammar = asked(format=given).sampling.grammar
    assert (json.loads(grammar.source) if grammar else None) == schema


@pytest.mark.parametrize(
    ("think", "kwargs", "budget"),
    [
        (None, {}, None),
        (True, {"enable_thinking": True}, None),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}, None),
        (False, {"enable_thinking": False}, 0),
    ],
)
def test_think_switches_the_template(
    think: object, kwargs: dict[str, Any], budget: int | None
) -> None:
    for path in (CHAT, GENERATE):
        responder = conversed(path, {"messages": [USER], "prompt": "hi", "think": think})
        assert responder.conversations[0].template_kwargs == kwargs
        assert responder.started[0].options.reasoning_budget == budget


def test_results_without_ids_answer_calls_in_their_order() -> None:
    calls = [
        {"function": {"name": "read", "arguments": {"path": "a b"}}},
        {"function": {"name": "now"}},
        {"function": {"name": "read", "arguments": {"path": "c"}}},
    ]
    history = [
        USER,
        {"role": "assistant", "thinking": "Hm.", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "now", "content": "12"},
        {"role": "tool", "content": "A"},
        {"role": "tool", "name": "read", "content": "C"},
        {"role": "tool", "tool_name": "read", "content": "late"},
    ]
    responder = conversed(CHAT, {"messages": history, "tools": [TOOL]})
    _, turn, *results = responder.conversations[0].messages
    assert turn.reasoning == "Hm."
    assert turn.calls == (
        ToolCall("call_1", "read", '{"path": "a b"}'),
        ToolCall("call_2", "now", "{}"),
        ToolCall("call_3", "read", '{"path": "c"}'),
    )
    assert [result.parts for result in results] == [
        (ToolResult("call_2", "now", "12"),),
        (ToolResult("call_1", "read", "A"),),
        (ToolResult("call_3", "read", "C"),),
        (ToolResult("", "read", "late"),),
    ]
    assert [tool.name for tool in responder.conversations[0].tools] == ["read"]


def test_results_may_name_the_id_of_their_call() -> None:
    calls = [{"id": f"call_{name}", "function": {"name": "read"}} for name in "ab"]
    history = [
        USER,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "callb", "content": "B"},
        {"role": "tool", "content": "A"},
    ]
    responder = conversed(CHAT, {"messages": history})
    _, _, *results = responder.conversations[0].messages
    assert [each.parts for each in results] == [
        (ToolResult("call_b", "read", "B"),),
        (ToolResult("call_a", "read", "A"),),
    ]
    history[2] = {"role": "tool", "tool_call_id": "other", "content": "B"}
    refused = post(CHAT, {"messages": history})
    assert refused.status_code == 400
    assert "`messages.2.tool_call_id`" in refused.json()["error"]


def test_images_become_a_line_of_text() -> None:
    pixel = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
        "rkJggg=="
    )
    line = "[image omitted: PNG, 1x1; this model reads text only]"
    chat = conversed(CHAT, {"messages": [{**USER, "images": [pixel]}]})
    assert chat.conversations[0].messages[0].text == f"{line}\nhi"
    generate = conversed(GENERATE, {"prompt": "hi", "images": [pixel]})
    assert generate.conversations[0].messages[0].text == f"{line}\nhi"


def test_generate_is_a_chat_of_one_message() -> None:
    responder = conversed(GENERATE, {"prompt": "Once", "system": "Be brief."})
    messages = responder.conversations[0].messages
    assert [(each.role, each.parts) for each in messages] == [
        (Role.SYSTEM, (Text("Be brief."),)),
        (Role.USER, (Text("Once"),)),
    ]


@pytest.mark.parametrize("prompt", ["be", ""])
def test_a_suffix_asks_for_the_text_before_it(prompt: str) -> None:
    responder = FakeResponder()
    responder.tokenizer.infill = InfillMarks(prefix=1, suffix=2, middle=3)
    reply = post(GENERATE, {"prompt": prompt, "suffix": "en", "stream": False}, responder).json()
    tokens = responder.started[0].prompt.tokens
    assert tokens == (BOS, 1, *prompt.encode(), 2, *b"en", 3)
    assert (reply["response"], "context" in reply) == ("Hello", False)
    lines = post(GENERATE, {"prompt": prompt, "suffix": "en"}, responder).text.splitlines()
    assert "context" not in json.loads(lines[-1])
    post(GENERATE, {"prompt": "be", "suffix": "en", "raw": True}, responder)
    assert responder.started[2].prompt.text == "be"


def test_a_raw_prompt_has_no_template_and_no_context() -> None:
    responder = FakeResponder()
    body = {"prompt": "Once<|im_end|>", "raw": True, "stream": False}
    reply = post(GENERATE, body, responder).json()
    assert responder.conversations == []
    assert responder.started[0].prompt.text == "Once<|im_end|>"
    assert "context" not in reply


def test_the_context_of_a_reply_is_followed_by_the_next_prompt() -> None:
    first = post(GENERATE, {"prompt": "a", "stream": False}).json()
    assert bytes(first["context"]) == b"[user]a"
    responder = FakeResponder()
    post(GENERATE, {"prompt": "b", "context": first["context"], "stream": False}, responder)
    assert bytes(responder.started[0].prompt.tokens) == b"[user]a[user]b"


def test_the_last_message_of_the_assistant_is_continued() -> None:
    open_turn = {"role": "assistant", "content": "The answer is"}
    assert conversed(CHAT, {"messages": [USER, open_turn]}).conversations[0].continue_last
    assert not conversed(CHAT, {"messages": [USER]}).conversations[0].continue_last


@pytest.mark.parametrize(
    ("truncate", "overflow"), [(True, Overflow.TRIM), (False, Overflow.ERROR), (None, None)]
)
def test_truncate_is_our_overflow(truncate: object, overflow: Overflow | None) -> None:
    assert conversed(CHAT, {"messages": [USER], "truncate": truncate}).overflow is overflow


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [{**USER, "content": ["x"]}]}, "`messages.0.content` should be"),
        (CHAT, {"messages": [{"role": "nobody"}]}, "`messages.0.role` should be"),
        (CHAT, {"messages": [USER], "options": {"top_k": 1.5}}, "`options.top_k` should be"),
        (
            CHAT,
            {"messages": [USER], "options": {"mirostat_tau": True}},
            "`options.mirostat_tau` sh",
        ),
        (CHAT, {"messages": [USER], "think": "maybe"}, "`think` should be"),
        (CHAT, {"messages": [USER], "format": "yaml"}, "`format` should be"),
        (CHAT, {"messages": [USER], "keep_alive": "soon"}, "`keep_alive` should be a duration"),
        (CHAT, {"messages": [USER], "keep_alive": True}, "`keep_alive` should be"),
        (CHAT, {"messages": [USER], "tools": [{"type": "x"}]}, "`tools.0.type`"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "Infill is not supported by this model"),
        (GENERATE, {"prompt": "a", "suffix": "b", "system": "c"}, "`suffix` excludes"),
        (GENERATE, {"prompt": "a", "suffix": "b", "context": [1]}, "`suffix` excludes"),
        (GENERATE, {"prompt": "a", "template": "b"}, "Send a finished prompt with `raw`."),
        (GENERATE, {"prompt": "a", "raw": True, "context": [1]}, "`raw` excludes"),
        (GENERATE, {"prompt": "a", "context": [1, 700]}, "700 is not a token"),
        ("/api/embed", {"input": 3}, "`input` should be"),
        ("/api/show", {"model": 3}, "`model` should be"),
    ],
)
def test_wrong_requests_are_refused_in_ollamas_shape(
    path: str, body: dict[str, Any], words: str
) -> None:
    reply = post(path, body)
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json().keys() == {"error"}
    assert words in reply.json()["error"]


def test_unknown_fields_are_ignored() -> None:
    body = {"messages": [{**USER, "extra": 1}], "options": {"shiny": 1}, "more": {}}
    assert post(CHAT, body).status_code == 200
