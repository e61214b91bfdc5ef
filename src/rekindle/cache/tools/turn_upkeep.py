"""Operations on the turns of a directory: count, verify and repair them.

For commands without a model, while servers may use the file.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.sqlite.connection import (
    DAMAGED,
    column,
    connect,
    count_rows,
    primary_code,
    transaction,
)
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.sqlite.file import NoSuchFile, quarantine, reading_only
from rekindle.cache.sqlite.schema import Unusable, check_is_plain_file, check_pages
from rekindle.cache.turns.file import TURNS, WRITE_BUSY_SECONDS, delete_rows, read_rows, row_bytes
from rekindle.cache.turns.recent import Held
from rekindle.errors import TierFailed


@dataclass(frozen=True, slots=True)
class TurnTotals:
    n_turns: int = 0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TurnFindings:
    sound: TurnTotals
    trouble: str | None


def count_turns(directory: Path) -> TurnTotals:
    """Count the turns of all models; none if they cannot be read. Changes nothing on disk."""
    with suppress(TierFailed), reading_only(directory / TURNS.file_name) as connection:
        return TurnTotals(*count_rows(connection, "turns"))
    return TurnTotals()


def verify_turns(directory: Path) -> TurnFindings:
    """Read and verify all turns. Changes nothing on disk."""
    findings = _verify(directory)
    # A server may have begun to write a file that nobody else seemed to use: look again.
    return findings if findings.trouble is None else _verify(directory)


def repair_turns(directory: Path) -> None:
    """Delete damaged turns; quarantine the file if it cannot be read at all."""
    path = directory / TURNS.file_name
    with alone_in(directory):
        try:
            check_is_plain_file(path)
            with closing(connect(path, busy_seconds=WRITE_BUSY_SECONDS)) as connection:
                damaged = [number for number, held in _rows(connection) if held is None]
                with transaction(connection):
                    delete_rows(connection, damaged)
        except FileNotFoundError:
            return
        except (sqlite3.DatabaseError, Unusable) as error:
            if isinstance(error, sqlite3.DatabaseError) and primary_code(error) not in DAMAGED:
                raise TierFailed(f"{path}: {error}") from error
            quarantine(directory, TURNS, EntryFiles(directory).set_aside)


def _verify(directory: Path) -> TurnFindings:
    sizes: list[int] = []
    n_damaged, trouble = 0, None
    try:
        with reading_only(directory / TURNS.file_name) as connection:
            for _, held in _rows(connection):
                if held is None:
                    n_damaged += 1
                else:
                    sizes.append(row_bytes(held.turn))
    except NoSuchFile:
        pass
    except TierFailed as error:
        trouble = error.message
    if n_damaged and trouble is None:
        trouble = f"damaged turns: {n_damaged}"
    return TurnFindings(TurnTotals(len(sizes), sum(sizes)), trouble)


def _rows(connection: sqlite3.Connection) -> Iterator[tuple[int, Held | None]]:
    """Check the file and read all turns."""
    TURNS.check(connection)
    check_pages(connection)
    yield from read_rows(connection, column(connection, "SELECT number FROM turns ORDER BY number"))
