"""Priming in every wire format: a prompt is computed and stored, and nothing else happens."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rekindle.chat.reply.events import FinishReason, ReplyProgress
from rekindle.errors import DecodeFailed
from tests.api.client import post
from tests.api.fakes import FakeResponder, Script, done
from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import (
    Client,
    n_cached_of,
    prose,
)

PREFILLED = "rekindle_prompt_tokens_prefilled_total"
GENERATED = "rekindle_generated_tokens_total"
N_CONTEXT = 4096
HEADER_TOKENS = 12  # that prompts of a chat template share whatever they say, and texts by chance

SCHEMA = {"type": "object", "properties": {"pattern": {"type": "string"}}}
NO_SCHEMA = {"type": "object", "properties": {"a": {"type": "no such type"}}}
TOOLS = (
    ("search", "Searches the files of the project."),
    ("read_file", "Reads one file."),
    ("run_tests", "Runs the tests that match."),
)


@dataclass(frozen=True)
class Dialect:
    """How one API spells a conversation with tools."""

    name: str
    path: str
    limit: str  # the field that bounds a reply

    def body(self, head: str, last: str, *, limit: int, **fields: Any) -> dict[str, Any]:
        turn = {"role": "user", "content": last}
        common = {self.limit: limit, "tools": [self.tool(*tool) for tool in TOOLS], **fields}
        match self.name:
            case "chat":
                return {"messages": [{"role": "system", "content": head}, turn], **common}
            case "responses":
                return {"instructions": head, "input": [turn], **common}
            case _:
                return {"system": head, "messages": [turn], **common}

    def tool(self, name: str, about: str) -> dict[str, Any]:
        match self.name:
            case "chat":
                function = {"name": name, "description": about, "parameters": SCHEMA}
                return {"type": "function", "function": function}
            case "responses":
                described = {"name": name, "description": about, "parameters": SCHEMA}
                return {"type": "function", **described}
            case _:
                return {"name": name, "description": about, "input_schema": SCHEMA}

    def held_to(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The field that makes the reply follow a schema."""
        match self.name:
            case "chat":
                described = {"name": "answer", "schema": schema}
                return {"response_format": {"type": "json_schema", "json_schema": described}}
            case "responses":
                return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
            case _:
                return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def ending(self, reply: dict[str, Any]) -> tuple[object, int]:
        """Return the output, its number of tokens, and why it ended."""
        match self.name:
            case "chat":
                [choice] = reply["choices"]
                assert choice["finish_reason"] == "length"
                message = choice["message"]
                written = message["content"] or message.get("tool_calls")
                return written, reply["usage"]["completion_tokens"]
            case "responses":
                assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
                texts = [part["text"] for item in reply["output"] for part in item["content"]]
                return "".join(texts), reply["usage"]["output_tokens"]
            case _:
                assert reply["stop_reason"] == "max_tokens"
                return reply["content"], reply["usage"]["output_tokens"]

    def error(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self.name == "messages":
            assert answer["type"] == "error"
            assert answer["request_id"]
        detail: dict[str, Any] = answer["error"]
        assert detail["type"]
        assert detail["message"]
        return detail


DIALECTS = [
    Dialect("chat", "/v1/chat/completions", "max_tokens"),
    Dialect("responses", "/v1/responses", "max_output_tokens"),
    Dialect("messages", "/v1/messages", "max_tokens"),
]
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serve(model, "--parallel", "2", "--ctx-size", str(2 * N_CONTEXT)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


def n_prompt_of(reply: dict[str, Any]) -> int:
    story = reply["rekindle"]
    n_prompt: int = n_cached_of(story) + story["prefilled"]
    return n_prompt


@each_dialect
def test_priming_computes_the_prompt_and_not_one_token_more(
    client: Client, dialect: Dialect
) -> None:
    body = dialect.body(prose(f"head {dialect.name}", 80), prose(dialect.name, 40), limit=0)
    before = client.metric(PREFILLED), client.metric(GENERATED)
    primed = client.post(dialect.path, body)
    written, n_written = dialect.ending(primed)
    assert not written
    assert n_written == 0
    n_prefilled = primed["rekindle"]["prefilled"]
    after = client.metric(PREFILLED), client.metric(GENERATED)
    assert after == (before[0] + n_prefilled, before[1])
    # A token is sampled behind a row that is computed. The second time there is none.
    again = client.post(dialect.path, body)
    assert (client.metric(PREFILLED), client.metric(GENERATED)) == after
    assert n_cached_of(again["rekindle"]) == n_prompt_of(primed)


@each_dialect
def test_a_primed_stream_has_no_output_in_it(client: Client, dialect: Dialect) -> None:
    head, last = prose(f"streamed {dialect.name}", 80), prose(dialect.name, 40)
    before = client.metric(GENERATED)
    answer = client.try_post(dialect.path, dialect.body(head, last, limit=0, stream=True))
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    frames: list[dict[str, Any]] = [json.loads(line) for line in lines]
    deltas = [choice["delta"] for frame in frames for choice in frame.get("choices", ())]
    assert not any(delta.get("content") or "tool_calls" in delta for delta in deltas)
    kinds = {frame.get("type", "") for frame in frames}
    assert not {kind for kind in kinds if kind.endswith(".delta") or "content_block" in kind}
    assert client.metric(GENERATED) == before


@each_dialect
def test_priming_is_one_engine_request_with_max_tokens_0(dialect: Dialect) -> None:
    responder = FakeResponder((ReplyProgress(10, 10, 4, 0.5), done(0, finish=FinishReason.LENGTH)))
    reply = post(dialect.path, dialect.body("head", "last", limit=0), responder)
    assert reply.status_code == 200
    [started] = responder.started
    assert started.options.max_tokens == 0
    assert started.options.cache_prompt


@each_dialect
def test_the_primed_prompt_begins_with_the_system_message_and_every_tool(
    client: Client, dialect: Dialect
) -> None:
    head, last = prose("system first", 60), prose("user last", 20)
    chat, _, messages = DIALECTS
    rendered = client.post("/apply-template", chat.body(head, last, limit=0))
    text = rendered["prompt"]
    places = [text.index(head), *(text.index(about) for _, about in TOOLS), text.index(last)]
    assert places == sorted(places)
    assert text.index(head) == text.index("<|im_start|>system\n") + len("<|im_start|>system\n")
    assert all(f'"{name}"' in text for name, _ in TOOLS)
    primed = client.post(dialect.path, dialect.body(head, last, limit=0))
    assert n_prompt_of(primed) == len(rendered["tokens"])
    counted = client.post("/v1/messages/count_tokens", messages.body(head, last, limit=0))
    assert counted["input_tokens"] == n_prompt_of(primed)
    # They are the same tokens: requests in other wire formats find them. The logits after them
    # are kept once something was sampled.
    n_computed = []
    for other in DIALECTS:
        after = client.post(other.path, other.body(head, last, limit=1))
        n_computed.append(n_prompt_of(primed) - n_cached_of(after["rekindle"]))
    assert n_computed in ([1, 0, 0], [0, 0, 0])  # the prompt is that of another dialect, too


@each_dialect
def test_another_question_finds_the_system_message_and_the_tools(
    client: Client, dialect: Dialect
) -> None:
    head = prose(f"shared {dialect.name}", 80)
    primed = client.post(dialect.path, dialect.body(head, "Ready?", limit=0))
    last = prose(f"another {dialect.name}", 30)
    after = client.post(dialect.path, dialect.body(head, last, limit=1))
    rendered = client.post("/apply-template", DIALECTS[0].body(head, last, limit=0))
    n_question = len(client.tokenize(rendered["prompt"].partition("user\n")[2]))
    assert after["rekindle"]["prefilled"] <= n_question + 4
    assert n_cached_of(after["rekindle"]) <= n_prompt_of(primed)


@each_dialect
def test_a_prompt_that_does_not_fit_is_an_error_and_nothing_is_primed(
    client: Client, dialect: Dialect
) -> None:
    head = prose(f"too long {dialect.name}", 80)
    client.wait_until_saved()
    before = client.metric(PREFILLED), client.metric("rekindle_cache_entries", tier="memory")
    for stream in (False, True):
        body = dialect.body(head, "word " * (3 * N_CONTEXT), limit=0, stream=stream)
        answer = client.try_post(dialect.path, body)
        assert answer.status_code == 400
        assert "tokens" in dialect.error(answer.json())["message"]
    client.wait_until_saved()
    assert client.metric("rekindle_cache_entries", tier="memory") == before[1]
    assert client.metric(PREFILLED) == before[0] + 1  # of waiting
    cold = client.post(dialect.path, dialect.body(head, "word", limit=0))
    assert n_cached_of(cold["rekindle"]) <= HEADER_TOKENS


@each_dialect
@pytest.mark.parametrize("n_done", [0, 6])
def test_an_engine_failure_is_an_error_in_the_shape_of_the_wire_format(
    dialect: Dialect, n_done: int
) -> None:
    failing: Script = (ReplyProgress(n_done, 10, 0, 0.5), DecodeFailed("llama.cpp gave up."))
    script = failing if n_done else failing[1:]
    answer = post(dialect.path, dialect.body("head", "last", limit=0), FakeResponder(script))
    assert answer.status_code == 500
    assert dialect.error(answer.json())["message"] == "llama.cpp gave up."


@each_dialect
def test_an_engine_failure_in_a_stream_is_reported_and_the_stream_has_no_normal_end(
    dialect: Dialect,
) -> None:
    script: Script = (ReplyProgress(6, 10, 0, 0.5), DecodeFailed("llama.cpp gave up."))
    body = dialect.body("head", "last", limit=0, stream=True)
    text = post(dialect.path, body, FakeResponder(script)).text
    frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    errors = [frame for frame in frames if "error" in frame or frame.get("type") == "error"]
    assert "llama.cpp gave up." in json.dumps(errors)
    kinds = {frame.get("type") for frame in frames}
    assert kinds.isdisjoint({"message_stop", "response.completed", "response.incomplete"})
    assert ("response.failed" in kinds) == (dialect.name == "responses")
    assert "[DONE]" not in text


@each_dialect
def test_a_failed_turn_keeps_its_committed_rows(client: Client, dialect: Dialect) -> None:
    head, last = prose(f"committed {dialect.name}", 300), prose(f"said {dialect.name}", 40)
    good = dialect.body(head, last, limit=2)
    n_prompt = n_prompt_of(client.post(dialect.path, good))
    too_long = dialect.body(head, f"{last} {'word ' * (3 * N_CONTEXT)}", limit=2)
    held = dialect.held_to(NO_SCHEMA)
    for bad in (too_long, {**good, **held}, {**good, dialect.limit: -7}):
        answer = client.try_post(dialect.path, bad)
        assert answer.status_code == 400, answer.text
        assert dialect.error(answer.json())
        again = client.post(dialect.path, good)
        assert n_cached_of(again["rekindle"]) == n_prompt


@each_dialect
def test_a_turn_whose_client_disconnected_keeps_its_committed_rows(
    client: Client, server: ServerProcess, dialect: Dialect
) -> None:
    head, last = prose(f"left {dialect.name}", 300), prose(f"heard {dialect.name}", 40)
    good = dialect.body(head, last, limit=2)
    n_prompt = n_prompt_of(client.post(dialect.path, good))
    endless = dialect.body(head, f"{last} And now?", limit=3000, stream=True)
    with httpx.stream("POST", f"{server.url}{dialect.path}", json=endless, timeout=60) as stream:
        next(line for line in stream.iter_lines() if "delta" in line)
    server.wait_until_idle()
    again = client.post(dialect.path, good)
    assert n_cached_of(again["rekindle"]) == n_prompt
