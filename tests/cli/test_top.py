"""`rekindle top`: frames from recorded replies, rates between two, a server that goes away."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from rekindle.api.cache.bodies import SessionEntry
from rekindle.api.native.schema import SlotProps
from rekindle.cli import app
from rekindle.cli.remote import Remote
from rekindle.cli.top.command import Observer, frames
from rekindle.cli.top.snapshot import (
    Metrics,
    ServerSnapshot,
    TierView,
    Tokens,
    rates_between,
    snapshot_of,
)
from rekindle.cli.top.view import frame
from rekindle.generation.events import CacheSource
from rekindle.generation.request import Rank
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    SlotStatus,
    TierCounters,
    TierStatus,
)
from rekindle.observe.telemetry import Telemetry
from tests.api.client import serving
from tests.api.fakes import CARD, FakeResponder, api_settings
from tests.support.records import a_record

URL = "http://127.0.0.1:8080"
PROPS = {
    "model_alias": "Qwen3-0.6B-Q8_0",
    "rekindle": {"version": "1.2.3", "uptime_seconds": 7300.0},
}
SLOTS: list[dict[str, Any]] = [
    {
        "id": 0,
        "n_ctx": 4096,
        "is_processing": True,
        "id_task": "req-1",
        "next_token": [{"n_decoded": 34}],
        "session": "ann",
        "class": "main",
        "n_prompt_tokens": 1200,
        "n_rows": 1234,
    },
    {
        "id": 1,
        "n_ctx": 4096,
        "is_processing": False,
        "id_task": None,
        "next_token": [{"n_decoded": 0}],
        "session": "[bold]a-session-with-a-very-long-name-that-no-terminal-has-room-for" * 2,
        "class": "ephemeral",
        "n_prompt_tokens": 0,
        "n_rows": 0,
    },
]
SESSIONS: list[dict[str, Any]] = [
    {
        "session": "ann",
        "last_used": 990.0,
        "requests": 12,
        "prompt_tokens": 1000,
        "cached_tokens": 900,
        "prefilled_tokens": 100,
        "prefilled_twice_tokens": 3,
    },
    {
        "session": "another-session-with-a-long-name",
        "last_used": 0.0,
        "requests": 123456,
        "prompt_tokens": 12_470_382,
        "cached_tokens": 12_345_678,
        "prefilled_tokens": 124_704,
        "prefilled_twice_tokens": 0,
    },
]


def metrics(counters: CacheCounters, *shared: TierStatus) -> str:
    """As a server renders them."""
    tiers = (
        TierStatus(name=CacheSource.MEMORY, n_entries=7, n_bytes=10**9, budget_bytes=4 * 10**9),
        TierStatus(
            name=CacheSource.DISK, n_entries=1234, n_bytes=9 * 10**9, budget_bytes=9 * 10**9
        ),
        *shared,
    )
    status = EngineStatus(
        n_slots=2,
        n_running=1,
        n_waiting=5,
        max_waiting=64,
        n_ctx=4096,
        n_cells=8192,
        n_cells_used=2048,
        cache=CacheStatus(model_class="dense", off_because=None, tiers=tiers, counters=counters),
    )
    telemetry = Telemetry()
    telemetry.watch(lambda: status)
    telemetry.count_reply(a_record(n_prompt=3, n_generated=44, n_remembered_turns=0))
    return telemetry.render().decode()


IDLE = Tokens(
    live=0.0,
    memory=0.0,
    disk=0.0,
    shared=0.0,
    upstream=0.0,
    prefilled=0.0,
    generated=0.0,
)
COUNTERS = CacheCounters(
    live=TierCounters(tokens=1000),
    memory=TierCounters(tokens=500),
    disk=TierCounters(tokens=250),
    prefilled_tokens=250,
)


def snapshot(**changes: Any) -> ServerSnapshot:
    recorded: dict[str, Any] = {
        "taken_at": 1000.0,
        "props": PROPS,
        "props_age_seconds": 0.0,
        "metrics": metrics(COUNTERS),
        "slots": SLOTS,
        "sessions": SESSIONS,
    }
    replies = recorded | changes
    return snapshot_of(**replies | {"metrics": Metrics(replies["metrics"])})


def drawn(what: RenderableType, *, width: int, is_terminal: bool = False) -> str:
    out = io.StringIO()
    Console(
        file=out,
        width=width,
        highlight=False,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
    ).print(what)
    return out.getvalue()


def test_the_recorded_replies_are_of_the_shape_that_the_api_declares() -> None:
    TypeAdapter(list[SlotProps]).validate_python(SLOTS, extra="forbid")
    TypeAdapter(list[SessionEntry]).validate_python(SESSIONS, extra="forbid")


def test_a_snapshot_has_every_number_from_the_place_that_tells_it() -> None:
    taken = snapshot()
    assert taken.tokens == Tokens(
        live=1000, memory=500, disk=250, shared=0, upstream=0, prefilled=250, generated=44
    )
    assert taken.tokens.hit_share == 0.875
    assert (taken.n_busy, taken.n_slots, taken.n_waiting) == (1, 2, 5)
    assert (taken.n_cells_used, taken.n_cells) == (2048, 8192)
    assert taken.tiers[0] == TierView(
        name="memory", n_entries=7, n_bytes=10**9, budget_bytes=4 * 10**9
    )
    assert (taken.slots[0].n_rows, taken.slots[0].n_decoded) == (1234, 34)
    assert taken.sessions[0].n_cached == 900


def test_rates_are_what_was_added_in_the_time_between() -> None:
    later = replace(COUNTERS, live=TierCounters(tokens=1100), prefilled_tokens=350)
    after = snapshot(taken_at=1004.0, metrics=metrics(later))
    rates = rates_between(snapshot(), after)
    assert rates == replace(IDLE, live=25.0, prefilled=25.0)
    assert rates.hit_share == 0.5
    assert rates_between(after, after) is None


def test_a_restarted_server_has_no_rates() -> None:
    anew = snapshot(taken_at=1001.0, metrics=metrics(CacheCounters()))
    assert rates_between(snapshot(), anew) is None


@pytest.mark.parametrize("width", [80, 200])
def test_a_frame_fits_its_terminal_and_tells_the_essentials(width: int) -> None:
    rates = replace(IDLE, live=1234.0, prefilled=56.0, generated=7.0)
    text = drawn(frame(URL, snapshot(), rates, width=width), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for told in (
        "rekindle 1.2.3  Qwen3-0.6B-Q8_0  http://127.0.0.1:8080  up 2 h",
        "slots 1/2  waiting 5  cells 2048/8192 [#####---------------]  25%",
        "hit share",
        "87.5%",
        "9.0 GB",
        "[####################] 100%",
        "busy",
        "ephemeral",
    ):
        assert told in text
    assert re.search(r"from the context +1,000 +1,234\b", text)
    assert re.search(r"prefilled +250 +56\b", text)
    assert re.search(r"ann +12 +1000 +90% +100 +3 +10 s\b", text)
    assert re.search(r"another-session-w\.\.\. +123k +12\.4M +99% +124k +0 +17 min\b", text)
    assert "[bold]a-session-w..." in text
    assert text.isascii()
    assert "\x1b" not in text
    assert "shared" not in text
    assert "upstream" not in text


@pytest.mark.parametrize(("trouble", "state"), [(None, "ok"), ("refused", "not answering")])
def test_a_shared_store_and_an_upstream_have_their_rows(trouble: str | None, state: str) -> None:
    counters = replace(COUNTERS, shared=TierCounters(tokens=125), upstream=TierCounters(tokens=375))
    tier = TierStatus(
        name=CacheSource.SHARED, n_entries=42, n_bytes=0, budget_bytes=0, trouble=trouble
    )
    taken = snapshot(metrics=metrics(counters, tier))
    assert taken.tokens.n_reused == 2250
    text = drawn(frame(URL, taken, replace(IDLE, shared=5.0), width=80), width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert re.search(r"from shared store +125 +5\b", text)
    assert re.search(r"from upstream +375 +0\b", text)
    assert re.search(rf"shared +- +- +42 +{state} *$", text, re.MULTILINE)


def test_wide_tables_stand_side_by_side() -> None:
    narrow = drawn(frame(URL, snapshot(), None, width=80), width=80)
    wide = drawn(frame(URL, snapshot(), None, width=200), width=200)
    assert len(wide.splitlines()) < len(narrow.splitlines())


def test_there_is_colour_on_a_terminal_only() -> None:
    made = frame(URL, snapshot(), None, width=80)
    assert "\x1b[3" in drawn(made, width=80, is_terminal=True)
    assert "\x1b" not in drawn(made, width=80)


def test_long_lists_end_with_how_many_more_there_are() -> None:
    taken = snapshot(slots=SLOTS * 10, sessions=SESSIONS * 12)
    text = drawn(frame(URL, taken, None, width=80), width=80)
    assert "and 4 slots more" in text
    assert "and 14 sessions more" in text


def observer(answer: Callable[[httpx.Request], httpx.Response]) -> Observer:
    clock = count(1000.0)
    http = httpx.Client(base_url=URL, transport=httpx.MockTransport(answer))
    return Observer(Remote(http), now=lambda: next(clock))


@dataclass
class Recorded:
    """A server that tells what was recorded; what was asked is kept."""

    counters: CacheCounters = field(default_factory=COUNTERS.copy)
    is_up: bool = True
    is_loaded: bool = True
    asked: list[str] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if not self.is_up:
            raise httpx.ConnectError("Connection refused")
        if path == "/metrics":
            return httpx.Response(200, text=metrics(self.counters))
        slots = SLOTS if self.is_loaded else []
        bodies = {"/props": PROPS, "/slots": slots, "/v1/sessions": {"data": SESSIONS}}
        return httpx.Response(200, json=bodies[path])


def test_an_unreachable_server_is_reported_and_polled_again() -> None:
    server = Recorded()
    each = frames(observer(server.answer), width=lambda: 80)
    first, second = (drawn(next(each), width=80) for _ in range(2))
    assert "Qwen3" in first
    assert re.search(r"from memory +500 +-", first)
    assert re.search(r"from memory +500 +0\b", second)
    server.is_up = False
    for _ in range(2):
        gone = drawn(next(each), width=80)
        assert gone.startswith(f"{URL} cannot be reached: Connection refused.")
        assert "Retrying." in gone
        assert "Qwen3" in gone
    server.is_up = True
    back = drawn(next(each), width=80)
    assert "Retrying" not in back
    assert re.search(r"from memory +500 +-", back)
    assert server.asked.count("/props") == 2  # it may be another server now


def test_watching_does_not_keep_a_model_loaded() -> None:
    """/props and /v1/sessions count as a use of the model."""
    server = Recorded()
    watched = observer(server.answer)
    for _ in range(5):
        assert watched.look().sessions[0].name == "ann"
    used = [path for path in server.asked if path in ("/props", "/v1/sessions")]
    assert used == ["/props", "/v1/sessions"]
    server.counters = replace(COUNTERS, live=TierCounters(tokens=2000))
    watched.look()
    assert server.asked.count("/v1/sessions") == 2
    server.is_loaded = False
    assert watched.look().model is None
    assert "no model is loaded" in drawn(frame(URL, watched.look(), None, width=80), width=80)
    assert (server.asked.count("/props"), server.asked.count("/v1/sessions")) == (1, 2)


def run(*arguments: str) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(app, ["top", *arguments], env=cleared)


class LoadedResponder(FakeResponder):
    def status(self) -> EngineStatus:
        slot = SlotStatus(
            id=0,
            request_id=None,
            session="ann",
            rank=Rank.MAIN,
            n_prompt=3,
            n_rows=5,
            n_generated=2,
        )
        return replace(super().status(), slots=(slot,))


def test_once_prints_a_frame_and_json_a_snapshot() -> None:
    with serving(LoadedResponder()) as url:
        shown, told = run("--once", "--url", url), run("--json", "--url", url)
        in_a_pipe = run("--url", url)
    assert shown.exit_code == told.exit_code == in_a_pipe.exit_code == 0
    assert CARD.id in shown.stdout
    assert re.search(r"^0 +5 +3 +2 +idle +main +ann *$", shown.stdout, re.MULTILINE)
    assert in_a_pipe.stdout == shown.stdout
    assert json.loads(told.stdout)["model"] == CARD.id


def test_what_cannot_be_watched_is_one_sentence() -> None:
    done = run("--once", "--url", "http://127.0.0.1:9")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("rekindle: http://127.0.0.1:9 cannot be reached: ")
    with serving(FakeResponder(), api_settings(api_keys=("secret",))) as url:
        assert run("--once", "--url", url, "--api-key", "secret").exit_code == 0
        done = run("--once", "--url", url)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "secret" not in done.stderr


def test_on_a_terminal_it_goes_on_until_it_is_interrupted() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", "top", "--url", "http://127.0.0.1:9"],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"Retrying") < 2:
        seen += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    os.close(ours)
