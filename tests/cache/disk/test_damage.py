"""The disk tier on a disk that lies, fills up, turns read-only or goes away."""

import errno
import fcntl
import logging
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.cache.disk import catalogue
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Entry, Retention
from rekindle.errors import EntryCorrupt, EntryMissing, TierFailed
from tests.cache.entries import (
    MIB,
    OTHER_MODEL,
    assert_catalogue_is_true,
    file_of,
    fill,
    make_chain,
    make_entry,
    open_tier,
    stored_keys,
)

ENTRY = make_entry(1)
KEY = ENTRY.header.key


def quarantined(directory: Path) -> list[str]:
    return sorted(path.name.split("-", 1)[1] for path in (directory / "quarantine").iterdir())


# -- files --------------------------------------------------------------------------------------

REGIONS = {
    "magic": 0,
    "version": 4,
    "kind": 6,
    "reason": 7,
    "position": 8,
    "token count": 12,
    "payload length": 17,
    "compute seconds": 24,
    "creation": 39,
    "key": 40,
    "parent": 71,
    "fingerprint": 72,
    "payload checksum": 95,
    "header checksum": 96,
    "first token": 104,
    "last token": 104 + 4 * 256 - 1,
    "padding": 104 + 4 * 256,
    "first payload byte": ENTRY.header.preamble_bytes,
    "last payload byte": ENTRY.header.file_bytes - 1,
}


@pytest.mark.parametrize("region", REGIONS)
def test_a_flipped_bit_is_a_miss_and_the_file_moves_aside(
    region: str, directory: Path, tier: DiskTier
) -> None:
    tier.put(ENTRY)
    path = file_of(directory, KEY)
    data = bytearray(path.read_bytes())
    data[REGIONS[region]] ^= 1 << random.Random(region).randrange(8)
    path.write_bytes(data)
    with pytest.raises(EntryCorrupt):
        tier.get(KEY)
    assert quarantined(directory) == [path.name]
    assert not path.exists()
    assert stored_keys(tier) == []
    with pytest.raises(EntryMissing):
        tier.get(KEY)
    tier.put(ENTRY)
    assert tier.get(KEY) == ENTRY


def shorten(n_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, n_bytes)


def replace_with(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def resign_for_other_model(path: Path) -> None:
    """The same tokens behind the same parent, but written for another model."""
    header = ENTRY.header
    other = Entry(make_entry(1, parent=header.parent, model=OTHER_MODEL).header, ENTRY.payload)
    assert other.header.key == KEY
    files = EntryFiles(path.parents[2])
    files.write(other)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (shorten(0), "the file has 0 bytes"),
    "cut in the header": (shorten(50), "the file has 50 bytes"),
    "cut in the tokens": (shorten(400), "does not match its checksum"),
    "cut in the padding": (shorten(1140), "the file has 1140 bytes"),
    "cut in the payload": (shorten(9000), "9000 bytes instead of 21152"),
    "one byte short": (shorten(21_151), "21151 bytes instead of 21152"),
    "too long": (lengthen, "21156 bytes instead of 21152"),
    "zeros": (lambda path: path.write_bytes(bytes(21_152)), "not a file of ours"),
    "foreign": (lambda path: path.write_text("#!/bin/sh\n" * 50), "not a file of ours"),
    "a directory": (replace_with(lambda path: (path / "sub").mkdir(parents=True)), "directory"),
    "a named pipe": (replace_with(os.mkfifo), "not a plain file"),
    "a dangling link": (replace_with(lambda path: path.symlink_to("nowhere")), "symbolic"),
    "another model's": (resign_for_other_model, "belongs to another model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_foreign_object_in_place_of_a_file_is_a_miss_with_its_reason(
    damage: str, directory: Path, tier: DiskTier
) -> None:
    tier.put(ENTRY)
    path = file_of(directory, KEY)
    break_it, reason = DAMAGES[damage]
    break_it(path)
    with pytest.raises(EntryCorrupt, match=reason):
        tier.get(KEY)
    assert quarantined(directory) == [path.name]
    assert stored_keys(tier) == []
    tier.put(ENTRY)
    assert tier.get(KEY) == ENTRY


def test_swapped_files_are_both_misses(directory: Path, tier: DiskTier) -> None:
    one, two = make_entry(1), make_entry(2)
    tier.put(one)
    tier.put(two)
    paths = [file_of(directory, entry.header.key) for entry in (one, two)]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    for entry, other in ((one, two), (two, one)):
        with pytest.raises(EntryCorrupt, match=f"holds the entry {other.header.key.hex()}"):
            tier.get(entry.header.key)


def test_swapped_payloads_are_both_misses(directory: Path, tier: DiskTier) -> None:
    one, two = make_entry(1), make_entry(2)
    tier.put(one)
    tier.put(two)
    for entry, other in ((one, two), (two, one)):
        with file_of(directory, entry.header.key).open("r+b") as file:
            file.seek(entry.header.preamble_bytes)
            file.write(bytes(other.payload))
        with pytest.raises(EntryCorrupt, match="payload does not match"):
            tier.get(entry.header.key)


def test_a_missing_file_is_a_miss_that_is_forgotten(directory: Path, tier: DiskTier) -> None:
    tier.put(ENTRY)
    file_of(directory, KEY).unlink()
    with pytest.raises(EntryMissing):
        tier.get(KEY)
    assert stored_keys(tier) == []


def test_running_out_of_file_handles_blames_no_file(
    directory: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(ENTRY)

    def refuse(*args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(TierFailed, match="Too many open files"):
            tier.get(KEY)
    assert tier.get(KEY) == ENTRY


def test_only_the_newest_sixteen_stay_in_quarantine(directory: Path, tier: DiskTier) -> None:
    entries = [make_entry(seed, payload_bytes=100) for seed in range(20)]
    for entry in entries:
        tier.put(entry)
        tier.quarantine(entry.header.key, "for the test")
    newest = {f"{entry.header.key.hex()}.kv" for entry in entries[4:]}
    assert set(quarantined(directory)) == newest


def test_the_quarantine_takes_a_small_share_of_the_budget(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=8 * MIB)) as tier:
        for seed in range(8):
            entry = make_entry(seed, payload_bytes=200_000)
            tier.put(entry)
            tier.quarantine(entry.header.key, "for the test")
        assert len(quarantined(directory)) == 2


# -- what a start finds -------------------------------------------------------------------------


def test_a_start_quarantines_unreadable_entries_and_keeps_foreign_files(
    directory: Path,
) -> None:
    with closing(open_tier(directory)) as tier:
        tier.put(ENTRY)
    folder = file_of(directory, KEY).parent
    (folder / f"{'ab' * 16}.kv").write_bytes(b"no header")
    (folder / f"{'cd' * 16}.kv").mkdir()
    shutil.copy(file_of(directory, KEY), folder / f"{'ef' * 16}.kv")
    (folder / "README").write_text("not ours")
    (directory / "entries" / "notes.kv").write_text("not in a folder")
    with closing(open_tier(directory)) as tier:
        assert stored_keys(tier) == [KEY]
    assert quarantined(directory) == [f"{each * 16}.kv" for each in ("ab", "cd", "ef")]
    assert (folder / "README").exists()
    assert (directory / "entries" / "notes.kv").exists()


def test_partial_files_of_dead_writers_are_removed_and_of_living_ones_kept(
    directory: Path, tier: DiskTier
) -> None:
    tier.put(ENTRY)
    stale, written = (file_of(directory, KEY).with_suffix(f".{n}-ab.tmp") for n in (123, 124))
    stale.write_bytes(b"half")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        tier.open()
        assert not stale.exists()
        assert written.exists()
    tier.open()
    assert not written.exists()


def damage_catalogue_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8192:12288] = random.Random(1).randbytes(4096)
    path.write_bytes(data)


def run_sql(statement: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(statement)

    return run


CATALOGUE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "not a database": lambda path: path.write_text("hello " * 1000),
    "zeros": lambda path: path.write_bytes(bytes(40_960)),
    "cut short": lambda path: os.truncate(path, 12_288),
    "cut inside a page": lambda path: os.truncate(path, 10_000),
    "a broken page": damage_catalogue_page,
    "of another version": run_sql("PRAGMA user_version = 99"),
    "of another program": run_sql("PRAGMA application_id = 7; PRAGMA user_version = 1"),
    "a directory": replace_with(Path.mkdir),
}


@pytest.mark.parametrize("damage", CATALOGUE_DAMAGES)
def test_an_unusable_catalogue_is_rebuilt_from_the_files(
    damage: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = make_chain(1, 20, payload_bytes=100)
    with closing(open_tier(directory)) as tier:
        for entry in chain:
            tier.put(entry)
    CATALOGUE_DAMAGES[damage](directory / "catalog.sqlite3")
    with closing(open_tier(directory)) as tier:
        assert set(stored_keys(tier)) == {entry.header.key for entry in chain}
    assert quarantined(directory) == ["catalog.sqlite3"]
    assert "quarantined" in caplog.text
    assert_catalogue_is_true(directory)


@pytest.mark.parametrize("content", [b"", None])
def test_an_empty_or_absent_catalogue_is_filled_from_the_files(
    content: bytes | None, directory: Path
) -> None:
    with closing(open_tier(directory)) as tier:
        tier.put(ENTRY)
    (directory / "catalog.sqlite3").unlink()
    if content is not None:
        (directory / "catalog.sqlite3").write_bytes(content)
    with closing(open_tier(directory)) as tier:
        assert stored_keys(tier) == [KEY]
    assert quarantined(directory) == []


def test_a_locked_catalogue_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A VACUUM of another process may take longer than anybody waits."""
    monkeypatch.setattr(catalogue, "BUSY_SECONDS", 0.2)
    owner = Retention(session="s", asked_at=1_700_000_000.0)
    with closing(open_tier(directory)) as tier:
        tier.put(replace(ENTRY, retention=owner))
    with closing(sqlite3.connect(directory / "catalog.sqlite3", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(TierFailed, match="locked"):
            open_tier(directory)
    assert quarantined(directory) == []
    with closing(open_tier(directory)) as tier:
        assert [row.retention for batch in tier.rows() for row in batch] == [owner]


def test_a_row_whose_tokens_changed_is_not_shown(
    directory: Path, tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    for entry in (ENTRY, make_entry(2), make_entry(3)):
        tier.put(entry)
    tier.close()
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as connection:
        connection.execute("UPDATE entries SET tokens = zeroblob(1024) WHERE key = ?", (KEY,))
        reason = "UPDATE entries SET reason = 77 WHERE key = ?"
        connection.execute(reason, (make_entry(2).header.key,))
        connection.commit()
    tier.open()
    assert stored_keys(tier) == [make_entry(3).header.key]
    assert "damaged" in caplog.text


def test_a_session_that_is_not_utf8_hides_no_entry(directory: Path, tier: DiskTier) -> None:
    tier.put(ENTRY)
    tier.close()
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as connection:
        connection.execute("UPDATE entries SET session = CAST(x'ff' AS TEXT)")
        connection.commit()
    tier.open()
    assert stored_keys(tier) == [KEY]


# -- a directory that fails ---------------------------------------------------------------------


@contextmanager
def as_ordinary_user(directory: Path) -> Iterator[None]:
    """Root ignores permissions, so give them up for a while."""
    if os.geteuid() != 0:
        yield
        return
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """Not in tmp_path, where only the user who runs the tests gets."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    (parent / "cache").mkdir()
    try:
        yield parent / "cache"
    finally:
        for folder in [path for path in parent.rglob("*") if path.is_dir()]:
            folder.chmod(0o700)
        shutil.rmtree(parent)


def test_an_unreadable_file_is_a_miss_and_moves_aside(open_directory: Path) -> None:
    with as_ordinary_user(open_directory), closing(open_tier(open_directory)) as tier:
        tier.put(ENTRY)
        file_of(open_directory, KEY).chmod(0)
        with pytest.raises(EntryCorrupt, match="Permission denied"):
            tier.get(KEY)
        assert stored_keys(tier) == []
        assert quarantined(open_directory) == [f"{KEY.hex()}.kv"]


def test_an_unreadable_file_that_cannot_be_moved_is_forgotten(
    open_directory: Path,
) -> None:
    with as_ordinary_user(open_directory), closing(open_tier(open_directory)) as tier:
        tier.put(ENTRY)
        file_of(open_directory, KEY).chmod(0)
        file_of(open_directory, KEY).parent.chmod(0o500)
        with pytest.raises(EntryCorrupt, match="Permission denied"):
            tier.get(KEY)
        assert stored_keys(tier) == []


def test_a_directory_without_permission_is_refused_until_it_is_granted(
    open_directory: Path,
) -> None:
    with as_ordinary_user(open_directory):
        open_directory.chmod(0o500)
        with pytest.raises(TierFailed, match="Permission denied"):
            open_tier(open_directory)
        open_directory.chmod(0o700)
        with closing(open_tier(open_directory)) as tier:
            (open_directory / "entries").chmod(0o500)
            with pytest.raises(TierFailed, match="Permission denied"):
                tier.put(ENTRY)
            (open_directory / "entries").chmod(0o700)
            tier.put(ENTRY)
            assert tier.get(KEY) == ENTRY


def test_files_that_cannot_be_deleted_still_count(
    open_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with as_ordinary_user(open_directory), closing(open_tier(open_directory)) as tier:
        entry = make_entry(1, payload_bytes=MIB)
        tier.put(entry)
        folder = file_of(open_directory, entry.header.key).parent
        folder.chmod(0o500)
        before = tier.n_bytes
        tier.drop([entry.header.key])
        assert before - tier.n_bytes < 4096
        assert "delete failed" in caplog.text
        folder.chmod(0o700)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFailed, match=r"exists|directory"):
        open_tier(tmp_path / "file")
    with pytest.raises(TierFailed, match="directory"):
        open_tier(tmp_path / "file" / "below")


def test_a_directory_that_vanished_is_made_again(directory: Path, tier: DiskTier) -> None:
    tier.put(ENTRY)
    shutil.rmtree(directory)
    with pytest.raises(EntryMissing):
        tier.get(KEY)
    tier.put(make_entry(2))
    assert stored_keys(tier) == [make_entry(2).header.key]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert_catalogue_is_true(directory)


@pytest.mark.parametrize("lost", ["entries", "quarantine"])
def test_a_folder_that_vanished_is_made_again(lost: str, directory: Path, tier: DiskTier) -> None:
    tier.put(ENTRY)
    shutil.rmtree(directory / lost)
    tier.put(make_entry(2))
    tier.quarantine(make_entry(2).header.key, "for the test")
    assert quarantined(directory) == [f"{make_entry(2).header.key.hex()}.kv"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.rglob("*"))


def test_a_catalogue_that_was_replaced_is_noticed(directory: Path, tier: DiskTier) -> None:
    tier.put(ENTRY)
    for file in directory.glob("catalog*"):
        file.unlink()
    with closing(open_catalog(directory)):
        tier.put(make_entry(2))
    assert set(stored_keys(tier)) == {KEY, make_entry(2).header.key}
    assert_catalogue_is_true(directory)


def test_a_catalogue_that_breaks_while_it_is_open_is_replaced_by_the_next_put(
    directory: Path, tier: DiskTier
) -> None:
    tier.put(make_entry(1))
    with closing(open_tier(directory)) as other:
        other.put(make_entry(2))  # so that nothing the tier remembers of the file is valid
    path = directory / "catalog.sqlite3"
    run_sql("PRAGMA wal_checkpoint(TRUNCATE)")(path)
    with path.open("r+b") as file:
        n_bytes = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(bytes(n_bytes - 4096))
    with pytest.raises(TierFailed, match="malformed"):
        tier.put(make_entry(3))
    tier.put(make_entry(3))
    assert len(stored_keys(tier)) == 3
    assert_catalogue_is_true(directory)


@contextmanager
def mounted(*arguments: str, at: Path) -> Iterator[None]:
    command = ["mount", *arguments, str(at)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_a_full_disk_refuses_puts_until_there_is_room(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=6m", "tmpfs", at=tmp_path):
        directory, ballast = tmp_path / "cache", tmp_path / "ballast"
        with closing(open_tier(directory)) as tier:
            tier.put(make_entry(1, payload_bytes=MIB))
            ballast.write_bytes(bytes(4 * MIB))
            for seed in range(2, 6):
                with pytest.raises(TierFailed, match="No space left on device"):
                    tier.put(make_entry(seed, payload_bytes=MIB))
            assert not list(directory.rglob("*.tmp"))
            assert tier.get(make_entry(1, payload_bytes=MIB).header.key)
            ballast.unlink()
            for seed in range(2, 5):
                tier.put(make_entry(seed, payload_bytes=MIB))
            assert len(stored_keys(tier)) == 4
            assert_catalogue_is_true(directory)


def test_a_disk_too_full_for_the_catalogue_keeps_no_file_without_a_row(tmp_path: Path) -> None:
    with mounted("-t", "tmpfs", "-o", "size=2m", "tmpfs", at=tmp_path):
        directory, ballast = tmp_path / "cache", tmp_path / "ballast"
        with closing(open_tier(directory)) as tier:
            room = shutil.disk_usage(tmp_path).free
            ballast.write_bytes(bytes(room - 65_536))
            with pytest.raises(TierFailed, match="database or disk is full"):
                fill(tier, [make_entry(seed, payload_bytes=10) for seed in range(60)])
            assert_catalogue_is_true(directory)
            ballast.unlink()
            tier.put(make_entry(100))
            assert_catalogue_is_true(directory)


def test_a_disk_that_turns_read_only_refuses_puts_and_serves_gets(directory: Path) -> None:
    directory.mkdir()
    with closing(open_tier(directory)) as tier:
        tier.put(ENTRY)
        with mounted("--bind", str(directory), at=directory):
            subprocess.run(["mount", "-o", "remount,ro,bind", str(directory)], check=True)
            with pytest.raises(TierFailed, match="Read-only file system"):
                tier.put(make_entry(2))
            assert tier.get(KEY) == ENTRY
            with pytest.raises(TierFailed, match=r"(?i)read-?only"):
                open_tier(directory)
        tier.put(make_entry(2))
        assert len(stored_keys(tier)) == 2


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
