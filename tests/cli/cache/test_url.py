"""`rekindle cache ls|show|prune --url`: a running server's cache, over its own endpoints."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli import app
from rekindle.generation.events import CacheSource
from rekindle.generation.request import Rank
from rekindle.generation.status import CacheCounters, CacheStatus, StoredPrefix, TierStatus
from tests.api.client import serving
from tests.api.fakes import FakeResponder, FakeStore

HOUR = 3600.0
OLD = StoredPrefix(
    key="aa11" * 8,
    name=None,
    session="ann",
    rank=Rank.BACKGROUND,
    n_tokens=300,
    n_bytes=4096,
    sources=(CacheSource.MEMORY, CacheSource.DISK),
    hits=2,
    used_at=time.time() - 100 * HOUR,
    pinned_until=None,
)
NEW = replace(OLD, key="bb22" * 8, used_at=time.time())
PINNED = replace(OLD, key="cc33" * 8, pinned_until=time.time() + 10 * HOUR)
NAMED = replace(OLD, key="dd44" * 8, name="docs/v1")
SAME_END = replace(OLD, key="dd44" * 8)
LOST = replace(OLD, key="", name="lost", sources=())


TIER = TierStatus(name=CacheSource.DISK, n_entries=3, n_bytes=5_000_000, budget_bytes=20_000_000)
SHARED = TierStatus(
    name=CacheSource.SHARED,
    n_entries=1,
    n_bytes=0,
    budget_bytes=0,
    directory="redis://store:6379/0",
)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(stored=[NAMED, LOST, NEW, OLD, PINNED, SAME_END])


@pytest.fixture
def url(store: FakeStore) -> Iterator[str]:
    responder = FakeResponder()
    responder.store = store
    responder.cache = CacheStatus(
        model_class="dense", off_because=None, tiers=(TIER, SHARED), counters=CacheCounters()
    )
    with serving(responder) as url:
        yield url


def run(*arguments: str) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(app, ["cache", *arguments], env=cleared)


def refusal(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("rekindle: ").removesuffix("\n")


def test_ls_tells_what_the_server_tells(url: str) -> None:
    lines = run("ls", "--url", f"{url}/v1/").stdout.splitlines()
    assert lines[0].split() == [
        *("key", "name", "tokens", "size", "tiers", "session", "class"),
        *("last", "used", "uses", "pinned"),
    ]
    assert lines[1].split()[:4] == ["dd44dd44dd44", "docs/v1", "300", "4.1"]
    assert "memory,disk" in lines[1]
    assert "background" in lines[1]
    assert "for 10 h" in lines[5]
    assert lines[-1] == "6 prompts; disk 5.0 MB of 20.0 MB; shared 1 entry known here"
    told = json.loads(run("ls", "--url", url, "--json").stdout)
    assert [each["key"] for each in told["data"]][2:4] == [NEW.key, OLD.key]
    assert told["usage"][0]["name"] == "disk"


def test_show_finds_by_name_and_by_how_a_key_starts(url: str) -> None:
    assert json.loads(run("show", "docs/v1", "--url", url, "--json").stdout)["name"] == "docs/v1"
    assert json.loads(run("show", "BB2", "--url", url, "--json").stdout)["key"] == NEW.key
    text = run("show", "cc", "--url", url).stdout
    assert PINNED.key in text
    assert "for 10 h" in text
    assert "not stored any more" in run("show", "lost", "--url", url).stdout
    assert refusal("show", "xyz", "--url", url).startswith(f"Nothing at {url} has the name 'xyz'")
    assert refusal("show", "", "--url", url).startswith("5 keys start with ")


def test_prune_forgets_old_conversations_and_spares_names_and_pins(
    url: str, store: FakeStore
) -> None:
    would = json.loads(
        run("prune", "--older-than", "2d", "--url", url, "--dry-run", "--json").stdout
    )
    assert (would["keys"], would["entries"]) == ([OLD.key], 0)
    assert OLD in store.stored
    did = run("prune", "--older-than", "2d", "--url", url)
    assert did.stdout == "Forgot 1 conversation (1 entry)\n"
    assert store.stored == [NAMED, LOST, NEW, PINNED, SAME_END]


def test_what_makes_no_sense_with_a_server_is_refused(url: str) -> None:
    assert refusal("prune", "--to", "0", "--url", url) == (
        "With --url, prune requires --older-than AGE, without --to."
    )
    assert "--dir is about a directory" in refusal("ls", "--url", url, "--dir", "/x")
    assert "--all is about a directory" in refusal("ls", "--url", url, "--all")


def test_the_address_of_a_shared_store_is_not_taken_for_a_directory(url: str) -> None:
    assert refusal("verify", "--url", url) == f"{url} stores nothing on disk."


@pytest.mark.parametrize("command", [["ls"], ["show", "a"], ["prune", "--older-than", "1d"]])
def test_a_server_that_is_not_there_is_one_sentence(command: list[str]) -> None:
    told = refusal(*command, "--url", "http://127.0.0.1:9")
    assert told.startswith("http://127.0.0.1:9 cannot be reached: ")


def test_a_server_of_somebody_else_is_one_sentence() -> None:
    with serving_html() as url:
        assert refusal("ls", "--url", url) == f"{url} does not answer like a Rekindle server."
        assert refusal("ls", "--url", f"{url}/no") == f"{url}/no refused: 404 Not Found."


@contextmanager
def serving_html() -> Iterator[str]:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if self.path.startswith("/no") else 200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
