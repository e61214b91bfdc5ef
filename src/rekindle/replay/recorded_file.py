"""Recorded files: traces and requests, plain or gzipped. Failures raise UnreadableFile."""

from collections.abc import Iterator
from pathlib import Path

from rekindle.bounded_file import lines_of, read_unpacked

MAX_BYTES = 2**30  # of a file, unpacked; picked


def recorded_text(path: Path) -> str:
    """Return the text of the file."""
    # A byte that is not UTF-8 makes its own line unreadable, not the others.
    return read_unpacked(path, MAX_BYTES).decode("utf-8-sig", "replace")


def recorded_lines(path: Path) -> Iterator[bytes]:
    """Return the lines of the file that are not blank."""
    return (line for line in lines_of(path, MAX_BYTES) if line.strip())
