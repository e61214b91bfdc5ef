"""The index of a cache directory: one row per stored entry.

A row holds the entry's header with its token ids, so that a start reads no entry file.
Every method raises TierFailed when SQLite fails.
"""

import dataclasses
import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.cache.disk.catalogue_schema import CATALOG
from rekindle.cache.disk.entry_file import size_on_disk
from rekindle.cache.entry import (
    KEY_BYTES,
    ORDINARY,
    TOKEN_BYTES,
    Header,
    Key,
    Kind,
    Reason,
    Retention,
    entry_key,
)
from rekindle.cache.names import Named
from rekindle.cache.sqlite.connection import column, placeholders, shrink
from rekindle.cache.sqlite.file import SqliteFile
from rekindle.errors import TierFull
from rekindle.generation.request import Rank

_log = logging.getLogger(__name__)

MAX_WAL_BYTES = 2**20  # picked
MIN_WAL_BYTES = 2**16
BUSY_SECONDS = 5.0  # our transactions take less than a tenth of this; picked

_BATCH_ROWS = 1000
_MAX_FOLLOWERS = 1000  # per lookup of a prompt, beyond its own blocks; picked
_MAX_EVICTED_AT_ONCE = 64  # picked: a deleted file costs about 4 ms

# A start reads every row, and Enum's own lookup would double the time.
_KINDS = {kind.value: kind for kind in Kind}
_REASONS = {reason.value: reason for reason in Reason}
_RANKS = {rank.value: rank for rank in Rank}

_HEADER_FIELDS = tuple(field.name for field in dataclasses.fields(Header))
_NAME_FIELDS = tuple(field.name for field in dataclasses.fields(Named))
_ENTRY_FIELDS = (*_HEADER_FIELDS, *Retention._fields, "root")
_ENTRY_COLUMNS = ", ".join(_ENTRY_FIELDS)
_INSERT = f"""
INSERT OR IGNORE INTO entries
    ({_ENTRY_COLUMNS}, disk_bytes, last_used_at, hits, priority, n_children)
SELECT {", ".join(f":{name}" for name in _ENTRY_FIELDS[:-1])},
    coalesce(nullif(:root, x''), (SELECT root FROM entries WHERE key = :parent),
        CASE WHEN :start = 0 THEN :parent ELSE x'' END),
    :disk_bytes, :last_used_at, 1,
    priority((SELECT clock FROM eviction), :compute_seconds, :disk_bytes, 1),
    (SELECT count(*) FROM entries WHERE parent = :key)
"""
_TOUCH = """
UPDATE entries SET
    last_used_at = ?,
    hits = hits + 1,
    priority = priority((SELECT clock FROM eviction), compute_seconds, disk_bytes, hits + 1)
WHERE key = ?
"""
_MARK = "UPDATE entries SET rank = ?, session = ?, pinned_until = ?, asked_at = ? WHERE key = ?"


@dataclass(frozen=True, slots=True)
class CatalogRow:
    header: Header
    last_used_at: float
    hits: int  # 1 for an entry that was only written
    retention: Retention = ORDINARY
    root: Key = b""  # of its namespace; empty: unknown


@dataclass(frozen=True, slots=True)
class Totals:
    n_entries: int = 0
    n_tokens: int = 0  # of blocks only: the tokens before a checkpoint are in blocks
    n_bytes: int = 0  # on disk


class Catalog(SqliteFile):
    """The entries of a directory. `open_catalog` of reconcile.py makes it agree with the files."""

    def __init__(self, directory: Path, *, wal_bytes: int = MAX_WAL_BYTES) -> None:
        super().__init__(
            directory,
            CATALOG,
            busy_seconds=BUSY_SECONDS,
            wal_bytes=max(MIN_WAL_BYTES, min(wal_bytes, MAX_WAL_BYTES)),
        )

    def rows(self) -> Iterator[CatalogRow]:
        """Yield the rows of every model, most recently used first."""
        for batch in self.batches():
            yield from batch

    def batches(self, *, fingerprint: Key | None = None) -> Iterator[list[CatalogRow]]:
        """Yield the rows of one model or, with None, of every model. Most recently used first."""
        with self.reading() as connection:
            ids = column(
                connection,
                "SELECT id FROM entries WHERE ?1 IS NULL OR fingerprint = ?1"
                " ORDER BY last_used_at DESC, id DESC",
                (fingerprint,),
            )
        for first in range(0, len(ids), _BATCH_ROWS):
            # A query that stays open would keep SQLite from truncating the log.
            with self.reading() as connection:
                rows = _read_rows(connection, ids[first : first + _BATCH_ROWS])
            yield rows

    def along(self, path: Sequence[Key]) -> list[CatalogRow]:
        """Return the stored entries of a prompt and their followers.

        `path` is a root and the keys of the blocks after it. Followers are the checkpoints after
        any stored block, and every entry after the last stored block.
        """
        marks = placeholders(path)
        with self.reading() as connection:
            found = dict(
                connection.execute(f"SELECT key, id FROM entries WHERE key IN ({marks})", path)
            )
            last = next((key for key in reversed(path) if key in found), path[0])
            followers = column(
                connection,
                "SELECT id FROM entries WHERE parent = ? LIMIT ?",
                (last, _MAX_FOLLOWERS),
            )
            checkpoints = column(
                connection,
                f"SELECT id FROM entries WHERE parent IN ({marks}) AND kind = ?"
                " ORDER BY last_used_at DESC LIMIT ?",
                (*path, Kind.CHECKPOINT, _MAX_FOLLOWERS),
            )
            ids = {*found.values(), *followers, *checkpoints}
            return _read_rows(connection, sorted(ids))

    def totals(self) -> dict[Key, Totals]:
        """Return the totals of each model, by fingerprint."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT fingerprint, n_entries, n_tokens, n_bytes FROM totals"
            )
            return {
                fingerprint: Totals(*numbers)
                for fingerprint, *numbers in rows
                if _is_key(fingerprint) and all(isinstance(each, int) for each in numbers)
            }

    def all_keys(self) -> list[Key]:
        with self.reading() as connection:
            return [key for key in column(connection, "SELECT key FROM entries") if _is_key(key)]

    def remove_malformed(self) -> None:
        """Delete rows whose key is none: nothing else would find them."""
        malformed = f"typeof(key) != 'blob' OR length(key) != {KEY_BYTES}"
        with self.reading() as connection:
            ids = column(connection, f"SELECT id FROM entries WHERE {malformed}")
        if ids:
            _log.warning("cache: deleted damaged rows of the catalogue n=%d", len(ids))
            with self.writing() as connection:
                connection.executemany("DELETE FROM entries WHERE id = ?", [(id,) for id in ids])

    def has(self, key: Key) -> bool:
        with self.reading() as connection:
            return bool(column(connection, "SELECT 1 FROM entries WHERE key = ?", (key,)))

    def add(
        self,
        headers: Sequence[Header],
        *,
        used_at: float | None = None,
        retention: Retention = ORDINARY,
        root: Key = b"",
    ) -> None:
        """Add entries; existing rows stay. `used_at` None: used when the entry was created.

        Without a `root`, an entry has that of its parent.
        """
        with self.writing() as connection:
            connection.executemany(
                _INSERT, (_parameters(header, used_at, retention, root) for header in headers)
            )

    def mark(self, retentions: Sequence[tuple[Key, Retention]]) -> None:
        """Set the retention of entries."""
        with self.writing() as connection:
            connection.executemany(_MARK, ((*retention, key) for key, retention in retentions))

    def names(self, *, fingerprint: Key) -> list[Named]:
        """Return the names of a model, oldest first."""
        with self.reading() as connection:
            rows = connection.execute(
                f"SELECT {', '.join(_NAME_FIELDS)} FROM names"
                " WHERE fingerprint = ? ORDER BY named_at",
                (fingerprint,),
            )
            named = [Named(**dict(zip(_NAME_FIELDS, row, strict=True))) for row in rows]
        return [each for each in named if _is_sound_name(each)]

    def give_name(self, named: Named, *, fingerprint: Key) -> None:
        row = (fingerprint, *dataclasses.astuple(named))
        with self.writing() as connection:
            _drop_names(connection, [named])  # REPLACE would not count as a removal
            connection.execute("INSERT INTO names VALUES (?, ?, ?, ?, ?, ?)", row)

    def drop_lost_names(self) -> None:
        """Delete the names of models without stored entries."""
        with self.writing() as connection:
            connection.execute(
                "DELETE FROM names WHERE fingerprint NOT IN (SELECT fingerprint FROM totals)"
            )

    def clear_names(self) -> None:
        with self.writing() as connection:
            connection.execute("DELETE FROM names")

    def drop_names(self, names: Sequence[Named]) -> None:
        with self.writing() as connection:
            _drop_names(connection, names)

    def touch(self, keys: Sequence[Key], *, used_at: float) -> list[Key]:
        """Count a use of each entry. Return the keys that have no row."""
        with self.writing() as connection:
            return [key for key in keys if not connection.execute(_TOUCH, (used_at, key)).rowcount]

    def remove(self, keys: Sequence[Key], *, unless: Callable[[Key], bool] | None = None) -> None:
        """Delete rows, not files. `unless` is called while no other connection can write."""
        for first in range(0, len(keys), _BATCH_ROWS):
            with self.writing() as connection:
                batch = keys[first : first + _BATCH_ROWS]
                doomed = [(key,) for key in batch if unless is None or not unless(key)]
                connection.executemany("DELETE FROM entries WHERE key = ?", doomed)
                shrink(connection)

    def evict(
        self, *, limit_bytes: int, target_bytes: int, now: float, is_spared: Callable[[Key], bool]
    ) -> list[Key]:
        """Evict a batch of leaves if more than `limit_bytes` are stored. Return their keys.

        Eviction stops at `target_bytes`. Entries of side requests go before entries of
        conversations, then by lowest priority; pinned entries stay. The caller deletes the files
        and calls again until nothing is evicted. Raises TierFull.
        """
        with self.reading() as connection:
            if _stored_bytes(connection) <= limit_bytes:
                return []
        evicted: list[Key] = []
        with self.writing() as connection:
            n_bytes = _stored_bytes(connection)
            while n_bytes > target_bytes and len(evicted) < _MAX_EVICTED_AT_ONCE:
                leaf = _lowest_leaf(connection, now, is_spared)
                if leaf is None:
                    break
                connection.execute("DELETE FROM entries WHERE id = ?", (leaf.id,))
                connection.execute("UPDATE eviction SET clock = max(clock, ?)", (leaf.priority,))
                n_bytes -= leaf.disk_bytes
                evicted.append(leaf.key)
            if n_bytes > limit_bytes and len(evicted) < _MAX_EVICTED_AT_ONCE:
                raise TierFull("there is no room: every entry that could be evicted is in use")
            shrink(connection)
        return evicted


class _Leaf(NamedTuple):
    id: int
    key: Key
    disk_bytes: int
    priority: float


def _drop_names(connection: sqlite3.Connection, names: Sequence[Named]) -> None:
    connection.executemany(
        "DELETE FROM names WHERE root = ? AND name = ?",
        ((named.root, named.name) for named in names),
    )


def _stored_bytes(connection: sqlite3.Connection) -> int:
    # CAST: a damaged row may hold a text or an infinity.
    query = "SELECT coalesce(sum(CAST(n_bytes AS INTEGER)), 0) FROM totals"
    (n_bytes,) = column(connection, query)
    return int(n_bytes)


def _lowest_leaf(
    connection: sqlite3.Connection, now: float, is_spared: Callable[[Key], bool]
) -> _Leaf | None:
    leaves = connection.execute(
        "SELECT id, key, CAST(disk_bytes AS INTEGER), CAST(priority AS REAL) FROM entries"
        " WHERE n_children = 0 AND pinned_until <= ? ORDER BY rank DESC, priority",
        (now,),
    )
    found = (leaf for leaf in map(_Leaf._make, leaves) if _is_key(leaf.key))
    return next((leaf for leaf in found if not is_spared(leaf.key)), None)


def _read_rows(connection: sqlite3.Connection, ids: Sequence[int]) -> list[CatalogRow]:
    query = f"""
        SELECT id, {_ENTRY_COLUMNS}, last_used_at, hits
        FROM entries WHERE id IN ({",".join(map(str, ids))})
    """
    rows = {id: _row(values) for id, *values in connection.execute(query)}
    return [row for id in ids if (row := rows.get(id)) is not None]


def _row(values: Sequence[Any]) -> CatalogRow | None:
    *header_values, rank, session, pinned_until, asked_at, root, last_used_at, hits = values
    fields = dict(zip(_HEADER_FIELDS, header_values, strict=True))
    # Nothing else notices a flipped bit here, and wrong token ids would match a wrong prompt.
    try:
        fields["kind"] = _KINDS[fields["kind"]]
        fields["reason"] = _REASONS[fields["reason"]]
        header = Header(**fields)
        retention = Retention(_RANKS[rank], session, pinned_until, asked_at)
        is_sound = (
            entry_key(header.parent, header.kind, header.tokens) == header.key
            and _is_key(header.fingerprint)
            and isinstance(session, str)
            and isinstance(asked_at, float)
            and isinstance(root, bytes)
            and 0 <= header.start < 2**32
            and 0 <= header.payload_bytes < 2**63
            and 0 <= hits < 2**63
            # A sum is finite only if each number is. Text raises a TypeError.
            and isfinite(header.compute_seconds + header.created_at + last_used_at + pinned_until)
        )
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        _log.warning("cache: a row of the catalogue is damaged, its entry is ignored")
        return None
    return CatalogRow(header, last_used_at, hits, retention, root)


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_BYTES


def _is_sound_name(named: Named) -> bool:
    is_text = isinstance(named.name, str) and isinstance(named.session, str)
    is_bytes = _is_key(named.root) and isinstance(named.tokens, bytes)
    if is_text and is_bytes and isinstance(named.named_at, float) and isfinite(named.named_at):
        return len(named.tokens) % TOKEN_BYTES == 0
    _log.warning("cache: a row of the catalogue is damaged, its name is ignored")
    return False


def _parameters(
    header: Header, used_at: float | None, retention: Retention, root: Key
) -> dict[str, Any]:
    return {
        **retention._asdict(),
        "asked_at": retention.asked_at or header.created_at,
        "root": root,
        **{name: getattr(header, name) for name in _HEADER_FIELDS},
        "disk_bytes": size_on_disk(header),
        "last_used_at": header.created_at if used_at is None else used_at,
    }
