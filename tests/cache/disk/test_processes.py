"""The disk tier in several processes: killed in the middle of a write, and side by side."""

import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.entry import Entry, Key
from rekindle.errors import EntryMissing
from tests.cache.entries import (
    MIB,
    assert_catalogue_is_true,
    bytes_by_du,
    make_entry,
    open_tier,
    stored_keys,
)

N_KILLS = 12


def start_writer(directory: Path, **options: float) -> "subprocess.Popen[str]":
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cache.disk.writer", str(directory), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_while_writing(writer: "subprocess.Popen[str]", seconds: float) -> list[Key]:
    """The keys of the puts that had returned."""
    assert writer.stdout is not None
    assert writer.stderr is not None
    with writer:
        first = writer.stdout.readline()
        time.sleep(seconds)
        writer.kill()
        output, errors = writer.stdout.read(), writer.stderr.read()
    assert first == "open\n", errors
    # The last line may be cut.
    return [bytes.fromhex(line) for line in output.split("\n")[:-1]]


def test_every_put_that_returned_before_a_kill_is_there_and_right(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    noise = random.Random(1)
    stored: dict[Key, Entry] = {}
    for kill in range(N_KILLS):
        seed = kill * 10_000
        writer = start_writer(directory, seed=seed)
        keys = kill_while_writing(writer, noise.uniform(0, 0.25))
        written = [make_entry(seed + n, payload_bytes=300_000) for n in range(len(keys))]
        assert [entry.header.key for entry in written] == keys
        stored |= {entry.header.key: entry for entry in written}
        with closing(open_tier(directory, budget_bytes=2**30)) as tier:
            # One more at most: its put had not returned yet.
            assert 0 <= len(set(stored_keys(tier)) - stored.keys()) <= kill + 1
            for key in keys:
                assert tier.get(key) == stored[key]
        assert not list(directory.rglob("*.tmp"))
        assert_catalogue_is_true(directory)
    with closing(open_tier(directory, budget_bytes=2**30)) as tier:
        assert all(tier.get(key) == entry for key, entry in stored.items())
        for key in stored_keys(tier):
            tier.get(key)
    assert len(stored) > N_KILLS


def test_a_kill_while_entries_are_evicted_leaves_the_budget_and_nothing_wrong(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "cache"
    noise = random.Random(2)
    for kill in range(N_KILLS // 2):
        writer = start_writer(directory, seed=kill * 100, budget_bytes=4 * MIB)
        kill_while_writing(writer, noise.uniform(0, 0.25))
        with closing(open_tier(directory, budget_bytes=4 * MIB)) as tier:
            for key in stored_keys(tier):
                tier.get(key)
            tier.put(make_entry(kill))
            assert bytes_by_du(directory) <= 4 * MIB
        assert_catalogue_is_true(directory)


def finish(writer: "subprocess.Popen[str]") -> list[str]:
    output, errors = writer.communicate(timeout=120)
    assert writer.returncode == 0, errors
    assert errors == ""
    return output.split()


def test_two_servers_share_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    budget_bytes, payload_bytes = 6 * MIB, 200_000
    writers = [
        start_writer(
            directory,
            seed=seed,
            entries=200,
            distinct=40,
            read_share=1.0,
            payload_bytes=payload_bytes,
            budget_bytes=budget_bytes,
        )
        for seed in (0, 20)
    ]
    most_bytes = 0
    while all(writer.poll() is None for writer in writers):
        for writer in writers:
            writer.send_signal(signal.SIGSTOP)  # du takes its time
        if directory.exists():
            most_bytes = max(most_bytes, bytes_by_du(directory))
        for writer in writers:
            writer.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    for writer in writers:
        assert finish(writer).count("found") > 50
    assert budget_bytes * 0.9 < most_bytes <= budget_bytes + payload_bytes
    assert_catalogue_is_true(directory)
    assert not list((directory / "quarantine").iterdir())


def test_two_servers_that_find_a_broken_catalogue_rebuild_one(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    with closing(open_tier(directory)) as tier:
        for seed in range(300):
            tier.put(make_entry(seed, payload_bytes=100))
    (directory / "catalog.sqlite3").write_text("broken " * 1000)
    writers = [
        start_writer(directory, seed=1000 * n, entries=20, payload_bytes=100) for n in (1, 2, 3)
    ]
    for writer in writers:
        output, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
        assert len(output.split()) == 21
    assert len(list((directory / "quarantine").iterdir())) == 1
    assert_catalogue_is_true(directory)
    with closing(open_tier(directory)) as tier:
        assert len(stored_keys(tier)) == 360


def test_an_entry_evicted_by_another_server_is_a_miss(tmp_path: Path) -> None:
    entry = make_entry(1, payload_bytes=MIB)
    with closing(open_tier(tmp_path, budget_bytes=4 * MIB)) as tier:
        tier.put(entry)
        finish(start_writer(tmp_path, seed=50, entries=6, budget_bytes=2 * MIB))
        with pytest.raises(EntryMissing):
            tier.get(entry.header.key)
        tier.put(entry)
        assert tier.get(entry.header.key) == entry
