"""Recorded files: traces and requests, plain or gzipped."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from rekindle.errors import StartupError

GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader | gzip.GzipFile]:
    """Open the file for reading. Raise StartupError, also while it is read, if it is damaged."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise StartupError(f"{path} is not a complete gzip file: {error}.") from error
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror or error}.") from error
