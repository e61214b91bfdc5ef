"""A cache directory that others can write to, and links inside it."""

import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.disk.trust import trouble_with
from rekindle.cache.fingerprint import DIGESTS_NAME, DigestFile
from rekindle.cache.responses.store import ResponseDatabase
from rekindle.config.cache import CacheSettings
from rekindle.errors import StartupError, TierFailed
from rekindle.generation.forgetting import Tombstones
from rekindle.models.stores import check_cache_directory
from tests.cache.entries import make_entry

ENTRY = make_entry(1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "cache"
    with closing(open_catalog(made)):
        pass
    return made


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    made = tmp_path / "elsewhere"
    made.mkdir()
    return made


def test_a_new_directory_is_private(directory: Path) -> None:
    for each in (directory, directory / "entries", directory / "quarantine"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert trouble_with(directory) is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("inside", ["", "entries"])
def test_a_directory_that_others_can_write_is_told_and_refused_if_strict(
    mode: int, inside: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / inside).chmod(mode)
    check_cache_directory(CacheSettings(cache_dir=directory))
    assert f"chmod 700 {directory / inside}".rstrip("/") in caplog.text
    with pytest.raises(StartupError, match="The cache directory is not private: Other users can"):
        check_cache_directory(CacheSettings(cache_dir=directory, strict=True))


def test_a_parent_in_which_others_can_rename_counts(directory: Path) -> None:
    directory.parent.chmod(0o777)
    assert "can rename" in (trouble_with(directory) or "")
    directory.parent.chmod(0o1777)  # sticky, as /tmp
    assert trouble_with(directory) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("inside", ["cache", ""])
def test_a_directory_of_another_user_is_told(inside: str, directory: Path) -> None:
    """So is a directory inside one."""
    os.chown(directory.parent / inside, 12345, -1)
    assert "belongs to another user (uid 12345)" in (trouble_with(directory) or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_root_may_own_the_directory_and_a_group_may_write_to_its_parent(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    os.chown(directory.parent, 0, 10001)
    directory.parent.chmod(0o2775)  # the root of a volume in Kubernetes
    assert trouble_with(directory) is None


def linked(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def test_an_entry_behind_a_linked_folder_is_neither_read_nor_written(
    directory: Path, elsewhere: Path
) -> None:
    files = EntryFiles(directory)
    linked(files.path(ENTRY.header.key).parent, elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        files.write(ENTRY)
    with pytest.raises(OSError, match="symbolic link"):
        files.read(ENTRY.header.key)
    assert list(elsewhere.iterdir()) == []


def test_files_behind_a_linked_folder_are_not_listed(directory: Path, elsewhere: Path) -> None:
    other = elsewhere.parent / "other"
    EntryFiles(other).write(ENTRY)
    path = EntryFiles(directory).path(ENTRY.header.key)
    linked(path.parent, EntryFiles(other).path(ENTRY.header.key).parent)
    assert EntryFiles(directory).names() == set()


@pytest.mark.parametrize("name", ["entries", "quarantine"])
def test_a_folder_that_is_a_link_is_refused(name: str, directory: Path, elsewhere: Path) -> None:
    linked(directory / name, elsewhere)
    with pytest.raises(TierFailed, match="symbolic link"):
        open_catalog(directory)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_catalogue_that_is_a_link_is_replaced_and_its_target_stays(
    suffix: str, directory: Path, elsewhere: Path, *, exists: bool
) -> None:
    target = elsewhere / "file"
    if exists:
        target.write_bytes(b"of somebody else")
    linked(directory / f"catalog.sqlite3{suffix}", target)
    with closing(open_catalog(directory)) as catalog:
        catalog.add([ENTRY.header])
    assert not (directory / f"catalog.sqlite3{suffix}").is_symlink()
    assert (target.read_bytes() == b"of somebody else") if exists else not target.exists()


def test_responses_behind_a_link_are_not_read(directory: Path, elsewhere: Path) -> None:
    linked(directory / "responses.sqlite3", elsewhere / "file")
    with closing(ResponseDatabase(directory, forgotten=Tombstones())) as store:
        assert store.get("resp_1") is None


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_digests_that_are_a_link_or_a_pipe_count_as_empty(
    make: Callable[[Path], object], directory: Path
) -> None:
    make(directory / DIGESTS_NAME)
    assert DigestFile(directory / DIGESTS_NAME).load() == {}


@pytest.mark.parametrize("name", ["catalog.sqlite3", "entry"])
def test_a_pipe_in_place_of_a_file_does_not_block(name: str, directory: Path) -> None:
    files = EntryFiles(directory)
    path = files.path(ENTRY.header.key) if name == "entry" else directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with closing(open_catalog(directory)) as catalog:
        assert list(catalog.rows()) == []
    assert not path.exists() or path.is_file()
