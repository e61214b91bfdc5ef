"""The turns of a directory from outside: counted, checked, and mended.

For commands that have no model, while servers may use the file.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rekindle.cache.disk.database import alone_in, column
from rekindle.cache.turns.file import (
    BATCH_ROWS,
    DAMAGED,
    FILE_NAME,
    TOTALS,
    WRITE_BUSY_SECONDS,
    Reading,
    TooNew,
    Unusable,
    check,
    check_is_file,
    connect,
    primary_code,
    read_rows,
    row_bytes,
    set_aside,
    transaction,
    turn_paths,
)
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
    """Of all models; none where they cannot be read. Changes nothing in the directory."""
    with suppress(TierFailed), _looking_at(directory) as connection:
        ((n_turns, n_bytes),) = connection.execute(TOTALS)
        return TurnTotals(n_turns, n_bytes)
    return TurnTotals()


def verify_turns(directory: Path) -> TurnFindings:
    """Reads all of them. Changes nothing in the directory."""
    findings = _verify(directory)
    # A server may have started to write to what nobody else seemed to use.
    return findings if findings.trouble is None else _verify(directory)


def repair_turns(directory: Path) -> None:
    """Forgets the damaged ones; sets the file aside when it cannot be read at all."""
    path = directory / FILE_NAME
    with alone_in(directory):
        try:
            check_is_file(path)
            with closing(connect(path, busy_seconds=WRITE_BUSY_SECONDS)) as connection:
                check(connection)
                damaged = [n for reading in _readings(connection) for n in reading.damaged]
                with transaction(connection):
                    connection.executemany(
                        "DELETE FROM turns WHERE number = ?", ((number,) for number in damaged)
                    )
        except FileNotFoundError:
            return
        except sqlite3.DatabaseError as error:
            if primary_code(error) not in DAMAGED:
                raise TierFailed(f"{path}: {error}") from error
            set_aside(path)
        except (Unusable, TooNew):
            set_aside(path)


class _NoFile(TierFailed):
    pass


def _verify(directory: Path) -> TurnFindings:
    sound = TurnTotals()
    n_damaged = 0
    try:
        with _looking_at(directory) as connection:
            check(connection)
            for reading in _readings(connection):
                n_damaged += len(reading.damaged)
                sound = TurnTotals(
                    sound.n_turns + len(reading.held),
                    sound.n_bytes + sum(row_bytes(held.turn) for held in reading.held),
                )
    except _NoFile:
        return TurnFindings(sound, None)
    except TierFailed as error:
        return TurnFindings(sound, error.message)
    return TurnFindings(sound, f"damaged turns: {n_damaged}" if n_damaged else None)


@contextmanager
def _looking_at(directory: Path) -> Iterator[sqlite3.Connection]:
    path, log, _ = turn_paths(directory)
    try:
        check_is_file(path)
        # Without a log nobody writes to it, and it can be read even where no log could be made.
        mode = "mode=ro" if log.exists() else "immutable=1"
        with closing(connect(path, busy_seconds=WRITE_BUSY_SECONDS, mode=mode)) as connection:
            yield connection
    except FileNotFoundError as error:
        raise _NoFile(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise TierFailed(str(error.strerror)) from error
    except (sqlite3.DatabaseError, Unusable, TooNew) as error:
        raise TierFailed(str(error)) from error


def _readings(connection: sqlite3.Connection) -> Iterator[Reading]:
    # Not one query for all: an open one would keep the log from being cut.
    numbers = iter(column(connection, "SELECT number FROM turns ORDER BY number"))
    while batch := list(islice(numbers, BATCH_ROWS)):
        reading = Reading([], [])
        read_rows(connection, batch, reading)
        yield reading
