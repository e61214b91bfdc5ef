"""`rekindle replay` against the app on fakes, behind a real socket."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from rekindle.chat.reply.events import ReplyText
from rekindle.cli import app
from rekindle.cli.traces.replay import labels_of
from rekindle.errors import DecodeFailed, StartupError
from rekindle.replay.as_chat import as_chat
from rekindle.replay.client import Changes, Outcome, Server
from rekindle.replay.prompts import FloorCounter
from rekindle.replay.stream import Counts
from rekindle.replay.traffic import ReplayRequest
from tests.api.client import serving
from tests.api.fakes import HELLO, FakeResponder, Script, Wait, api_settings

USER = {"role": "user", "content": "Hello"}
WAIT_SECONDS = 30
CHAT = {"messages": [USER], "model": "scripted-1", "max_completion_tokens": 8192}


def replay(*arguments: object) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(
        app, ["replay", *map(str, arguments)], env={**cleared, "COLUMNS": "200"}
    )


def refusal(*arguments: object) -> str:
    error = replay(*arguments).exception
    assert isinstance(error, StartupError), error
    return error.message


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One request in each dialect."""
    file = tmp_path / "trace.jsonl"
    bodies: list[dict[str, Any]] = [
        CHAT,
        {"system": "Be brief.", "messages": [USER], "max_tokens": 4000},
        {"input": "Hello", "store": False},
        {"prompt": "Once"},
    ]
    file.write_text("\n".join(map(json.dumps, bodies)))
    return file


def test_two_servers_stand_side_by_side_with_every_dialect_counted(trace: Path) -> None:
    with serving(FakeResponder()) as one, serving(FakeResponder()) as other:
        shown = replay(trace, "--url", f"{one}/v1/", "--url", other, "--json")
    assert shown.exit_code == 0, shown.output
    servers = json.loads(shown.stdout)["servers"]
    assert [server["server"] for server in servers] == [f"{one}/v1/", other]
    for server in servers:
        total = server["total"]
        assert (total["requests"], total["errors"]) == (4, 0)
        assert (total["prompt_tokens"], total["cached_tokens"]) == (40, 16)
        assert total["prefilled_tokens"] == 24
        assert total["first_token_p95_seconds"] > 0
        [run] = server["runs"]
        # One byte is one token: of the same question only the ends differ.
        floors = [each["floor_tokens"] for each in run["each"]]
        assert floors == [len("[user]Hello"), len("[system]Be brief.[user]Hello") - 1, 0, 4]


def test_replies_are_capped_and_the_servers_own_model_is_asked(trace: Path) -> None:
    responder = FakeResponder()
    with serving(responder) as url:
        assert replay(trace, "--url", url).exit_code == 0
        assert replay(trace, "--url", url, "--max-tokens", 0).exit_code == 0
    limits = [started.options.max_tokens for started in responder.started]
    assert limits == [16, 16, 16, 16, 8192, 4000, None, None]


def test_an_error_names_its_request_and_the_others_are_sent(trace: Path, tmp_path: Path) -> None:
    broken: Script = (ReplyText("Hel"), DecodeFailed("llama.cpp gave up."))
    responder = FakeResponder(lambda number: broken if number == 1 else HELLO)
    page = tmp_path / "page.html"
    with serving(responder) as url:
        shown = replay(trace, "--url", url, "--html", page)
    assert shown.exit_code == 1
    assert f"trace.jsonl:2 at {url}: llama.cpp gave up." in shown.stderr
    rows = {row[1].strip(): row[2].strip() for row in map(_cells, shown.stdout.splitlines()) if row}
    assert (rows["requests"], rows["errors"], rows["prompt tokens"]) == ("4", "1", "30")
    assert "llama.cpp gave up" in page.read_text("utf-8")


def _cells(line: str) -> list[str]:
    cells = line.split("|")
    return cells if len(cells) == 4 else []


def test_repeats_take_the_servers_in_alternating_order(trace: Path) -> None:
    order: list[str] = []

    def noted(name: str) -> FakeResponder:
        def script(_: int) -> Script:
            order.append(name)
            return HELLO

        return FakeResponder(script)

    with serving(noted("one")) as first, serving(noted("other")) as second:
        arguments = (trace, "--limit", 1, "--url", first, "--url", second, "--repeat", 3)
        shown = replay(*arguments, "--json")
    assert order == ["one", "other", "other", "one", "one", "other"]
    report = json.loads(shown.stdout)
    assert [[run["repeat"] for run in each["runs"]] for each in report["servers"]] == [
        [1, 2, 3]
    ] * 2
    # A prompt of an earlier repeat does not count as new.
    floors = [run["floor_tokens"] for run in report["servers"][0]["runs"]]
    assert floors == [len("[user]Hello"), 0, 0]


def test_the_key_is_sent_and_asked_for_where_it_is_missing(trace: Path) -> None:
    with serving(FakeResponder(), api_settings(api_keys=("secret",))) as url:
        assert replay(trace, "--url", url, "--api-key", "secret").exit_code == 0
        assert (
            refusal(trace, "--url", url) == f"{url} denied access (401): pass its key in --api-key."
        )


def test_what_cannot_begin_says_so_before_anything_is_sent(trace: Path, tmp_path: Path) -> None:
    responder = FakeResponder()
    with serving(responder) as url:
        gone = refusal(trace, "--url", url, "--url", "http://127.0.0.1:9")
        assert gone.startswith("http://127.0.0.1:9 cannot be reached: ")
        page = tmp_path / "no" / "page.html"
        assert "cannot be written" in refusal(trace, "--url", url, "--html", page)
        assert "--shape" in refusal(trace, "--url", url, "--shape", "fast")
    assert not responder.started


def test_ctrl_c_prints_what_there_is_so_far(trace: Path) -> None:
    second_has_come = threading.Event()

    def script(number: int) -> Script:
        if number == 0:
            return HELLO
        second_has_come.set()
        return (Wait(),)

    responder = FakeResponder(script)

    def interrupt() -> None:
        second_has_come.wait(WAIT_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)

    with serving(responder) as url:
        thread = threading.Thread(target=interrupt)
        thread.start()
        shown = replay(trace, "--url", url, "--json")
        thread.join()
    assert shown.exit_code == 130
    report = json.loads(shown.stdout)
    assert report["interrupted"]
    assert report["servers"][0]["total"]["requests"] == 1
    assert report["servers"][0]["total"]["floor_tokens"] == len("[user]Hello")


def test_the_same_url_twice_is_two_columns() -> None:
    assert labels_of(["a", "b", "a"]) == ["a", "b", "a (2)"]


def request(path: str, **body: Any) -> ReplayRequest:
    return ReplayRequest("", path, body, (("x-session-id", "s"),), "", 0)


def outcome(index: int, n_prompt: int | None, text: str | None = None) -> Outcome:
    return Outcome(index, float(index), 1.0, 0.5, Counts(n_prompt=n_prompt), text)


def floors_at(
    endpoints: dict[str, Any], requests: list[ReplayRequest], outcomes: list[Outcome]
) -> list[tuple[int, bool, bool]]:
    """With a server that has only these endpoints, each with its one answer."""

    def answer(asked: httpx.Request) -> httpx.Response:
        given = endpoints.get(asked.url.path)
        if callable(given):
            given = given(json.loads(asked.content))
        return httpx.Response(404) if given is None else httpx.Response(200, json=given)

    async def count() -> list[tuple[int, bool, bool]]:
        server = Server("http://test", None, Changes(None, None))
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://test"
        ) as http:
            await server.http.aclose()
            server.http = http
            return [
                (each.n_floor, each.is_exact, each.by_characters)
                async for each in FloorCounter(server).count(requests, outcomes)
            ]

    return asyncio.run(count())


def said(asked: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [ord(character) for character in asked["content"]]}


def test_a_template_that_is_told_as_text_is_tokenised() -> None:
    def render(asked: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": "".join(each["content"] for each in asked["messages"])}

    first = request("/v1/chat/completions", messages=[USER])
    grown = [USER, {"role": "assistant", "content": " you"}, {"role": "user", "content": "!!"}]
    endpoints = {"/apply-template": render, "/tokenize": said}
    then = request("/v1/chat/completions", messages=grown)
    assert floors_at(endpoints, [first, then], [outcome(0, 5, " you"), outcome(1, 12)]) == [
        (5, True, False),
        (2, False, False),
    ]


def test_a_server_that_only_tokenises_conversations_is_asked_that_way() -> None:
    def tokenise(asked: dict[str, Any]) -> dict[str, Any] | None:
        return {"tokens": [1, 2, 3]} if "messages" in asked else None

    asked = [request("/v1/chat/completions", messages=[USER])]
    assert floors_at({"/tokenize": tokenise}, asked, [outcome(0, 3)]) == [(3, True, False)]


def test_without_any_of_these_endpoints_characters_are_counted() -> None:
    texts = ("x" * 400, "x" * 400 + "y" * 40)
    requests = [request("/v1/completions", prompt=text) for text in texts]
    [(first, _, _), (then, is_exact, by_characters)] = floors_at(
        {}, requests, [outcome(0, None), outcome(1, None)]
    )
    assert (first, then) == (101, 11)  # with the quotes
    assert by_characters
    assert not is_exact


def test_failed_requests_have_no_floor_and_teach_nothing() -> None:
    requests = [request("/v1/completions", prompt="abc")] * 2
    failed = Outcome(0, 0.0, 1.0, error="500")
    assert floors_at({"/tokenize": said}, requests, [failed, outcome(1, 3)]) == [(3, True, False)]


def test_other_dialects_are_read_as_chat() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "find", "input": {"a": 1}}
    body = as_chat(
        request(
            "/v1/messages",
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            tools=[{"name": "find", "input_schema": {"type": "object"}}],
            messages=[
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, call],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}],
                },
            ],
        )
    )
    assert body is not None
    assert [message["role"] for message in body["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert body["messages"][2]["reasoning_content"] == "Hm"
    assert json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert body["tools"][0]["function"]["name"] == "find"
    assert as_chat(request("/v1/responses", input="a", previous_response_id="resp_1")) is None


def test_a_recorded_body_is_sent_with_streamed_usage_and_its_session() -> None:
    server = Server("http://test/v1", None, Changes(16, "mine"))
    body = server.body_of(
        request("/v1/chat/completions", messages=[USER], stream=False, max_tokens=4)
    )
    assert body == {
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "model": "mine",
    }
    assert "stream_options" not in server.body_of(request("/v1/messages", messages=[USER]))
    asyncio.run(server.http.aclose())


def test_the_session_is_sent_and_a_stream_that_breaks_off_is_an_error() -> None:
    sent: list[httpx.Headers] = []

    def answer(asked: httpx.Request) -> httpx.Response:
        sent.append(asked.headers)
        whole = b'data: {"type": "message_stop"}\n\n'
        return httpx.Response(200, content=whole if len(sent) == 1 else b": ping\n\n")

    async def send() -> list[Outcome]:
        server = Server("http://test", "key", Changes(None, None))
        await server.http.aclose()
        server.http = httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://test"
        )
        async with server.http:
            asked = request("/v1/messages", messages=[USER])
            return [await server.send(index, asked, 0.0) for index in range(2)]

    whole, broken = asyncio.run(send())
    assert sent[0]["x-session-id"] == "s"
    assert "anthropic-version" in sent[0]
    assert whole.error is None
    assert broken.error == "The stream ended before the reply did"
