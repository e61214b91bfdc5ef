"""llama-server's own completions: its fields, its reply, its streams byte for byte."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.chat.reply.events import FinishReason, LineLimits, ReplyProgress, ReplyText
from rekindle.generation.tokenizer import InfillMarks
from tests.api.client import complete, post
from tests.api.fakes import HELLO, FakeResponder, Script, done
from tests.api.openai.test_streams import AWKWARD, BROKEN, SCORED, SLOW, masked

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS: Script = (
    ReplyText("Hel", tokens=(72, 101, 108)),
    ReplyText("lo\n", tokens=(108, 111, 10)),
    done(6),
)


def native(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/completion", {"prompt": "Once", **fields}, responder)


def entry(script: Script = HELLO, **fields: Any) -> dict[str, Any]:
    reply = native(FakeResponder(script), **fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def refused(path: str = "/completion", **fields: Any) -> tuple[int, str | None]:
    body = {"prompt": "Once"} if path == "/completion" else GAP
    reply = post(path, {**body, **fields}, filling())
    return reply.status_code, reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("name", "script", "fields"),
    [
        ("native", AWKWARD, {"n_predict": 2, "stop": ["x"]}),
        ("native_tokens", TOKENS, {"id_slot": 3}),
        ("native_two", TOKENS, {"n_cmpl": 2, "response_fields": ["content", "stop"]}),
        ("native_progress", SLOW, {"return_progress": True}),
        ("native_probabilities", SCORED, {"n_probs": 2}),
        ("native_post_sampling", SCORED, {"n_probs": 2, "post_sampling_probs": True}),
        ("native_broken", BROKEN, {}),
    ],
)
def test_stream_matches_its_transcript(name: str, script: Script, fields: dict[str, Any]) -> None:
    reply = native(FakeResponder(script), stream=True, **fields)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert masked(reply.text) == (GOLDEN / f"{name}.sse").read_text()


def test_a_whole_reply_has_llama_servers_keys() -> None:
    reply = entry(TOKENS, return_tokens=True, n_predict=6, temperature=0, stop="x", seed=7)
    settings, timings = reply.pop("generation_settings"), reply.pop("timings")
    assert reply.pop("rekindle")["cached"] == [{"tier": "live", "tokens": 4}]
    assert reply == {
        "index": 0,
        "content": "Hello\n",
        "tokens": [72, 101, 108, 108, 111, 10],
        "id_slot": -1,
        "stop": True,
        "model": "tiny",
        "tokens_predicted": 6,
        "tokens_evaluated": 10,
        "prompt": "Once",
        "has_new_line": True,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 16,
    }
    assert (settings["n_predict"], settings["max_tokens"], settings["seed"]) == (6, 6, 7)
    assert (settings["temperature"], settings["stop"], settings["stream"]) == (0, ["x"], False)
    assert settings["top_k"] == 20  # the server's default
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (6, 4, 6)


def test_token_ids_are_returned_only_on_request() -> None:
    responder = FakeResponder(HELLO)
    native(responder)
    assert not responder.started[-1].options.shows_tokens
    native(responder, return_tokens=True)
    assert responder.started[-1].options.shows_tokens
    native(responder, stream=True)
    assert responder.started[-1].options.shows_tokens


@pytest.mark.parametrize(
    ("end", "n_predict", "stop_type", "truncated"),
    [
        (done(2), 5, "eos", False),
        (replace(done(2), stop_sequence="END"), 5, "word", False),
        (done(2, finish=FinishReason.LENGTH), 2, "limit", False),
        (done(2, finish=FinishReason.LENGTH), 5, "limit", True),
        (done(2, finish=FinishReason.LENGTH), -1, "limit", True),
        (replace(done(2, finish=FinishReason.LENGTH), at_line=True), 5, "limit", False),
    ],
)
def test_the_reply_tells_what_ended_it(
    end: Any, n_predict: int, stop_type: str, truncated: object
) -> None:
    reply = entry((ReplyText("a"), end), n_predict=n_predict)
    assert (reply["stop_type"], reply["truncated"]) == (stop_type, truncated)
    assert reply["stopping_word"] == (end.stop_sequence or "")


def test_response_fields_select_and_flatten() -> None:
    wanted = ["content", "timings/prompt_n", "generation_settings/n_predict", "nothing", "stop/x"]
    assert entry(n_predict=3, response_fields=wanted) == {
        "content": "Hello",
        "timings/prompt_n": 6,
        "generation_settings/n_predict": 3,
    }
    assert "generation_settings" in entry(response_fields=[])


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [b"ab"]),
        ([97, 98], [b"ab"]),
        ([97, "b", 99], [b"abc"]),
        (["ab", "cd"], [b"ab", b"cd"]),
        (["ab", [99, "d"], {"prompt_string": "ef"}], [b"ab", b"cd", b"ef"]),
        ([{"prompt_string": "ab"}, "cd", [99]], [b"ab", b"cd", b"c"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
        ({"prompt_string": "ab"}, [b"ab"]),
        ({"prompt_string": [97, "b"]}, [b"ab"]),
        ([["a", "b"]], [b"ab"]),
    ],
)
def test_prompts_have_all_shapes_of_llama_server(prompt: object, tokens: list[bytes]) -> None:
    responder = FakeResponder()
    reply = native(responder, prompt=prompt)
    assert reply.status_code == 200, reply.text
    assert [bytes(each.prompt.tokens) for each in responder.started] == tokens
    assert isinstance(reply.json(), dict if len(tokens) == 1 else list)


def test_several_replies_come_as_a_list_in_the_order_of_the_prompts() -> None:
    replies = native(FakeResponder(), prompt=["a", "b"], n_cmpl=2, n=7).json()
    assert [each["index"] for each in replies] == [0, 1, 2, 3]
    assert [each["prompt"] for each in replies] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": {}}, "prompt.prompt_string"),
        ({"prompt": [1.5]}, "prompt.0"),
        ({"prompt": [97, [98]]}, "prompt.1"),
        ({"prompt": [97, "b", 999]}, "prompt.2"),
        ({"prompt": ["a", [97, 999]]}, "prompt.1.1"),
        ({"prompt": ["a", [97, "b", 999]]}, "prompt.1.2"),
        ({"prompt": ["a"] * 129}, "prompt"),
        (
            {"prompt": ["a", {"prompt_string": "b", "multimodal_data": ["aaaa"]}]},
            "prompt.1.multimodal_data",
        ),
        ({"n_predict": "5"}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"n_cmpl": 17}, "n_cmpl"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_probs": -1}, "n_probs"),
        ({"response_fields": "content"}, "response_fields"),
        ({"response_fields": [1]}, "response_fields.0"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora.0.id"),
        ({"lora": {"id": 0, "scale": 1}}, "lora"),
        ({"return_tokens": 1}, "return_tokens"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_fields_are_errors_that_name_them(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == (400, param)


def test_limits_for_editors_reach_the_reply() -> None:
    responder = FakeResponder()
    native(responder, n_indent=4, t_max_predict_ms=250, n_probs=3, logprobs=9)
    options = responder.started[0].options
    assert options.line_limits == LineLimits(n_indent=4, seconds=0.25)
    assert options.n_top_logprobs == 3
    native(responder, t_max_predict_ms=-1, logprobs=9, max_tokens=5, n_predict=4)
    options = responder.started[1].options
    assert options.line_limits == LineLimits()
    assert (options.n_top_logprobs, options.max_tokens) == (9, 4)


def test_every_event_has_timings_on_request() -> None:
    script = (ReplyProgress(10, 10, 4, 1.25), *TOKENS)
    stream = native(FakeResponder(script), stream=True, timings_per_token=True).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    first, second, last = (event["timings"] for event in events)
    assert (first["cache_n"], first["prompt_n"], first["prompt_ms"]) == (4, 6, 1250.0)
    assert (first["predicted_n"], second["predicted_n"], last["predicted_n"]) == (3, 6, 6)


def test_a_slot_names_the_prompt_where_no_key_does() -> None:
    responder = FakeResponder()
    native(responder, id_slot=2)
    native(responder, id_slot=2, cache_key="mine")
    native(responder, id_slot=-1)
    assert [each.options.terms.name for each in responder.started] == ["slot:2", "mine", None]


GAP = {"input_prefix": "def f():\n", "input_suffix": "\nprint(f())"}
MARKS = InfillMarks(1, 2, 3, 4, 5)


def filling() -> FakeResponder:
    responder = FakeResponder()
    responder.tokenizer.infill = MARKS
    responder.tokenizer.bos_token = None
    return responder


def test_an_infill_is_built_of_chunks_prefix_and_suffix() -> None:
    responder = filling()
    chunks = [{"filename": "a.py", "text": "a = 1\n", "time": 5}, {"text": "b"}]
    reply = post("/infill", {**GAP, "prompt": "    ret", "input_extra": chunks}, responder)
    assert reply.status_code == 200
    assert bytes(responder.started[0].prompt.tokens) == (
        b"\4myproject\n\5a.py\na = 1\n\5tmp\nb\5filename\n\1def f():\n    ret\2\nprint(f())\3"
    )


def test_a_model_without_infill_tokens_is_refused_as_by_llama_server() -> None:
    reply = post("/infill", GAP)
    assert reply.status_code == 501
    error = reply.json()["error"]
    assert error["type"] == "not_supported_error"
    assert error["message"].startswith("Infill is not supported by this model: prefix token is")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_prefix": ["a", 999]}, "input_prefix.1"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_extra": [{}]}, "input_extra.0.text"),
        ({"input_extra": [{"filename": "ok"}]}, "input_extra.0.text"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra.0.filename"),
    ],
)
def test_wrong_fields_of_an_infill_are_errors(fields: dict[str, Any], param: str) -> None:
    assert refused("/infill", **fields) == (400, param)


def test_openais_suffix_fills_in_the_middle_too() -> None:
    responder = filling()
    assert complete(responder, suffix="end").json()["choices"][0]["text"] == "Hello"
    assert bytes(responder.started[0].prompt.tokens).endswith(b"\1Once\2end\3")
    plain = FakeResponder()
    complete(plain, suffix="")
    assert bytes(plain.started[0].prompt.tokens) == b"Once"


def test_lookups_take_native_requests() -> None:
    for body in (GAP, {"prompt": [97, "b"]}, {"prompt": {"prompt_string": "ab"}}):
        reply = post("/v1/cache/lookup", body, filling())
        assert reply.status_code == 200, reply.text
        assert re.search(r'"prompt_tokens":\d+', reply.text), reply.text
