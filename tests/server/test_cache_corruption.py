"""Any damage to the cache directory is a miss with a counter and a line in the log.

Answers equal the cold ones, the server stays up, and a repaired disk is used again.
"""

import fcntl
import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rekindle.cache.disk.transfers import RETRY_SECONDS
from rekindle.cache.entry import MAX_PREAMBLE_BYTES, Kind, token_bytes
from rekindle.cache.tools.directory import read_stored, verify
from tests.cache.entries import assert_catalogue_is_true, file_of
from tests.conftest import TinyModels
from tests.support.cache_traffic import (
    Caller,
    ColdAnswers,
    Prompt,
    cold_answers,
    eventually,
    random_tokens,
)
from tests.support.needs import program
from tests.support.server_process import ServerProcess, Start, launch, serve, start_fast
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

N_PROMPT = 300  # one whole block and a short one
MIB = 2**20


@dataclass(frozen=True)
class Running:
    server: ServerProcess
    caller: Caller

    @property
    def log(self) -> str:
        return self.server.log

    def metric(self, name: str) -> float:
        return self.caller.metrics()[name]


@contextmanager
def running(
    model: Path, directory: Path, *more: str, start: Start = start_fast
) -> Iterator[Running]:
    """Ends with SIGTERM: what is not on disk by then is not on disk."""
    with serve(
        *(str(model), "--parallel", "2", "--ctx-size", "4096", "--threads", "1"),
        *("--cache-dir", str(directory), "--no-cache-recompute", *more),
        start=start,
    ) as server:
        caller = Caller(server.url)
        with closing(caller):
            eventually(lambda: _assert(" cache: " in server.log))
            yield Running(server, caller)
        assert server.stop() == 0
        assert "Traceback" not in server.log


def prompt(name: object, n_tokens: int = N_PROMPT) -> Prompt:
    """Equal names give equal prompts, and no two share their first token by design."""
    return random_tokens(random.Random(f"corruption {name}"), n_tokens)


def block_file(directory: Path, of: Prompt, start: int = 0) -> Path:
    """Where the block is stored that holds the prompt from `start` on."""
    tokens = token_bytes(of[start : start + 256])
    [path] = [
        file_of(directory, entry.key)
        for entry in read_stored(directory).inventory.entries
        if entry.row.header.kind is Kind.BLOCK and entry.row.header.tokens.startswith(tokens)
    ]
    return path


def _assert(condition: bool) -> None:  # noqa: FBT001
    assert condition


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models(TinyArchitecture.LLAMA)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[ColdAnswers]:
    with cold_answers(model) as answers:
        yield answers


def assert_found(running: Running, cold: ColdAnswers, *prompts: Prompt) -> None:
    for each in prompts:
        answer = running.caller.ask(each)
        cold.check(answer, each)
        assert answer.n_cached == len(each)


def assert_missed(running: Running, cold: ColdAnswers, *prompts: Prompt) -> None:
    for each in prompts:
        answer = running.caller.ask(each)
        cold.check(answer, each)
        assert answer.n_cached == 0


def write_again(running: Running, name: str) -> None:
    """Ask that prompt, and others, until a write works: one that fails late moves the retry."""
    time.sleep(RETRY_SECONDS)
    more = (prompt(f"{name} {n}" if n else name) for n in itertools.count())

    def check() -> None:
        running.caller.ask(next(more), n_tokens=1)
        time.sleep(0.2)
        assert "disk writes work again" in running.log

    eventually(check)


# -- files that are not what they were ------------------------------------------------------------


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap_payloads(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(first[:MAX_PREAMBLE_BYTES] + second[MAX_PREAMBLE_BYTES:])
    other.write_bytes(second[:MAX_PREAMBLE_BYTES] + first[MAX_PREAMBLE_BYTES:])


def replace_by_text(path: Path) -> None:
    path.write_text("a letter to a friend\n" * 999)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@dataclass(frozen=True)
class Damage:
    """To the first block of two prompts: what is done, which counter shows it, and how often."""

    do: Callable[[Path, Path], None]
    log: str
    counter: str = "rekindle_cache_quarantined_total"
    n_missed: int = 1


DAMAGES = {
    "a flipped bit in the header": Damage(lambda one, _: flip_bit(one, 25), "checksum"),
    "a flipped bit in the magic": Damage(lambda one, _: flip_bit(one, 1), "not a file of ours"),
    "a flipped bit in the tokens": Damage(lambda one, _: flip_bit(one, 300), "checksum"),
    "a flipped bit in the payload": Damage(lambda one, _: flip_bit(one, -9), "payload"),
    "a truncated file": Damage(lambda one, _: os.truncate(one, 5000), "has 5000 bytes"),
    "a truncated header": Damage(lambda one, _: os.truncate(one, 50), "has 50 bytes"),
    "an empty file": Damage(lambda one, _: os.truncate(one, 0), "has 0 bytes"),
    "swapped files": Damage(swap, "it holds the entry", n_missed=2),
    "swapped payloads": Damage(swap_payloads, "payload", n_missed=2),
    "a foreign file": Damage(lambda one, _: replace_by_text(one), "not a file of ours"),
    "a directory": Damage(lambda one, _: replace_by_directory(one), "Is a directory"),
    "a named pipe": Damage(lambda one, _: replace_by_pipe(one), "not a plain file"),
    "no file": Damage(
        lambda one, _: one.unlink(), "is no longer on disk", "rekindle_cache_vanished_total"
    ),
}


@pytest.fixture(scope="module")
def on_damaged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("damaged")
    with running(model, directory) as filling:
        for name in DAMAGES:
            for number in range(2):
                filling.caller.ask(prompt(f"{name} {number}"), n_tokens=1)
    with running(model, directory) as server:
        for name, damage in DAMAGES.items():
            damage.do(*(block_file(directory, prompt(f"{name} {number}")) for number in range(2)))
        yield server


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_miss_with_a_counter_and_a_line(
    on_damaged: Running, cold: ColdAnswers, name: str
) -> None:
    damage = DAMAGES[name]
    both = [prompt(f"{name} {number}") for number in range(2)]
    n_before, n_log_before = on_damaged.metric(damage.counter), len(on_damaged.log)
    assert_missed(on_damaged, cold, *both[: damage.n_missed])
    assert on_damaged.metric(damage.counter) == n_before + damage.n_missed
    eventually(lambda: _assert(on_damaged.log[n_log_before:].count(damage.log) >= damage.n_missed))
    assert_found(on_damaged, cold, *both[damage.n_missed :])


def test_a_missed_prefix_is_stored_again(model: Path, cold: ColdAnswers, tmp_path: Path) -> None:
    """A block in the middle of a conversation: what follows it was never lost."""
    long = prompt("long", 900)
    with running(model, tmp_path) as server:
        server.caller.ask(long, n_tokens=1)
    flip_bit(block_file(tmp_path, long, start=256), -1)
    with running(model, tmp_path) as server:
        answer = server.caller.ask(long)
        cold.check(answer, long)
        assert answer.n_cached == 256
        assert server.metric("rekindle_cache_quarantined_total") == 1
    with running(model, tmp_path) as server:
        assert_found(server, cold, long)
    assert not verify(tmp_path, lambda *_: None).problems


def test_files_that_are_not_ours_are_left_alone(
    model: Path, cold: ColdAnswers, tmp_path: Path
) -> None:
    with running(model, tmp_path) as server:
        server.caller.ask(prompt("ours"), n_tokens=1)
    strangers = [
        tmp_path / "notes.txt",
        tmp_path / "entries" / "readme",
        tmp_path / "entries" / "ab" / "notes.txt",
        tmp_path / "entries" / "zz" / "deep" / "er.txt",
    ]
    for stranger in strangers:
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_text("precious")
    impostor = tmp_path / "entries" / "cd" / f"cd{'0' * 30}.kv"
    impostor.parent.mkdir(exist_ok=True)
    impostor.write_text("not an entry")
    with running(model, tmp_path) as server:
        assert_found(server, cold, prompt("ours"))
        eventually(lambda: _assert(f"quarantined entry file {impostor.name}" in server.log))
    assert [stranger.read_text() for stranger in strangers] == ["precious"] * len(strangers)
    assert not impostor.exists()


def test_an_unreadable_file_is_a_miss(model: Path, cold: ColdAnswers, tmp_path: Path) -> None:
    with running(model, tmp_path) as server:
        server.caller.ask(prompt("secret"), n_tokens=1)
    block_file(tmp_path, prompt("secret")).chmod(0)
    with running(model, tmp_path, start=partial(launch, prefix=no_privileges())) as server:
        assert_missed(server, cold, prompt("secret"))
        assert server.metric("rekindle_cache_quarantined_total") == 1
        eventually(lambda: _assert("Permission denied" in server.log))


def no_privileges() -> tuple[str, ...]:
    """Root may read everything unless the kernel forbids it to those that it starts."""
    if os.geteuid() != 0:
        return ()
    return (program("setpriv"), "--bounding-set", "-dac_override,-dac_read_search")


# -- a catalogue that is not what it was ----------------------------------------------------------


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts, for tests that take a copy."""
    directory = tmp_path_factory.mktemp("filled")
    with running(model, directory) as server:
        for number in range(2):
            server.caller.ask(prompt(number), n_tokens=1)
    return directory


@pytest.fixture
def directory(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "cache")


def break_middle(catalog: Path) -> None:
    n_bytes = catalog.stat().st_size
    with catalog.open("r+b") as file:
        file.seek(4096)
        file.write(b"\x55" * (n_bytes - 4096))


@pytest.mark.parametrize(
    ("damage", "log"),
    [
        (lambda catalog: catalog.write_bytes(b"garbage " * 5000), "creating it again"),
        (break_middle, "creating it again"),
        (lambda catalog: os.truncate(catalog, 6000), "creating it again"),
        (lambda catalog: os.truncate(catalog, 0), "cache: found 6 entries"),
        (Path.unlink, "cache: found 6 entries"),
    ],
    ids=["garbage", "broken in the middle", "truncated", "empty", "gone"],
)
def test_a_damaged_catalogue_is_rebuilt_from_the_files(
    model: Path,
    cold: ColdAnswers,
    directory: Path,
    damage: Callable[[Path], None],
    log: str,
) -> None:
    damage(directory / "catalog.sqlite3")
    with running(model, directory) as server:
        eventually(lambda: _assert(log in server.log))
        assert_found(server, cold, prompt(0), prompt(1))
    assert_catalogue_is_true(directory)


@pytest.mark.parametrize("damage", [break_middle, Path.unlink], ids=["broken", "gone"])
def test_a_catalogue_damaged_while_in_use_causes_no_recompute(
    model: Path, cold: ColdAnswers, directory: Path, damage: Callable[[Path], None]
) -> None:
    """SQLite may notice now, or when it looks at the page in question."""
    with running(model, directory) as server:
        damage(directory / "catalog.sqlite3")
        assert_found(server, cold, prompt(0))
        assert_missed(server, cold, prompt("new"))
        if "disk writes failing" in server.log:
            time.sleep(RETRY_SECONDS)
        assert_missed(server, cold, prompt("newer"))
        assert_found(server, cold, prompt("new"))
    with running(model, directory) as server:
        assert_found(server, cold, prompt(0), prompt(1), prompt("new"), prompt("newer"))
    assert_catalogue_is_true(directory)


# -- another model -------------------------------------------------------------------------------


def test_stored_rows_are_found_by_their_own_model_only(
    model: Path, cold: ColdAnswers, directory: Path, tmp_path: Path
) -> None:
    """Of a model of the same shape, too, whose rows llama.cpp would take for these."""
    twin = write_tiny_model(tmp_path / "twin.gguf", TinyArchitecture.LLAMA, seed=2)
    with running(twin, directory) as server, cold_answers(twin) as twins_answers:
        assert_missed(server, twins_answers, prompt(0))
    with running(model, directory) as server:
        assert_found(server, cold, prompt(0), prompt(1))


# -- a directory that fails -----------------------------------------------------------------------


def test_a_deleted_cache_directory_is_a_miss_and_is_filled_again(
    model: Path, cold: ColdAnswers, directory: Path
) -> None:
    with running(model, directory) as server:
        assert_found(server, cold, prompt(0))
        while subprocess.run(["rm", "-rf", str(directory)], capture_output=True).returncode:
            pass  # something was written to it meanwhile
        assert_missed(server, cold, prompt(1))
        assert server.metric("rekindle_cache_vanished_total") >= 1
        eventually(lambda: _assert("no longer on disk" in server.log))
        # Resumes behind blocks that are no longer on disk but still in memory.
        longer = prompt(0) + prompt("more")
        answer = server.caller.ask(longer)
        cold.check(answer, longer)
        assert answer.n_cached >= N_PROMPT
        if "disk writes failing" in server.log:  # it was written to while it vanished
            write_again(server, "later")
            assert_found(server, cold, longer)
    with running(model, directory) as server:
        # Only entries in transfer while the directory vanished may be lost.
        cold.check(server.caller.ask(prompt(1)), prompt(1))
        assert_found(server, cold, longer)
    assert not verify(directory, lambda *_: None).problems


@contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    command = ["mount", *arguments, str(at)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    if os.geteuid() == 0:  # who ignores permissions
        with mounted("--bind", str(directory), at=directory):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)
            yield
        return
    folders = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    try:
        for folder in folders:
            folder.chmod(0o500)
        yield
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_a_disk_that_turns_read_only_is_still_read_and_written_again_later(
    model: Path, cold: ColdAnswers, directory: Path
) -> None:
    with running(model, directory) as server:
        with read_only(directory):
            assert_found(server, cold, prompt(0))
            assert_missed(server, cold, prompt("new"))
            eventually(lambda: _assert("disk writes failing" in server.log))
            assert server.metric("rekindle_cache_writes_failed_total") >= 1
            assert_found(server, cold, prompt("new"), prompt(1))
        write_again(server, "newer")
    with running(model, directory) as server:
        assert_found(server, cold, prompt(0), prompt(1), prompt("new"), prompt("newer"))


def test_a_server_started_on_a_read_only_disk_finds_everything_once_it_is_writable(
    model: Path, cold: ColdAnswers, directory: Path
) -> None:
    with ExitStack() as stack:
        with read_only(directory):
            server = stack.enter_context(running(model, directory))
            assert_missed(server, cold, prompt("new"))
            eventually(lambda: _assert("disk writes failing" in server.log))
        write_again(server, "newer")
        assert_found(server, cold, prompt(0))


def test_with_a_full_disk_the_cache_continues_in_memory_and_writes_again_when_there_is_room(
    model: Path, cold: ColdAnswers, tmp_path: Path
) -> None:
    with mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs", at=tmp_path):
        directory, ballast = tmp_path / "cache", tmp_path / "ballast"
        with running(model, directory) as server:
            server.caller.ask(prompt("before"), n_tokens=1)
            eventually(lambda: _assert(server.metric("rekindle_cache_writes_total") == 3))
            ballast.write_bytes(bytes(shutil.disk_usage(tmp_path).free - 100_000))
            assert_missed(server, cold, prompt("full"))
            eventually(lambda: _assert("disk writes failing" in server.log))
            assert server.metric("rekindle_cache_writes_failed_total") >= 1
            eventually(lambda: _assert("No space left" in server.log))
            assert not list(directory.rglob("*.tmp"))
            assert_found(server, cold, prompt("full"), prompt("before"))
            ballast.unlink()
            write_again(server, "after")
        with running(model, directory) as server:
            assert_found(server, cold, prompt("before"), prompt("full"), prompt("after"))
        assert_catalogue_is_true(directory)


@pytest.mark.long
def test_a_locked_cache_directory_stops_no_request(
    model: Path, cold: ColdAnswers, directory: Path
) -> None:
    """Another server that is stopped in the middle of a write, say."""
    with running(model, directory, "--cache-ram", "1MiB") as server:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            assert_missed(server, cold, *(prompt(f"locked {n}") for n in range(8)))
            eventually(lambda: _assert("another process keeps it locked" in server.log))
            assert server.metric("rekindle_cache_writes_failed_total") >= 1
            assert_found(server, cold, prompt(0))
        finally:
            os.close(descriptor)
        write_again(server, "unlocked")
    with running(model, directory) as server:
        assert_found(server, cold, prompt(0), prompt(1), prompt("unlocked"))


# -- two servers ----------------------------------------------------------------------------------


def test_two_servers_of_one_model_share_a_directory(
    model: Path, cold: ColdAnswers, tmp_path: Path
) -> None:
    with running(model, tmp_path) as one, running(model, tmp_path) as other:
        for turn in range(6):
            for server in (one, other):
                mine = prompt(f"{turn} of {server.server.url[-1]}")
                assert_missed(server, cold, mine)
            # Both compute and store it: neither knows what the other stored since it started.
            assert_missed(one, cold, prompt(f"shared {turn}"))
            assert_missed(other, cold, prompt(f"shared {turn}"))
        names = [server.server.url[-1] for server in (one, other)]
    with running(model, tmp_path) as server:
        for turn in range(6):
            assert_found(server, cold, prompt(f"shared {turn}"))
            assert_found(server, cold, *(prompt(f"{turn} of {name}") for name in names))
        assert server.metric("rekindle_cache_quarantined_total") == 0
    assert not verify(tmp_path, lambda *_: None).problems
    assert_catalogue_is_true(tmp_path)


def test_two_models_share_a_directory_and_never_an_entry(
    model: Path, cold: ColdAnswers, tmp_path: Path
) -> None:
    directory = tmp_path / "cache"
    sibling = write_tiny_model(tmp_path / "sibling.gguf", TinyArchitecture.LLAMA, seed=2)
    shared = [prompt(f"both {turn}") for turn in range(4)]
    with cold_answers(sibling) as sibling_cold:
        with running(model, directory) as one, running(sibling, directory) as other:
            for each in shared:
                assert_missed(one, cold, each)
                assert_missed(other, sibling_cold, each)
        with running(sibling, directory) as other, running(model, directory) as one:
            assert_found(one, cold, *shared)
            assert_found(other, sibling_cold, *shared)
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as catalog:
        assert catalog.execute("SELECT count(*) FROM totals").fetchone() == (2,)
    assert not verify(directory, lambda *_: None).problems
