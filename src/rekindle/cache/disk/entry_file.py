"""Entries as files of a directory: read, write, list, and move corrupt ones to quarantine.

    entries/ab/<key>.kv          the first byte of the key names the folder
    entries/ab/<key>.<..>.tmp    while it is written; its writer holds a lock on it
    quarantine/<time>-<name>     the newest few files that failed a check

Every method raises the OSError of the system unchanged. Safe to use from any thread.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from rekindle.cache.entry import (
    HEADER_BYTES,
    MAX_PREAMBLE_BYTES,
    Entry,
    Header,
    Key,
    checksum,
    decode_preamble,
    encode_preamble,
)
from rekindle.errors import EntryCorrupt
from rekindle.generation.model_state import Payload
from rekindle.huge_pages import filled_buffer

_log = logging.getLogger(__name__)

DISK_BLOCK_BYTES = 4096
# ext4 needs 44 bytes for each file name and leaves up to half of a folder's blocks unused.
_NAME_BYTES = 128
_MAX_FOLDERS = 256
_QUARANTINE_FILES = 16
_ENTRY_SUFFIX = ".kv"
_TEMPORARY_SUFFIX = ".tmp"


class EntryFiles:
    def __init__(self, directory: Path, *, quarantine_bytes: int | None = None) -> None:
        """Keep at most `quarantine_bytes` in quarantine, the newest files; None: no limit."""
        self._entries = directory / "entries"
        self._quarantine = directory / "quarantine"
        self._quarantine_bytes = quarantine_bytes
        self._n_folders = 0
        # The process id is only for people: containers that share a directory may have equal ids.
        self._writer = f"{os.getpid()}-{secrets.token_hex(4)}"

    def create_folders(self) -> None:
        self._entries.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._entries, self._quarantine):
            _make_folder(folder)

    def path(self, key: Key) -> Path:
        return self._entries / name_of(key)

    def read(self, key: Key) -> Entry:
        """Return the entry after checking key, length and both checksums. Raises EntryCorrupt."""
        with self._opened(self.path(key)) as file:
            header, payload_check = _read_preamble(file)
            if header.key != key:
                raise EntryCorrupt(f"it holds the entry {header.key.hex()}")
            file.seek(header.preamble_bytes)
            payload = filled_buffer(header.payload_bytes, lambda view: _read_into(file, view))
        if checksum(payload) != payload_check:
            raise EntryCorrupt("its payload does not match its checksum")
        return Entry(header, payload)

    def read_header(self, path: Path) -> Header:
        """Return the header, checked as far as possible without payload. Raises EntryCorrupt."""
        with self._opened(path) as file:
            header, _ = _read_preamble(file)
        if self.path(header.key) != path:
            raise EntryCorrupt(f"it holds the entry {header.key.hex()}")
        return header

    def write(self, entry: Entry) -> None:
        """Write the entry under a temporary name, then rename it."""
        path = self.path(entry.header.key)
        temporary = path.with_suffix(f".{self._writer}{_TEMPORARY_SUFFIX}")
        try:
            with self._create(temporary) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                _write_all(file, encode_preamble(entry))
                _write_all(file, entry.payload)
                temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def is_whole(self, header: Header) -> bool:
        """Return whether a file of the right size exists."""
        try:
            return self.path(header.key).lstat().st_size == header.file_bytes
        except OSError:
            return False

    def remove(self, keys: Sequence[Key]) -> int:
        """Delete files. Return the bytes of those that could not be deleted, and log why."""
        n_stuck_bytes = 0
        for path in map(self.path, keys):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("cache: delete failed: %s", error)
                n_stuck_bytes += _size_on_disk(path)
        return n_stuck_bytes

    def names(self) -> set[str]:
        """Return the names of all entry files. Remove temporary files of killed writers."""
        names = set()
        for folder in _names_in(self._entries):
            if (self._entries / folder).is_symlink():
                continue
            for name in _names_in(self._entries / folder):
                if name.endswith(_ENTRY_SUFFIX):
                    names.add(f"{folder}/{name}")
                elif name.endswith(_TEMPORARY_SUFFIX):
                    _remove_unless_written(self._entries / folder / name)
        return names

    def path_of(self, name: str) -> Path:
        return self._entries / name

    def set_aside(self, path: Path) -> None:
        """Move a file to quarantine, and delete the oldest files there beyond the limits."""
        self._quarantine.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_folder(self._quarantine)
        path.rename(self._quarantine / f"{time.time_ns()}-{path.name}")
        n_bytes = 0
        for n_kept, name in enumerate(sorted(_names_in(self._quarantine), reverse=True)):
            old = self._quarantine / name
            n_bytes += _size_on_disk(old)
            too_much = self._quarantine_bytes is not None and n_bytes > self._quarantine_bytes
            if n_kept >= _QUARANTINE_FILES or (too_much and n_kept > 0):
                _delete(old)

    @property
    def entries_folder(self) -> Path:
        return self._entries

    def empty_quarantine(self) -> int:
        """Delete the files in quarantine. Return how many there were."""
        names = _names_in(self._quarantine)
        for name in names:
            _delete(self._quarantine / name)
        return len(names)

    def overhead_bytes(self) -> int:
        """Return the bytes of the directory besides entries and catalogue."""
        if self._n_folders < _MAX_FOLDERS:  # folders are never removed
            self._n_folders = len(_names_in(self._entries))
        set_aside = sum(
            _size_on_disk(self._quarantine / name) for name in _names_in(self._quarantine)
        )
        # The directory, its two folders, and the small file of weight digests.
        return (4 + self._n_folders) * DISK_BLOCK_BYTES + set_aside

    def _opened(self, path: Path) -> FileIO:
        self._check_folders(path)
        return _open(path)

    def _create(self, path: Path) -> FileIO:
        self._check_folders(path)
        try:
            return FileIO(path, "x", opener=_opener)
        except FileNotFoundError:
            self.create_folders()
            _make_folder(path.parent)
            return FileIO(path, "x", opener=_opener)

    def _check_folders(self, path: Path) -> None:
        """Refuse links to elsewhere. The file itself is opened without following one."""
        for folder in (self._entries, path.parent):
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "a folder in it is a symbolic link", str(folder))


def size_on_disk(header: Header) -> int:
    """Return the entry's size as du counts it, with its name in the folder."""
    return -(-header.file_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES + _NAME_BYTES


def name_of(key: Key) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}{_ENTRY_SUFFIX}"


def _make_folder(folder: Path) -> None:
    """Create a private folder. A link is none, even if it leads to a folder."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "a folder in it is a symbolic link", str(folder))
    folder.mkdir(mode=0o700, exist_ok=True)


def _open(path: Path) -> FileIO:
    return FileIO(path, opener=_opener)


def _opener(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _read_preamble(file: FileIO) -> tuple[Header, int]:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise EntryCorrupt("it is not a plain file")
    data = file.read(MAX_PREAMBLE_BYTES)
    header, payload_check = decode_preamble(data)
    if any(data[HEADER_BYTES + len(header.tokens) : header.preamble_bytes]):
        raise EntryCorrupt("there are unexpected bytes between its header and its payload")
    if status.st_size != header.file_bytes:
        raise EntryCorrupt(f"the file has {status.st_size} bytes instead of {header.file_bytes}")
    return header, payload_check


def _read_into(file: FileIO, buffer: memoryview) -> None:
    while buffer:
        n_read = file.readinto(buffer)
        if not n_read:
            raise EntryCorrupt("the file ended while it was read")
        buffer = buffer[n_read:]


def _write_all(file: FileIO, data: Payload) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_unless_written(path: Path) -> None:
    with suppress(OSError), _open(path) as file:  # BlockingIOError: its writer is alive
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _size_on_disk(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
