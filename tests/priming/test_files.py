"""Files to prime become requests, or one sentence that names the file and the line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import PrimeError, UnreadableFile
from rekindle.priming.files import PrimeRequest, is_prime_file, parse_prime_file

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
OPENAI_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA},
}
ANTHROPIC_TOOL = {"name": "find", "description": "Finds.", "input_schema": SCHEMA}
RESPONSES_TOOL = {
    "type": "function",
    "name": "find",
    "description": "Finds.",
    "parameters": SCHEMA,
}
# Fields of every priming request, for any file.
PRIMING = {"stream": True, "cache_prompt": True, "persist": True}


def parsed(name: str, content: object) -> tuple[PrimeRequest, ...]:
    text = content if isinstance(content, str) else json.dumps(content)
    return parse_prime_file(Path(name), text.encode())


def only(name: str, content: object) -> PrimeRequest:
    [request] = parsed(name, content)
    return request


def short_form(**fields: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": ""}]
    body = {"messages": messages, "max_tokens": 0, "return_progress": True, "cache_key": "agent"}
    return {**PRIMING, **body, **fields}


@pytest.mark.parametrize("name", ["agent.md", "agent.txt"])
def test_a_text_is_the_system_prompt_as_it_stands(name: str) -> None:
    request = only(name, "Be brief.")
    assert request == PrimeRequest("/v1/chat/completions", short_form(), name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("agent.json", '{"system": "Be brief.", "tools": [{"name": "find", "parameters": {}}]}'),
        ("agent.jsonl", '\n{"system": "Be brief.", "tools": [{"name": "find", "parameters": {}}]}'),
        ("agent.yaml", "system: Be brief.\ntools:\n  - name: find\n    parameters: {}\n"),
        ("agent.yml", "{system: Be brief., tools: [{name: find, parameters: {}}]}"),
        ("agent.toml", 'system = "Be brief."\n[[tools]]\nname = "find"\nparameters = {}\n'),
    ],
)
def test_every_format_says_the_same(name: str, content: str) -> None:
    function = {"name": "find", "parameters": {}}
    tools = [{"type": "function", "function": function}]
    assert only(name, content).body == short_form(tools=tools)


@pytest.mark.parametrize("tool", [OPENAI_TOOL, ANTHROPIC_TOOL, RESPONSES_TOOL])
def test_the_system_prompt_comes_first_and_every_tool_is_there(tool: dict[str, Any]) -> None:
    other = {"name": "other", "input_schema": {}}
    body = only("agent.json", {"tools": [tool, other], "system": "Be brief."}).body
    assert body["messages"][0] == SYSTEM
    assert body["tools"] == [
        OPENAI_TOOL,
        {"type": "function", "function": {"name": "other", "parameters": {}}},
    ]


def test_the_file_chooses_the_key_and_its_stem_is_the_key_otherwise() -> None:
    assert only("a/planner.json", {"system": "x"}).body["cache_key"] == "planner"
    [packed] = parse_prime_file(Path("planner.json.gz"), gzip.compress(b'{"system": "x"}'))
    assert packed.body["cache_key"] == "planner"
    chosen = {"system": "x", "cache_key": "mine", "model": "m", "reasoning_effort": "low"}
    body = only("planner.json", chosen).body
    assert (body["cache_key"], body["model"], body["reasoning_effort"]) == ("mine", "m", "low")


def test_a_stem_that_is_no_key_is_made_one() -> None:
    assert only("my agent [b].md", "x").body["cache_key"] == "my-agent--b-"
    assert only("a" * 200 + ".md", "x").body["cache_key"] == "a" * 100


def test_requests_of_one_file_have_keys_of_their_own() -> None:
    lines = [{"system": "a"}, {"system": "b", "cache_key": "mine"}, {"system": "c"}]
    requests = parsed("log.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert [request.body["cache_key"] for request in requests] == ["log:1", "mine", "log:3"]
    assert [request.name for request in requests] == ["log.jsonl:1", "log.jsonl:2", "log.jsonl:3"]


SAMPLING = {"temperature": 1, "top_p": 0.5, "n": 3, "seed": 1, "stop": ["x"], "logprobs": True}
CHAT = {"messages": [SYSTEM, USER], "tools": [OPENAI_TOOL], "tool_choice": "auto", "model": "m"}
MESSAGES = {"system": "Be brief.", "messages": [USER], "tools": [ANTHROPIC_TOOL], "model": "m"}
RESPONSES = {"instructions": "Be brief.", "input": "hi", "tools": [RESPONSES_TOOL], "model": "m"}
COMPLETION = {"prompt": "Once upon", "model": "m"}
PROGRESS = {"return_progress": True}
RECORDED = [
    (CHAT, {"max_completion_tokens": 9}, "/v1/chat/completions", {"max_tokens": 0, **PROGRESS}),
    (MESSAGES, {"max_tokens": 9, "stop_sequences": ["x"]}, "/v1/messages", {"max_tokens": 0}),
    (
        RESPONSES,
        {"max_output_tokens": 9, "store": True},
        "/v1/responses",
        {"max_output_tokens": 0, "store": False},
    ),
    (
        COMPLETION,
        {"max_tokens": 9, "echo": True, "best_of": 2},
        "/v1/completions",
        {"max_tokens": 0, **PROGRESS},
    ),
]


@pytest.mark.parametrize(("body", "reply", "path", "priming"), RECORDED)
def test_a_recorded_body_keeps_what_makes_its_prompt_and_samples_nothing(
    body: dict[str, Any], reply: dict[str, Any], path: str, priming: dict[str, Any]
) -> None:
    recorded = {**SAMPLING, **reply, **body, "stream": False, "cache_prompt": False}
    request = only("log.json", recorded)
    assert request.path == path
    assert request.body == {**body, **PRIMING, **priming, "cache_key": "log"}


@pytest.mark.parametrize(("body", "_reply", "path", "_priming"), RECORDED)
def test_a_recorded_line_is_the_request_that_its_path_says(
    body: dict[str, Any], _reply: object, path: str, _priming: object
) -> None:
    line = {"client": "pi", "method": "POST", "headers": {}, "path": f"{path}?beta=true"}
    request = only("log.jsonl", {**line, "body": body, "reply": {"text": "no"}})
    assert (request.path, request.body) == (path, only("log.json", body).body)


def test_recorded_traffic_without_a_prompt_is_left_out() -> None:
    lines: list[dict[str, Any]] = [
        {"method": "GET", "path": "/v1/models", "body": None},
        {"method": "POST", "path": "/v1/messages/count_tokens", "body": MESSAGES},
        {"method": "POST", "path": "/v1/messages", "body": MESSAGES},
    ]
    [request] = parsed("log.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert (request.name, request.body["cache_key"]) == ("log.jsonl:3", "log")
    with pytest.raises(PrimeError, match=r"^log\.json holds no request that can be primed\.$"):
        parsed("log.json", lines[0])


@pytest.mark.parametrize(
    "sign",
    [
        {"system": "Be brief."},
        {"tools": [ANTHROPIC_TOOL]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
    ],
)
def test_one_sign_of_anthropic_is_enough(sign: dict[str, Any]) -> None:
    assert only("log.json", {"messages": [USER], **sign}).path == "/v1/messages"


def test_each_prompt_of_a_completion_is_a_request_of_its_own() -> None:
    for prompts in (["a", "b"], [[1, 2], [3]]):
        requests = parsed("log.json", {"prompt": prompts})
        assert [request.body["prompt"] for request in requests] == prompts
    assert only("log.json", {"prompt": [1, 2, 3]}).body["prompt"] == [1, 2, 3]


def test_packed_traffic_is_read() -> None:
    lines = "".join(json.dumps({"path": "/v1/messages", "body": MESSAGES}) + "\n" for _ in range(2))
    requests = parse_prime_file(Path("pi.jsonl.gz"), gzip.compress(lines.encode()))
    assert [request.body["cache_key"] for request in requests] == ["pi:1", "pi:2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{\n"system": x}', "a.json:2: not valid JSON: Expecting value."),
        ("a.jsonl", '{"system": "x"}\n\n{', "a.jsonl:3: not valid JSON: "),
        ("a.yaml", "system: x\ntools: [", "a.yaml:2: not valid YAML: "),
        ("a.yaml", "system: x\nmodel: 2026-01-01", "a.yaml: a value cannot be sent as JSON: "),
        ("a.toml", 'system = "x"\ny', "a.toml: not valid TOML: "),
        ("a.jsonl", '{"system": "x"}\n[1]', "a.jsonl:2: a request is an object, not a list."),
        ("a.json", "{}", "a.json: `system` must be the text of the system prompt."),
        ("a.txt", " \n", "a.txt: `system` must be the text of the system prompt."),
        (
            "a.json",
            '{"sytem": "x"}',
            "'sytem' is not a field of the short form, which has cache_key,",
        ),
        ("a.json", '{"system": "x", "tools": {}}', "a.json: `tools` must be a list."),
        ("a.json", '{"system": "x", "tools": [{}]}', "a.json: `tools.0` has no name."),
        ("a.pdf", "x", "a.pdf: a file to prime must end in one of .json, "),
        ("a.json.gz", "x", "a.json.gz is not a complete gzip file: "),
        ("a.txt", b"\xff", "a.txt is not UTF-8 text."),
        ("a.jsonl", "", "a.jsonl holds no request that can be primed."),
    ],
)
def test_what_cannot_be_primed_is_named_with_file_and_line(
    name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises((PrimeError, UnreadableFile)) as failed:
        parse_prime_file(Path(name), content.encode() if isinstance(content, str) else content)
    assert message in failed.value.message


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.YML", "a.toml", "a.md", "a.txt"])
def test_the_files_that_can_be_read_are_known_by_their_names(name: str) -> None:
    assert is_prime_file(Path(name))
    assert not is_prime_file(Path(f"{name}.swp"))
