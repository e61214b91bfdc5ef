"""Turns across restarts, on a disk that is damaged, full, locked or deleted."""

import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache.tools.turn_upkeep import count_turns, verify_turns
from rekindle.cache.turns import database as turn_database
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.file import TURNS
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.stored_turns import StoredTurn, TurnStore
from tests.cache.disk.test_damage import (
    as_ordinary_user,
    mounted,
    open_directory,
    quarantined,
    replace_with,
    run_sql,
)
from tests.cache.entries import MODEL, OTHER_MODEL
from tests.cache.turns.writer import OWNER, make_turn

__all__ = ["open_directory"]

FILE_NAME = TURNS.file_name

Open = Callable[..., TurnDatabase]


@pytest.fixture(autouse=True)
def _short_rest(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(turn_database, "RETRY_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(directory: Path) -> Iterator[Open]:
    open_ones = []

    def make(directory: Path = directory, **options: object) -> TurnDatabase:
        defaults: dict[str, Any] = {"fingerprint": MODEL, "forgotten": Tombstones()}
        turns = TurnDatabase(directory, **{**defaults, **options})
        open_ones.append(turns)
        return turns

    yield make
    for turns in open_ones:
        turns.close()


def fill(turns: TurnStore, numbers: Sequence[int], *, n_bytes: int = 400) -> None:
    for number in numbers:
        turns.keep(make_turn(number, n_bytes=n_bytes))


def found(turns: TurnStore, numbers: Sequence[int], *, n_bytes: int = 400) -> list[int]:
    """Those of the numbers whose turn is found as it was kept; anything else is garbage."""
    wanted = {make_turn(number, n_bytes=n_bytes): number for number in numbers}
    keys = [turn.keys[number % 2] for turn, number in wanted.items()]
    return [wanted[turn] for turn in turns.find(keys)]


def eventually(is_so: Callable[[], object], *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def written(directory: Path, n_turns: int) -> Callable[[], bool]:
    return lambda: count_turns(directory).n_turns == n_turns


def stored(directory: Path, numbers: Sequence[int], **options: int) -> list[int]:
    """What a server finds that starts now."""
    with closing(TurnDatabase(directory, fingerprint=MODEL, forgotten=Tombstones())) as turns:
        return sorted(found(turns, numbers, **options))


# -- what it is for -----------------------------------------------------------------------------


def test_a_turn_is_found_at_once_and_after_a_restart_by_each_of_its_keys(opened: Open) -> None:
    turn = make_turn(1, n_keys=5)
    turns = opened()
    turns.keep(turn)
    assert [turns.find([key]) for key in turn.keys] == [[turn]] * 5
    turns.close()
    again = opened()
    assert [again.find([key]) for key in turn.keys] == [[turn]] * 5
    assert again.find(turn.keys) == [turn]
    assert again.find([]) == again.find([b"x" * 16]) == []


@pytest.mark.parametrize("data", [b"", b"\0", bytes(10**6)])
def test_a_turn_may_have_no_data_no_keys_or_a_lot_of_data(opened: Open, data: bytes) -> None:
    turn = StoredTurn(b"i" * 16, (b"k" * 16, b"k" * 16), data, OWNER)
    turns = opened()
    turns.keep(turn)
    turns.keep(StoredTurn(b"j" * 16, (), b"nobody asks", OWNER))
    turns.close()
    assert opened().find([b"k" * 16]) == [turn]


def test_several_turns_share_a_key(opened: Open) -> None:
    twins = [StoredTurn(bytes([n]) * 16, (b"k" * 16,), b"data %d" % n, OWNER) for n in range(3)]
    turns = opened()
    for twin in twins:
        turns.keep(twin)
    turns.close()
    assert opened().find([b"k" * 16]) == twins[::-1]


def make_memory(_opened: Open, **options: int) -> TurnStore:
    return MemoryTurns(Tombstones(), **options)


def make_database(opened: Open, **options: int) -> TurnStore:
    return opened(**options)


def reopened(turns: TurnStore, opened: Open) -> TurnStore:
    if isinstance(turns, MemoryTurns):
        return turns
    turns.close()
    return opened()


Make = Callable[..., TurnStore]
both = pytest.mark.parametrize("make", [make_memory, make_database])


@both
def test_what_was_used_last_is_found_first(opened: Open, make: Make) -> None:
    turns = make(opened)
    fill(turns, range(5))
    turns.touch([make_turn(1).id])
    turns.keep(make_turn(3))
    turns.touch([make_turn(0).id, b"unknown".ljust(16)])
    assert found(turns, range(5)) == [0, 3, 1, 4, 2]
    assert found(reopened(turns, opened), range(5)) == [0, 3, 1, 4, 2]


@both
def test_beyond_the_number_of_turns_the_least_recently_used_goes(opened: Open, make: Make) -> None:
    turns = make(opened, max_turns=3)
    fill(turns, [0, 1, 2])
    turns.touch([make_turn(0).id])
    fill(turns, [3, 4])
    eventually(lambda: found(turns, range(5)) == [4, 3, 0])
    assert found(reopened(turns, opened), range(5)) == [4, 3, 0]


@both
def test_beyond_the_bytes_the_least_recently_used_goes(opened: Open, make: Make) -> None:
    turns = make(opened, max_bytes=350_000)
    fill(turns, [0, 1, 2], n_bytes=100_000)
    turns.touch([make_turn(0).id])
    fill(turns, [3], n_bytes=100_000)
    turns.keep(make_turn(9, n_bytes=400_000))  # does not fit, and pushes nothing out
    eventually(lambda: found(turns, range(4), n_bytes=100_000) == [3, 0, 2])
    again = reopened(turns, opened)
    assert found(again, range(4), n_bytes=100_000) == [3, 0, 2]
    assert found(again, [9], n_bytes=400_000) == []


@both
def test_a_turn_kept_again_has_the_new_data_and_the_new_keys(opened: Open, make: Make) -> None:
    old = StoredTurn(b"i" * 16, (b"a" * 16, b"b" * 16), b"old", OWNER)
    new = StoredTurn(b"i" * 16, (b"b" * 16, b"c" * 16), b"new", OWNER)
    turns = make(opened)
    turns.keep(old)
    turns.keep(make_turn(1))
    turns.keep(new)
    for each in (turns, reopened(turns, opened)):
        assert each.find([b"a" * 16]) == []
        assert each.find([b"c" * 16, b"b" * 16]) == [new]
        assert each.find([make_turn(1).keys[0], b"c" * 16]) == [new, make_turn(1)]


def test_the_file_stays_within_the_bytes_it_may_have(opened: Open, directory: Path) -> None:
    turns = opened(max_bytes=2**20)
    for number in range(600):
        turns.keep(make_turn(number, n_bytes=10_000))
        if number % 10 == 0:
            assert turns._writer.flush(10)
    turns.close()
    assert 0.9 * 2**20 < count_turns(directory).n_bytes <= 2**20
    assert (directory / FILE_NAME).stat().st_size < 1.4 * 2**20


def test_models_are_kept_apart_and_share_the_bounds(opened: Open) -> None:
    one, other = opened(max_turns=4), opened(max_turns=4, fingerprint=OTHER_MODEL)
    fill(one, [0, 1])
    one.close()
    assert found(other, [0, 1]) == []
    other.keep(make_turn(1, n_bytes=7))
    other.keep(make_turn(2))
    other.keep(make_turn(3))
    other.close()
    assert stored(one._file.path.parent, range(4)) == [1]
    again = opened(fingerprint=OTHER_MODEL)
    assert again.find(make_turn(1).keys) == [make_turn(1, n_bytes=7)]
    assert found(again, [2, 3]) == [3, 2]


def test_thousands_of_keys_are_asked_for_at_once(opened: Open) -> None:
    turns = opened()
    fill(turns, range(3000), n_bytes=10)
    turns.close()
    assert len(found(opened(), range(5000), n_bytes=10)) == 3000


def test_everything_is_for_the_owners_eyes_only(opened: Open, directory: Path) -> None:
    opened().keep(make_turn(1))
    eventually(written(directory, 1))
    files = list(directory.iterdir())
    assert {file.name for file in files} == {FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert directory.stat().st_mode & 0o777 == 0o700


# -- several at once ----------------------------------------------------------------------------


def test_two_servers_find_each_others_turns(opened: Open, directory: Path) -> None:
    one, two = opened(), opened()
    one.keep(make_turn(1))
    eventually(lambda: found(two, [1]))
    two.keep(make_turn(2))
    eventually(lambda: found(one, [1, 2]) == [2, 1])
    two.touch([make_turn(1).id])
    eventually(lambda: found(one, [1, 2]) == [1, 2])
    two.keep(make_turn(1, n_bytes=9))
    eventually(lambda: one.find(make_turn(1).keys) == [make_turn(1, n_bytes=9)])


def test_what_another_server_evicted_is_written_again_when_it_is_used(
    opened: Open, directory: Path
) -> None:
    one, two = opened(), opened(max_turns=1)
    fill(one, [1, 2])
    eventually(written(directory, 2))
    two.keep(make_turn(3))
    eventually(written(directory, 1))
    one.touch([make_turn(1).id])
    eventually(written(directory, 2))
    assert stored(directory, [1, 2, 3]) == [1, 3]


def test_any_thread_may_find_and_keep(opened: Open) -> None:
    turns = opened()
    troubles: list[BaseException] = []

    def use(first: int) -> None:
        try:
            for number in range(first, first + 100):
                turns.keep(make_turn(number))
                turns.touch([make_turn(number - 50).id])
                assert number in found(turns, range(number - 20, number + 20))
        except BaseException as trouble:
            troubles.append(trouble)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(100, 500, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not troubles
    assert len(found(turns, range(100, 500))) == 400


def start_writer(directory: Path, first: int, n_turns: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.cache.turns.writer", str(directory)]
    return subprocess.Popen([*command, str(first), str(n_turns)], stdout=subprocess.PIPE, text=True)


def test_a_killed_server_loses_at_most_its_last_second_and_leaves_no_garbage(
    directory: Path,
) -> None:
    noise = random.Random(1)
    kept: set[int] = set()
    was_in_time = False  # once: a machine that stands still makes the writer late
    for kill in range(3):
        first = kill * 10_000
        writer = start_writer(directory, first, 10_000)
        assert writer.stdout is not None
        with writer:
            assert writer.stdout.readline()
            time.sleep(3 + noise.random())
            killed_at = time.time()
            writer.kill()
            lines = writer.stdout.read().split("\n")[:-1]
        times = {int(number): float(at) for number, at in map(str.split, lines)}
        kept |= {number for number, at in times.items() if at < killed_at - 3}
        in_time = {number for number, at in times.items() if at < killed_at - 1}
        assert verify_turns(directory).trouble is None
        present = set(stored(directory, range(first + 10_000)))  # all of them as they were kept
        assert kept <= present
        was_in_time |= in_time <= present
    assert was_in_time
    assert len(kept) > 100
    assert not (directory / "quarantine").exists()


def test_two_processes_write_at_the_same_time(directory: Path) -> None:
    writers = [start_writer(directory, first, 500) for first in (0, 1000)]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert stored(directory, range(2000)) == [*range(500), *range(1000, 1500)]


# -- locks --------------------------------------------------------------------------------------


@contextmanager
def locked(directory: Path, *, statements: str) -> Iterator[None]:
    with closing(sqlite3.connect(directory / FILE_NAME, isolation_level=None)) as holder:
        holder.executescript(statements)
        yield
        if holder.in_transaction:
            holder.execute("COMMIT")


def test_keep_and_find_do_not_wait_for_a_long_write_of_another_process(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.turns.file.WRITE_BUSY_SECONDS", 0.1)
    turns = opened()
    fill(turns, range(10))
    eventually(written(directory, 10))
    other = opened()
    with locked(directory, statements="BEGIN EXCLUSIVE"):
        started = time.monotonic()
        fill(turns, range(10, 110))
        assert len(found(turns, range(110))) == 110
        assert time.monotonic() - started < 5  # waiting in each keep would be 10 s
        assert len(found(other, range(110))) == 10
        eventually(lambda: "continuing in memory" in caplog.text)
        time.sleep(0.8)  # it is tried again, and not logged again
        assert len(found(turns, range(110))) == 110
    eventually(lambda: len(found(other, range(110))) == 110)
    assert caplog.text.count("continuing in memory") == 1
    assert not (directory / "quarantine").exists()


def test_a_file_that_is_locked_even_for_readers_costs_a_moment_once(
    opened: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(turns := opened(), [1])
    turns.close()
    # Only the first one to come gets it to itself.
    alone = "PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE; COMMIT"
    monkeypatch.setattr("rekindle.cache.turns.file.WRITE_BUSY_SECONDS", 0.1)
    with locked(directory, statements=alone):
        started = time.monotonic()
        late = opened()
        late.keep(make_turn(2))
        assert found(late, [1, 2]) == [2]
        assert time.monotonic() - started < 4.5  # SQLite's own bound would be 5 s
    eventually(lambda: found(late, [1, 2]) == [2, 1])


def test_turns_read_from_the_file_do_not_evict_unwritten_ones(
    opened: Open, directory: Path
) -> None:
    fill(turns := opened(), range(10))
    turns.close()
    again = opened(max_turns=10)
    with locked(directory, statements="BEGIN EXCLUSIVE"):
        fill(again, range(10, 20))
        assert len(found(again, range(20))) == 20
        assert found(again, range(10, 20)) == [*range(19, 9, -1)]
    again.close()
    assert stored(directory, range(20)) == [*range(10, 20)]


def test_close_gives_up_on_a_locked_file(
    opened: Open, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.turns.file.WRITE_BUSY_SECONDS", 0.1)
    monkeypatch.setattr(turn_database, "CLOSE_SECONDS", 60)
    turns = opened()
    with locked(directory, statements="BEGIN EXCLUSIVE"):
        turns.keep(make_turn(1))
        started = time.monotonic()
        turns.close()
        assert time.monotonic() - started < 20
    turns.keep(make_turn(2))
    turns.touch([make_turn(1).id])
    turns.close()
    assert found(turns, [1, 2]) == [1, 2]


# -- damage -------------------------------------------------------------------------------------


def break_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8192:12288] = random.Random(1).randbytes(4096)
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not a database": lambda path: path.write_text("hello " * 1000),
    "zeros": lambda path: path.write_bytes(bytes(40_960)),
    "cut short": lambda path: os.truncate(path, 12_288),
    "cut inside a page": lambda path: os.truncate(path, 10_000),
    "a broken page": break_page,
    "of another program": run_sql("PRAGMA application_id = 7"),
    "a directory": replace_with(Path.mkdir),
    "a named pipe": replace_with(os.mkfifo),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_file_is_quarantined_and_created_again(
    damage: str, opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(turns := opened(), range(50))
    turns.close()
    DAMAGES[damage](directory / FILE_NAME)
    assert verify_turns(directory).trouble is not None
    again = opened()
    assert found(again, range(50)) == []
    fill(again, [1])
    again.close()
    assert quarantined(directory) == [FILE_NAME]
    assert caplog.text.count("quarantined") == 1
    assert stored(directory, range(50)) == [1]


@pytest.mark.parametrize("damage", ["not a database", "zeros", "cut short", "a broken page"])
def test_damage_under_a_running_server_loses_only_turns_stored_before(
    damage: str, opened: Open, directory: Path
) -> None:
    fill(turns := opened(), range(50))
    turns.close()
    again = opened()
    DAMAGES[damage](directory / FILE_NAME)
    for number in range(100, 300):
        found(again, range(50))  # raises nothing, and what it finds is no garbage
        again.keep(make_turn(number))
        time.sleep(0.002)
    eventually(lambda: {*range(290, 300)} <= set(stored(directory, range(100, 300))))


def test_an_empty_or_absent_file_is_created_again(opened: Open, directory: Path) -> None:
    for empty in (lambda path: os.truncate(path, 0), Path.unlink):
        fill(turns := opened(), [1])
        turns.close()
        empty(directory / FILE_NAME)
        assert stored(directory, [1]) == []
    assert not (directory / "quarantine").exists()


def test_a_file_of_a_later_version_is_left_alone(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(turns := opened(), [1])
    turns.close()
    run_sql("PRAGMA user_version = 99")(directory / FILE_NAME)
    before = (directory / FILE_NAME).read_bytes()
    again = opened()
    again.keep(make_turn(2))
    time.sleep(0.3)
    assert found(again, [1, 2]) == [2]
    again.close()
    assert (directory / FILE_NAME).read_bytes() == before
    assert caplog.text.count("its version is 99, this program reads 2") == 1


@pytest.mark.parametrize(
    "change",
    [
        "data = zeroblob(length(data))",
        "data = 'text'",
        "data = 5",
        "keys = substr(keys, 1, 16)",
        "keys = x'00' || keys",
        "checksum = x'00'",
        "id = x'" + "00" * 16 + "'",
        "last_used_at = 'late'",
    ],
)
def test_a_damaged_row_is_a_miss_and_is_forgotten(
    change: str, opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(turns := opened(), range(3))
    turns.close()
    run_sql(f"UPDATE turns SET {change} WHERE number = 2")(directory / FILE_NAME)
    assert verify_turns(directory).trouble == "damaged turns: 1"
    again = opened()
    assert found(again, range(3)) == [2, 0]
    eventually(written(directory, 2))
    assert verify_turns(directory).trouble is None
    assert caplog.text.count("deleted damaged turns n=1") == 1
    again.keep(make_turn(1))
    eventually(written(directory, 3))
    assert stored(directory, range(3)) == [0, 1, 2]


def test_a_turn_under_a_key_it_does_not_have_is_not_found(opened: Open, directory: Path) -> None:
    fill(turns := opened(), range(2))
    turns.close()
    moved = "UPDATE turn_keys SET key = zeroblob(16) WHERE key IN (SELECT min(key) FROM turn_keys)"
    run_sql(moved)(directory / FILE_NAME)
    assert opened().find([bytes(16)]) == []


def test_no_flipped_bit_makes_garbage_or_an_exception(opened: Open, directory: Path) -> None:
    fill(turns := opened(), range(40), n_bytes=600)
    turns.close()
    path = directory / FILE_NAME
    sound = path.read_bytes()
    noise = random.Random(2)
    n_found = 0
    for _ in range(80):
        data = bytearray(sound)
        for _ in range(noise.choice([1, 1, 5])):
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        path.write_bytes(data)
        again = opened()
        n_found += len(found(again, range(40), n_bytes=600))
        fill(again, range(40, 43), n_bytes=600)
        again.touch([make_turn(number).id for number in range(40)])
        assert found(again, range(40, 43), n_bytes=600) == [42, 41, 40]
        again.close()
        shutil.rmtree(directory / "quarantine", ignore_errors=True)
    assert n_found > 80 * 20


# -- a directory that fails ---------------------------------------------------------------------


def test_a_directory_that_vanished_is_made_again_and_what_is_used_is_written_again(
    opened: Open, directory: Path
) -> None:
    turns = opened()
    fill(turns, range(5))
    eventually(written(directory, 5))
    shutil.rmtree(directory)
    assert found(turns, range(5)) == [4, 3, 2, 1, 0]
    turns.touch([make_turn(1).id])
    turns.keep(make_turn(9))
    eventually(written(directory, 2))
    assert stored(directory, range(10)) == [1, 9]


def test_a_directory_that_was_replaced_is_taken_as_it_is(opened: Open, tmp_path: Path) -> None:
    fill(one := opened(tmp_path / "one"), [1])
    one.close()
    fill(two := opened(tmp_path / "two"), [2])
    two.close()
    again = opened(tmp_path / "one")
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "two").rename(tmp_path / "one")
    eventually(lambda: found(again, [1, 2]) == [2])


def test_a_file_in_place_of_the_directory_is_one_warning_until_it_is_gone(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("")
    turns = opened()
    for number in range(20):
        turns.keep(make_turn(number))
        assert len(found(turns, range(20))) == number + 1
        time.sleep(0.02)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    directory.unlink()
    eventually(written(directory, 20))
    assert stored(directory, range(20)) == [*range(20)]


def test_a_directory_without_permission_costs_nothing_but_the_memory_of_turns(
    open_directory: Path, opened: Open
) -> None:
    with as_ordinary_user(open_directory):
        open_directory.chmod(0o500)
        turns = opened(open_directory)
        turns.keep(make_turn(1))
        assert found(turns, [1]) == [1]
        time.sleep(0.2)
        open_directory.chmod(0o700)
        eventually(written(open_directory, 1))
        turns.close()


def test_a_disk_that_turns_read_only_is_written_again_when_it_can_be(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    fill(turns := opened(), [1])
    turns.close()
    with mounted("--bind", str(directory), at=directory):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)
        again = opened()
        again.keep(make_turn(2))
        assert 2 in found(again, [1, 2])
        eventually(lambda: "continuing in memory" in caplog.text)
        time.sleep(0.3)
        assert caplog.text.count("continuing in memory") == 1
    eventually(lambda: found(again, [1, 2]) == [2, 1])
    eventually(written(directory, 2))


def test_a_full_disk_costs_what_does_not_fit_until_there_is_room(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs", at=tmp_path):
        directory, ballast = tmp_path / "cache", tmp_path / "ballast"
        turns = opened(directory)
        fill(turns, range(10))
        eventually(written(directory, 10))
        ballast.write_bytes(bytes(shutil.disk_usage(tmp_path).free - 65_536))
        fill(turns, range(10, 200), n_bytes=4000)
        eventually(lambda: "continuing in memory" in caplog.text)
        time.sleep(0.5)
        assert len(found(turns, range(10, 200), n_bytes=4000)) == 190
        assert len(found(turns, range(10))) == 10
        assert caplog.text.count("continuing in memory") == 1
        ballast.unlink()
        eventually(written(directory, 200))
        turns.close()
        assert len(stored(directory, range(10, 200), n_bytes=4000)) == 190
