"""`rekindle cache`: `verify` and `clear`, also beside a running server."""

import os
import pty
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Entry, Retention
from rekindle.cache.turns.database import TurnDatabase
from rekindle.errors import EntryMissing, TierFull
from rekindle.generation.forgetting import Tombstones
from tests.cache.entries import MODEL, file_of, make_entry, open_tier, stored_keys
from tests.cache.turns.writer import make_turn
from tests.support.cache_command import (
    Stored,
    cache,
    everything_in,
    hex_of,
    kept,
)


@pytest.fixture
def server(stored: Stored) -> Iterator[DiskTier]:
    """Has the directory open, as a running server has."""
    with closing(open_tier(stored.directory)) as tier:
        yield tier


def test_verify_of_a_sound_cache_finds_nothing_and_changes_nothing(stored: Stored) -> None:
    for folder in (stored.directory, *stored.directory.rglob("*")):
        folder.chmod(0o500 if folder.is_dir() else 0o400)
    before = everything_in(stored.directory)
    done = cache("verify", "--json", directory=stored.directory)
    after = everything_in(stored.directory)
    for folder in (stored.directory, *stored.directory.rglob("*")):
        folder.chmod(0o700 if folder.is_dir() else 0o600)
    assert done.code == 0
    assert done.json["entries"] == 4
    assert done.json["problems"] == []
    assert after == before


def flip_a_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def without_row(stored: Stored) -> None:
    with closing(sqlite3.connect(stored.directory / "catalog.sqlite3")) as connection:
        connection.execute("DELETE FROM entries WHERE key = ?", (stored.first.header.key,))
        connection.commit()


def with_wrong_row(stored: Stored) -> None:
    with closing(sqlite3.connect(stored.directory / "catalog.sqlite3")) as connection:
        connection.execute("UPDATE entries SET start = 7 WHERE key = ?", (stored.first.header.key,))
        connection.commit()


def with_damaged_row(stored: Stored) -> None:
    with closing(sqlite3.connect(stored.directory / "catalog.sqlite3")) as connection:
        connection.execute(
            "UPDATE entries SET tokens = zeroblob(length(tokens)) WHERE key = ?",
            (stored.first.header.key,),
        )
        connection.commit()


def file_of_first(stored: Stored) -> Path:
    return file_of(stored.directory, stored.first.header.key)


def copy_over(stored: Stored, other: Entry) -> None:
    shutil.copy(file_of(stored.directory, other.header.key), file_of_first(stored))


Damage = Callable[[Stored], object]


@pytest.mark.parametrize(
    ("damage", "flaw", "is_lost"),
    [
        (lambda stored: flip_a_byte(file_of_first(stored), -1), "damaged", True),
        (lambda stored: flip_a_byte(file_of_first(stored), 8), "damaged", True),
        (lambda stored: os.truncate(file_of_first(stored), 5000), "damaged", True),
        (lambda stored: os.truncate(file_of_first(stored), 0), "damaged", True),
        (lambda stored: copy_over(stored, stored.second), "damaged", True),
        (lambda stored: file_of_first(stored).unlink(), "gone", True),
        (without_row, "unknown", False),
        (with_wrong_row, "differs", False),
        (with_damaged_row, "unknown", False),
        (
            lambda stored: (stored.directory / "catalog.sqlite3").write_bytes(b"no" * 5000),
            "catalog",
            False,
        ),
        (lambda stored: (stored.directory / "catalog.sqlite3").unlink(), "catalog", False),
    ],
)
def test_verify_names_what_is_wrong_and_fixes_it_when_told(
    stored: Stored, damage: Damage, flaw: str, *, is_lost: bool
) -> None:
    damage(stored)
    before = everything_in(stored.directory)
    found = cache("verify", "--json", directory=stored.directory)
    assert found.code == 1
    assert [problem["flaw"] for problem in found.json["problems"]] == [flaw]
    assert everything_in(stored.directory) == before

    assert cache("verify", "--fix", directory=stored.directory).code == 1
    again = cache("verify", "--json", directory=stored.directory)
    assert (again.code, again.json["problems"]) == (0, [])
    left = [stored.shared, stored.second, stored.third, *([] if is_lost else [stored.first])]
    assert kept(stored.directory) == set(hex_of(*left))
    with closing(open_tier(stored.directory)) as tier:
        assert [tier.get(entry.header.key) for entry in left] == left


def test_verify_fix_keeps_what_was_damaged_in_quarantine(stored: Stored) -> None:
    flip_a_byte(file_of_first(stored), -1)
    damaged = file_of_first(stored).read_bytes()
    cache("verify", "--fix", directory=stored.directory)
    [path] = (stored.directory / "quarantine").iterdir()
    assert path.read_bytes() == damaged


def test_verify_counts_entries_whose_parent_is_gone_but_keeps_them(stored: Stored) -> None:
    flip_a_byte(file_of(stored.directory, stored.shared.header.key), -1)
    cache("verify", "--fix", directory=stored.directory)
    done = cache("verify", "--json", directory=stored.directory)
    assert (done.code, done.json["incomplete"]) == (0, 2)
    listed = cache("ls", "--json", directory=stored.directory).json
    assert [entry["complete"] for entry in listed] == [True, False, False]
    assert "broken" in cache("ls", directory=stored.directory).output


def test_verify_does_not_mistake_an_entry_that_is_being_stored_for_a_stray_file(
    stored: Stored, server: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.tools.directory._SETTLE_SECONDS", 3)
    without_row(stored)
    soon = threading.Timer(0.3, lambda: server.put(stored.first))
    soon.start()
    assert cache("verify", directory=stored.directory).code == 0
    soon.join()


def test_verify_does_not_mistake_an_entry_that_is_being_evicted_for_a_stray_file(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.tools.directory._SETTLE_SECONDS", 3)
    without_row(stored)
    soon = threading.Timer(0.3, file_of_first(stored).unlink)
    soon.start()
    assert cache("verify", directory=stored.directory).code == 0
    soon.join()


def test_ls_points_to_verify_when_the_catalogue_is_damaged(stored: Stored) -> None:
    (stored.directory / "catalog.sqlite3").write_bytes(b"no" * 5000)
    done = cache("ls", directory=stored.directory)
    assert done.code == 2
    assert "verify --fix" in done.output


def test_clear_deletes_what_is_ours_and_nothing_else(stored: Stored) -> None:
    home = stored.directory
    foreign = [
        home / "notes.txt",
        home / "weights.json.bak",
        home / "entries" / "notes.kv",
        home / "entries" / "ab" / "notes.txt",
        home / "entries" / "ab" / "notes.tmp",
        home / "entries" / "ab" / ("cd" * 16 + ".kv"),  # not its folder
        home / "entries" / "other" / ("ab" * 16 + ".kv"),
        home / "quarantine" / "notes.txt",
        home / "models" / ("ab" * 16 + ".kv"),
    ]
    own = [
        home / "weights.json",
        home / ".weights.json-abcd1234",
        home / "quarantine" / f"1700000000000000000-{'ab' * 16}.kv",
        home / "quarantine" / "1700000000000000000-catalog.sqlite3",
        home / "entries" / "ab" / ("ab" * 16 + ".12-ffff.tmp"),
    ]
    being_written = home / "entries" / "ab" / ("ab" * 16 + ".13-ffff.tmp")
    for path in (*foreign, *own, being_written):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    for path in own:
        os.utime(path, (1, 1))
    done = cache("clear", "--yes", "--json", directory=home)
    assert done.code == 0
    assert all(path.read_text() == "x" for path in foreign)
    assert {path for path in home.rglob("*") if path.is_file()} == {
        *foreign,
        being_written,
        home / "catalog.sqlite3",
        home / "forgotten.sqlite3",  # tells running servers
    }
    assert cache("ls", "--json", directory=home).json == []


def test_clear_refuses_where_nobody_can_be_asked(stored: Stored) -> None:
    done = cache("clear", directory=stored.directory)
    assert done.code == 2
    assert "--yes" in done.output
    assert len(kept(stored.directory)) == 4


@pytest.mark.parametrize(("answer", "n_left"), [("n", 4), ("y", 0)])
def test_clear_asks_on_a_terminal(stored: Stored, answer: str, n_left: int) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    script = "from rekindle.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "cache", "clear", "--dir", str(stored.directory)],
        stdin=theirs,
        capture_output=True,
        text=True,
    )
    os.close(ours)
    os.close(theirs)
    assert "Delete all 4 entries in" in done.stderr
    assert done.returncode == (1 if n_left else 0)
    assert len(kept(stored.directory)) == n_left


def test_a_server_goes_on_after_its_cache_was_cleared(stored: Stored, server: DiskTier) -> None:
    assert cache("clear", "--yes", directory=stored.directory).code == 0
    with pytest.raises(EntryMissing):
        server.get(stored.first.header.key)
    with pytest.raises(TierFull):
        server.put(stored.third)  # it was computed for an earlier request
    server.put(replace(stored.third, retention=Retention(asked_at=time.time())))
    assert server.get(stored.third.header.key).payload == stored.third.payload
    assert cache("ls", "--json", directory=stored.directory).keys == hex_of(stored.third)
    assert kept(stored.directory) == set(hex_of(stored.third))


def test_what_a_running_server_just_stored_is_listed(stored: Stored, server: DiskTier) -> None:
    new = make_entry(99)
    server.put(new)
    assert new.header.key.hex() in cache("ls", "--json", directory=stored.directory).keys


def test_a_catalogue_that_nobody_may_write_can_be_read(stored: Stored, server: DiskTier) -> None:
    copy = stored.directory.with_name("copy")  # as a killed server would leave it, log and all
    shutil.copytree(stored.directory, copy)
    assert (copy / "catalog.sqlite3-wal").exists()
    assert len(cache("ls", "--all", "--json", directory=copy).json) == 4


def test_commands_and_a_busy_server_do_not_disturb_each_other(stored: Stored) -> None:
    stop, has_stored = threading.Event(), threading.Event()
    troubles: list[BaseException] = []

    def serve() -> None:
        with closing(open_tier(stored.directory, budget_bytes=16 * 2**20, now=time.time)) as tier:
            for seed in range(1000, 100_000):
                if stop.is_set():
                    return
                try:
                    one = make_entry(seed)
                    two = make_entry(seed + 1, parent=one.header.key)
                    asked = Retention(asked_at=time.time())
                    with suppress(TierFull):  # the cache was cleared since
                        for entry in (one, two):
                            tier.put(replace(entry, retention=asked))
                    for key in stored_keys(tier)[:5]:
                        with suppress(EntryMissing):
                            tier.get(key)
                    has_stored.set()
                except BaseException as trouble:
                    troubles.append(trouble)
                    return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            for command in (["ls"], ["verify"], ["prune", "--to", "1MB"], ["verify", "--fix"]):
                done = cache(*command, directory=stored.directory)
                assert done.code == 0, done.output
            assert cache("clear", "--yes", directory=stored.directory).code == 0
        for _ in range(2):  # the first may have begun before the last `clear`
            has_stored.clear()
            assert has_stored.wait(10) or troubles
    finally:
        stop.set()
        thread.join()
    assert not troubles
    assert cache("verify", directory=stored.directory).code == 0
    assert kept(stored.directory)


# -- remembered turns ---------------------------------------------------------------------------

N_TURNS = 5


@pytest.fixture
def turns(stored: Stored) -> Path:
    """Their file, as a server leaves it."""
    with closing(
        TurnDatabase(stored.directory, fingerprint=MODEL, forgotten=Tombstones())
    ) as turns:
        for number in range(N_TURNS):
            turns.keep(make_turn(number))
    return stored.directory / "turns.sqlite3"


def found_turns(directory: Path) -> int:
    with closing(TurnDatabase(directory, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        return len(turns.find([make_turn(number).keys[0] for number in range(N_TURNS)]))


def test_ls_and_verify_state_the_turns_and_change_nothing(turns: Path) -> None:
    before = everything_in(turns.parent)
    n_bytes = cache("verify", "--json", directory=turns.parent).json["turn_bytes"]
    lines = cache("ls", directory=turns.parent).output.splitlines()
    assert lines[-1] == f"5 remembered turns, {n_bytes / 1000:.1f} kB"
    done = cache("verify", "--json", directory=turns.parent)
    assert (done.code, done.json["turns"], done.json["problems"]) == (0, 5, [])
    assert everything_in(turns.parent) == before


def test_ls_and_verify_see_the_turns_of_a_running_server(stored: Stored, turns: Path) -> None:
    with closing(
        TurnDatabase(stored.directory, fingerprint=MODEL, forgotten=Tombstones())
    ) as server:
        server.keep(make_turn(77))
        deadline = time.monotonic() + 10
        while "6 remembered turns" not in cache("ls", directory=stored.directory).output:
            assert time.monotonic() < deadline
        assert cache("verify", "--json", directory=stored.directory).json["turns"] == 6


def overwrite(path: Path) -> None:
    path.write_bytes(b"no" * 5000)


def with_damaged_turn(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE turns SET data = zeroblob(length(data)) WHERE number = 2")
        connection.commit()


def of_a_later_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("damage", "detail", "n_left"),
    [
        (overwrite, "file is not a database", 0),
        (with_damaged_turn, "damaged turns: 1", 4),
        (of_a_later_version, "its version is 99, this program reads 2", 0),
    ],
)
def test_verify_names_what_is_wrong_with_turns_and_fixes_it_when_told(
    turns: Path, damage: Callable[[Path], None], detail: str, n_left: int
) -> None:
    damage(turns)
    before = everything_in(turns.parent)
    found = cache("verify", "--json", directory=turns.parent)
    assert (found.code, found.json["entries"]) == (1, 4)
    assert [(each["flaw"], each["detail"]) for each in found.json["problems"]] == [
        ("turns", detail)
    ]
    assert everything_in(turns.parent) == before
    assert cache("verify", "--fix", directory=turns.parent).code == 1
    again = cache("verify", "--json", directory=turns.parent)
    assert (again.code, again.json["problems"], again.json["turns"]) == (0, [], n_left)
    assert found_turns(turns.parent) == n_left


def test_prune_leaves_turns(turns: Path) -> None:
    before = turns.read_bytes()
    assert cache("prune", "--to", "0", directory=turns.parent).code == 0
    assert kept(turns.parent) == set()
    assert turns.read_bytes() == before


def test_clear_deletes_turns_and_a_server_goes_on(stored: Stored, turns: Path) -> None:
    set_aside = stored.directory / "quarantine" / "1700000000000000000-turns.sqlite3"
    set_aside.write_text("x")
    with closing(
        TurnDatabase(stored.directory, fingerprint=MODEL, forgotten=Tombstones())
    ) as server:
        done = cache("clear", "--yes", "--json", directory=stored.directory)
        assert done.code == 0
        left = [path.name for path in stored.directory.rglob("*turns*")]
        assert (left, found_turns(stored.directory)) == ([], 0)
        server.keep(make_turn(3))
    assert found_turns(stored.directory) == 1
    assert cache("verify", directory=stored.directory).code == 0
