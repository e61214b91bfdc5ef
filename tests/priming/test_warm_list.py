"""The warm list on a fake server, round by round: no round comes before the test asks for it."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope
from starlette.types import Send as SendMessage

from rekindle.chat.reply.events import FinishReason
from rekindle.errors import DecodeFailed, Overloaded, PrimeError
from rekindle.priming.files import PrimeRequest, parse_prime_file
from rekindle.priming.stream import Primed, outcome_of
from rekindle.priming.warm_list import WarmList, asgi_sender
from tests.api.client import app_of
from tests.api.fakes import FakeResponder, Script, api_settings, done

PRIMED: Script = (done(0, finish=FinishReason.LENGTH, n_prompt=10, n_cached=4),)


class FakeServer:
    def __init__(self) -> None:
        self.requests: list[PrimeRequest] = []
        self.errors: list[Exception] = []  # of the next requests, in order

    async def send(self, request: PrimeRequest) -> Primed:
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return Primed(n_cached=4, n_computed=6)

    def taken(self) -> list[str]:
        """The system prompts that came since the last time."""
        texts = [request.body["messages"][0]["content"] for request in self.requests]
        self.requests.clear()
        return texts


class Rounds:
    """A clock that stands still: each `next` lets one wait of the list end."""

    def __init__(self) -> None:
        self._waiting = asyncio.Event()
        self._go = asyncio.Event()
        self.waited: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self._waiting.set()
        await self._go.wait()
        self._go.clear()

    async def finished(self) -> None:
        """Until the list waits for its next round."""
        await asyncio.wait_for(self._waiting.wait(), 30)

    async def next(self) -> None:
        self._waiting.clear()
        self._go.set()
        await self.finished()


@asynccontextmanager
async def running(server: FakeServer, *paths: Path | str) -> AsyncIterator[Rounds]:
    rounds = Rounds()
    warm = WarmList([str(path) for path in paths], server.send, 2.0, sleep=rounds.sleep)
    warm.start()
    try:
        await rounds.finished()
        yield rounds
    finally:
        await warm.close()


def test_files_are_primed_at_the_start_one_after_another_and_then_left_alone(
    tmp_path: Path,
) -> None:
    server = FakeServer()
    for name in ("b.md", "a.json"):
        (tmp_path / name).write_text(json.dumps({"system": name}) if "json" in name else name)

    async def run() -> None:
        async with running(server, tmp_path / "b.md", tmp_path / "a.json") as rounds:
            assert server.taken() == ["b.md", "a.json"]
            await rounds.next()
            assert server.taken() == []
            assert rounds.waited == [2.0, 2.0]

    asyncio.run(run())


def test_a_file_is_primed_again_when_its_content_changes_and_not_when_it_is_touched(
    tmp_path: Path,
) -> None:
    server, file = FakeServer(), tmp_path / "agent.md"
    file.write_text("first")

    async def run() -> None:
        async with running(server, file) as rounds:
            assert server.taken() == ["first"]
            os.utime(file, ns=(1, 1))
            await rounds.next()
            assert server.taken() == []
            file.write_text("other")  # of the same size
            await rounds.next()
            assert server.taken() == ["other"]

    asyncio.run(run())


def test_a_pipe_does_not_block_the_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, pipe, file = FakeServer(), tmp_path / "a.md", tmp_path / "b.md"
    os.mkfifo(pipe)
    file.write_text("here")

    async def run() -> None:
        async with running(server, pipe, file):
            assert server.taken() == ["here"]

    asyncio.run(run())
    assert f"{pipe} is not a plain file." in caplog.text


def test_a_file_that_appears_later_is_primed_then_and_again_when_it_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, file = FakeServer(), tmp_path / "agent.md"

    async def run() -> None:
        async with running(server, file) as rounds:
            await rounds.next()
            assert server.taken() == []
            for _ in range(2):
                file.write_text("here")
                await rounds.next()
                assert server.taken() == ["here"]
                file.unlink()
                await rounds.next()
                assert server.taken() == []

    asyncio.run(run())
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [f"warm list: {file} cannot be read: No such file or directory"] * 3


def test_a_broken_file_is_reported_once_and_primed_when_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, file = FakeServer(), tmp_path / "agent.json"
    file.write_text('{"system": ')

    async def run() -> None:
        async with running(server, file) as rounds:
            await rounds.next()
            await rounds.next()
            [warning] = [record.message for record in caplog.records]
            assert warning.startswith(f"warm list: {file}:1: not valid JSON")
            assert server.taken() == []
            file.write_text('{"system": "whole"}')
            await rounds.next()
            assert server.taken() == ["whole"]

    asyncio.run(run())


def test_folders_and_globs_are_expanded_in_each_round(tmp_path: Path) -> None:
    server = FakeServer()
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in ("one.md", "notes.pdf", ".hidden.md"):
        (folder / name).write_text(name)

    async def run() -> None:
        async with running(server, folder, tmp_path / "*.txt", folder / "*.md") as rounds:
            assert server.taken() == ["one.md"]  # though two entries name it
            (folder / "two.md").write_text("two.md")
            (tmp_path / "three.txt").write_text("three.txt")
            await rounds.next()
            assert server.taken() == ["two.md", "three.txt"]

    asyncio.run(run())


def test_a_failure_is_logged_and_the_other_files_are_primed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rekindle")
    server, file = FakeServer(), tmp_path / "agents.jsonl"
    file.write_text('{"system": "a"}\n{"system": "b"}\n{"system": "c"}\n')
    server.errors = [PrimeError("The engine died."), KeyError("a bug")]

    async def run() -> None:
        async with running(server, file):
            assert server.taken() == ["a", "b", "c"]

    asyncio.run(run())
    first, second, third = [record.message for record in caplog.records]
    assert first == f"warm list: {file}:1 was not primed: The engine died."
    assert second == f"warm list: {file}:2 was not primed"
    account = f"warm list: {file}:3 primed tokens=10 cached=4 computed=6 seconds="
    assert third.startswith(account)


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    server, file = FakeServer(), tmp_path / "agent.md"
    file.write_text("patient")
    server.errors = [Overloaded("The queue is full.", retry_after_seconds=1)]

    async def run() -> None:
        async with running(server, file) as rounds:
            assert server.taken() == ["patient"]
            await rounds.next()
            assert server.taken() == ["patient"]
            await rounds.next()
            assert server.taken() == []

    asyncio.run(run())


def test_closing_ends_a_request_that_runs(tmp_path: Path) -> None:
    (tmp_path / "agent.md").write_text("long")

    async def run() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def send(_: PrimeRequest) -> Primed:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        warm = WarmList([str(tmp_path)], send)
        warm.start()
        await begun.wait()
        await warm.close()
        assert ended.is_set()

    asyncio.run(run())


def test_without_paths_nothing_is_looked_up() -> None:
    async def run() -> None:
        has_slept = asyncio.Event()

        async def sleep(_: float) -> None:
            has_slept.set()
            await asyncio.Event().wait()

        warm = WarmList([], FakeServer().send, 2.0, sleep=sleep)
        warm.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(has_slept.wait(), 0.2)
        await warm.close()

    asyncio.run(run())


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "hi"}
BODIES: list[dict[str, Any]] = [
    {"system": "Be brief."},
    {"messages": [SYSTEM, USER], "n": 3, "max_tokens": 7},
    {"system": "Be brief.", "messages": [USER], "max_tokens": 7},
    {"instructions": "Be brief.", "input": "hi", "max_output_tokens": 7},
    {"prompt": "Once", "n": 2, "best_of": 2},
]


def primed(body: dict[str, Any], responder: FakeResponder, key: str | None = None) -> Primed:
    [request] = parse_prime_file(Path("agent.json"), json.dumps(body).encode())
    app = app_of(responder, api_settings(api_keys=("secret",)) if key else None)

    async def send() -> Primed:
        return await asgi_sender(app, [key] if key else [], persist=True)(request)

    return asyncio.run(send())


@pytest.mark.parametrize("body", BODIES)
def test_priming_is_one_engine_call_that_samples_nothing(body: dict[str, Any]) -> None:
    responder = FakeResponder(PRIMED)
    assert primed(body, responder) == Primed(n_cached=4, n_computed=6)
    [started] = responder.started
    assert started.options.max_tokens == 0
    assert started.options.cache_prompt


def test_only_where_there_is_a_disk_the_sender_asks_to_wait_for_it() -> None:
    sent: list[dict[str, Any]] = []

    async def app(_scope: Scope, receive: Receive, send: SendMessage) -> None:
        sent.append(json.loads((await receive())["body"]))
        account = b'data: {"rekindle": {"cached": [{"tokens": 1}], "prefilled": 2}}\n\n'
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": account})

    async def run() -> None:
        [request] = parse_prime_file(Path("agent.md"), b"Be brief.")
        for persist in (True, False):
            primed = await asgi_sender(app, [], persist=persist)(request)
            assert primed == Primed(n_cached=1, n_computed=2)

    asyncio.run(run())
    assert [(body["cache_key"], body["persist"]) for body in sent] == [
        ("agent", True),
        ("agent", False),
    ]


def test_the_sender_has_the_key_of_a_client() -> None:
    assert primed(BODIES[0], FakeResponder(PRIMED), "secret").n_tokens == 10
    with pytest.raises(PrimeError, match="key"):
        primed(BODIES[0], FakeResponder(PRIMED), "wrong")


ENGINE_ERROR = DecodeFailed("llama.cpp gave up.")


@pytest.mark.parametrize("script", [(ENGINE_ERROR,), (done(0), ENGINE_ERROR)], ids=len)
@pytest.mark.parametrize("body", BODIES)
def test_an_engine_error_reaches_the_caller_as_an_answer_or_in_the_stream(
    body: dict[str, Any], script: Script
) -> None:
    with pytest.raises(PrimeError, match=r"llama\.cpp gave up"):
        primed(body, FakeResponder(script))


def test_a_refusal_is_an_error_and_a_full_queue_asks_to_retry() -> None:
    with pytest.raises(PrimeError, match="messages"):
        primed({"messages": []}, FakeResponder())
    full = FakeResponder((Overloaded("The queue is full.", retry_after_seconds=3),))
    for body in BODIES:
        with pytest.raises(Overloaded, match="The queue is full"):
            primed(body, full)


def test_a_stream_that_ends_early_has_primed_nothing() -> None:
    with pytest.raises(PrimeError, match="ended before the prompt was computed"):
        outcome_of([": keep-alive", 'data: {"choices": []}', "data: [DONE]"])
