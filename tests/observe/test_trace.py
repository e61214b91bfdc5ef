"""`--trace FILE`: the content of a line, the mode of the file, and that no reply waits for it."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rekindle.errors import StartupError
from rekindle.generation.drafts import DraftCount, DraftCounts
from rekindle.observe import trace as trace_module
from rekindle.observe.trace import SentRequests, Trace
from tests.support.records import CLOCK, a_record

MEGABYTE = 2**20


def opened(path: Path, *, max_bytes: int = MEGABYTE, has_prompts: bool = False) -> Trace:
    return Trace(path, max_bytes=max_bytes, has_prompts=has_prompts)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_line_shows_tokens_sources_and_both_sides_of_the_first_mismatch(path: Path) -> None:
    trace = opened(path)
    trace.observe(a_record(miss=CLOCK, namespace="d1ge57"))
    trace.close()
    [line] = lines(path)
    assert line["id"] == "req-1.abc.0"
    assert (line["t"], line["t_end"]) == (1_000_000.0, 1_000_020.0)
    assert (line["model"], line["session"], line["class"]) == ("tiny", "ann", "main")
    assert line["namespace"] == "d1ge57"
    assert (line["prompt_tokens"], line["cached_tokens"]) == (1000, 700)
    assert (line["prefilled_tokens"], line["prefilled_twice_tokens"]) == (300, 20)
    assert line["sources"] == [
        {"source": "live", "start": 0, "stop": 300},
        {"source": "disk", "start": 300, "stop": 700},
    ]
    assert line["miss"]["reason"] == "system_changed"
    assert line["miss"]["before"] == "The time is 10:"
    assert line["miss"]["expected"] == "17:01. Be kind."
    assert line["miss"]["got"] == "18:44. Be kind."
    assert line["miss"]["tokens_lost"] == 640
    assert line["ms"]["first_token"] == 8000
    assert line["finish"] == "stop"


def test_a_line_has_the_drafted_tokens_by_source(path: Path) -> None:
    trace = opened(path)
    trace.observe(a_record(drafts=DraftCounts(store=DraftCount(6, 2))))
    trace.observe(a_record())
    trace.close()
    drafted, plain = lines(path)
    assert drafted["drafts"] == [{"source": "store", "tokens": 6, "accepted": 2}]
    assert plain["drafts"] == []


def test_prompts_are_written_only_where_they_were_asked_for(path: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    for trace in (opened(path), opened(told, has_prompts=True)):
        trace.observe(a_record())
        trace.close()
    assert "the whole prompt" not in path.read_text("utf-8")
    assert lines(told)[0]["prompt"] == "the whole prompt"


def test_only_the_owner_may_read_the_file_even_if_it_existed(path: Path) -> None:
    path.touch(0o644)
    opened(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_file_is_kept_once_and_a_new_private_one_begins(path: Path) -> None:
    trace = opened(path, max_bytes=4000)
    for number in range(30):
        trace.observe(a_record(id=f"r{number}"))
    trace.close()
    older = path.with_name("trace.jsonl.1")
    assert sorted(path.parent.iterdir()) == [path, older]
    kept = [line["id"] for line in (*lines(older), *lines(path))]
    assert kept == [f"r{number}" for number in range(30)][-len(kept) :]
    assert older.stat().st_size <= 4000
    assert path.stat().st_mode & 0o777 == older.stat().st_mode & 0o777 == 0o600
    assert trace.counts() == (30, 0)


def test_a_deleted_file_is_created_again(path: Path) -> None:
    trace = opened(path, max_bytes=1500)
    trace.observe(a_record(id="a"))
    while trace.n_written < 1:
        os.sched_yield()
    path.unlink()
    for name in ("b", "c"):
        trace.observe(a_record(id=name))
    trace.close()
    assert trace.counts() == (3, 0)
    assert lines(path)[-1]["id"] == "c"


def test_a_line_that_a_crash_cut_does_not_spoil_the_next(path: Path) -> None:
    path.write_text('{"id": "cut')
    trace = opened(path)
    trace.observe(a_record())
    trace.close()
    cut, whole = path.read_text("utf-8").splitlines()
    assert cut == '{"id": "cut'
    assert json.loads(whole)["id"] == "req-1.abc.0"


@pytest.mark.parametrize("place", ["no/such/folder/file", "."])
def test_a_file_that_cannot_be_written_is_an_error_at_the_start(place: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^The trace .* cannot be written: "):
        opened(tmp_path / place)


@pytest.fixture
def slow_disk(tmp_path: Path) -> Path:
    """It takes some bytes in, and then nothing until somebody reads them."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    return pipe


def test_lines_are_dropped_and_counted_where_the_disk_is_slow(
    slow_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MAX_WAITING_BYTES", 400_000)
    trace = opened(slow_disk, has_prompts=True)
    for _ in range(50):  # would never come back if anybody waited here
        trace.observe(a_record(prompt_text="x" * 100_000))
    assert 45 <= trace.n_dropped < 50
    reader = threading.Thread(target=lambda: slow_disk.read_bytes())
    reader.start()
    trace.close()
    reader.join()
    n_written, n_dropped = trace.counts()
    assert n_written + n_dropped == 50


def test_a_disk_that_is_full_costs_lines_and_nothing_else(path: Path) -> None:
    trace = opened(Path("/dev/full"))
    trace.observe(a_record())
    trace.observe(a_record())
    trace.close()
    assert trace.counts() == (0, 2)


def app_that_replies(trace: Trace, n_replies: int) -> httpx.ASGITransport:
    async def reply(request: Request) -> Response:
        body = json.loads(await request.body())

        async def end(index: int) -> None:
            trace.observe(a_record(id=f"{body['name']}.{index}"))

        await asyncio.gather(*(end(index) for index in range(n_replies)))
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/v1/{rest:path}", reply, methods=["POST"])])
    return httpx.ASGITransport(SentRequests(app, keeps_bodies=True))


def test_of_all_replies_to_a_request_one_has_its_body_as_it_was_sent(path: Path) -> None:
    trace = opened(path, has_prompts=True)

    async def run() -> None:
        transport = app_that_replies(trace, n_replies=2)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            spread = json.dumps({"name": "a", "text": "two\nlines \u2028 \u00e9"}, indent=2)
            await asyncio.gather(
                client.post("/v1/messages", content=spread),
                client.post("/v1/completions", json={"name": "b"}),
            )

    asyncio.run(run())
    trace.close()
    found = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    told = {(each["id"][0], each["path"]) for each in found}
    assert told == {("a", "/v1/messages"), ("b", "/v1/completions")}
    bodies = [each["body"] for each in found if "body" in each]
    assert sorted(bodies, key=str) == [
        {"name": "a", "text": "two\nlines \u2028 \u00e9"},
        {"name": "b"},
    ]
