"""llama-server's samplers and grammars through a real server with the embedded model."""

import json
import math
import re
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess

QUESTION = "Tell me about the sea in a few words."
ADAPTIVE = {"samplers": ["top_k", "temperature", "adaptive_p"], "adaptive_target": 0.3}
SAMPLERS: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 5.0, "dry_allowed_length": 0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "mirostat": {"mirostat": 1, "mirostat_tau": 3.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "dynatemp": {"dynatemp_range": 0.7},
    "top n sigma": {"top_n_sigma": 0.3},
    "adaptive p": ADAPTIVE,
    "letters": {"samplers": "kt", "top_k": 3, "temperature": 2.0},
}


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120)


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 12, "seed": 4, "temperature": 1.0, **fields}
    reply = post(server, "/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    whole: dict[str, Any] = reply.json()
    return whole


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_changes_the_reply_and_a_seed_repeats_it(
    server: ServerProcess, name: str
) -> None:
    fields = {**SAMPLERS[name]}
    first = texts(chat(server, **fields))
    again = texts(chat(server, **fields))
    assert first == again
    # With one seed the two may agree by chance.
    pairs = ((chat(server, seed=seed, **fields), chat(server, seed=seed)) for seed in range(4, 8))
    assert any(texts(one) != texts(other) for one, other in pairs)


def test_samplers_work_with_several_replies_and_probabilities(server: ServerProcess) -> None:
    reply = chat(server, **ADAPTIVE, n=2, logprobs=True, top_logprobs=2, speculative=False)
    assert len(set(texts(reply))) == 2
    for choice in reply["choices"]:
        assert all(len(each["top_logprobs"]) == 2 for each in choice["logprobs"]["content"])


def test_probabilities_after_the_samplers_add_up(server: ServerProcess) -> None:
    reply = chat(server, top_k=3, n_probs=10, post_sampling_probs=True, min_p=0.0, top_p=1.0)
    for each in reply["choices"][0]["logprobs"]["content"]:
        chances = [math.exp(other["logprob"]) for other in each["top_logprobs"]]
        assert 1 <= len(chances) <= 3
        assert sum(chances) == pytest.approx(1.0, abs=1e-3)
        assert each["logprob"] in [other["logprob"] for other in each["top_logprobs"]]


GRAMMAR = r"""
root ::= "The sea is " part " and " part "."
part ::= colour | "(" colour ")"
colour ::= "blue" | "green" | "grey"
"""
PATTERN = r"The sea is \(?(blue|green|grey)\)? and \(?(blue|green|grey)\)?\."


@pytest.mark.parametrize("sampler", [{}, SAMPLERS["mirostat 2"], SAMPLERS["dry"]])
def test_a_reply_follows_its_gbnf(server: ServerProcess, sampler: dict[str, Any]) -> None:
    reply = chat(server, grammar=GRAMMAR, max_tokens=80, **sampler)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert re.fullmatch(PATTERN, texts(reply)[0])
    body = {"prompt": "Say: ", "grammar": GRAMMAR, "max_tokens": 80, "seed": 1, **sampler}
    completed = post(server, "/v1/completions", body).json()["choices"][0]
    assert re.fullmatch(PATTERN, completed["text"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_grammar_with_a_fault_is_a_400_that_says_why(server: ServerProcess, path: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    refused = post(server, path, {**body, "grammar": 'root ::= "a" |\n  b'})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "grammar"
    assert "`root` refers to `b`" in error["message"]


def test_json_schema_as_in_llama_server(server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    [text] = texts(chat(server, json_schema=schema, max_tokens=24))
    assert json.loads(text)["colour"] in ("blue", "green")
    body = {"prompt": "Say: ", "json_schema": schema, "max_tokens": 24}
    completed = post(server, "/v1/completions", body).json()["choices"][0]["text"]
    assert json.loads(completed)["colour"] in ("blue", "green")


LARK = r"""
start: "wave " NUMBER (LF "wave " NUMBER)~1..2
NUMBER: /[0-9]{1,3}/
%import common.LF
"""


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", r"wave-[0-9]{2}/[a-c]", r"wave-[0-9]{2}/[a-c]"),
        ("lark", LARK, r"wave [0-9]{1,3}(\nwave [0-9]{1,3}){1,2}"),
    ],
)
def test_a_custom_tool_gets_the_format_it_asks_for(
    server: ServerProcess, syntax: str, definition: str, pattern: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools = [{"type": "custom", "name": "measure", "description": "Waves.", "format": form}]
    body = {"input": QUESTION, "tools": tools, "tool_choice": {"type": "custom", "name": "measure"}}
    reply = post(server, "/v1/responses", body)
    assert reply.status_code == 200, reply.text
    calls = [item for item in reply.json()["output"] if item["type"] == "custom_tool_call"]
    assert calls
    assert all(re.fullmatch(pattern, call["input"]) for call in calls), calls


def test_a_custom_tool_with_a_bad_format_is_a_400(server: ServerProcess) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "wave("}
    tools = [{"type": "custom", "name": "measure", "format": form}]
    refused = post(server, "/v1/responses", {"input": QUESTION, "tools": tools})
    assert refused.status_code == 400
    assert "`measure`" in refused.json()["error"]["message"]


def test_props_show_every_sampler(server: ServerProcess) -> None:
    settings = httpx.get(f"{server.url}/props").json()["default_generation_settings"]["params"]
    assert settings["mirostat"] == 0
    assert settings["dry_sequence_breakers"] == ["\n", ":", '"', "*"]
    assert settings["samplers"][0] == "penalties"
    assert settings["samplers"][-1] == "temperature"
