"""Whose the entries of a catalogue are: their namespaces, sessions and chains.

A damaged value counts as unknown, and any deletion covers what is unknown.
"""

import time
from collections.abc import Iterator, Mapping

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.catalogue_schema import TRACE_ROOTS
from rekindle.cache.entry import Key
from rekindle.cache.forgetting.verdict import Heir, Link
from rekindle.cache.sqlite.connection import column

_BATCH_ROWS = 10_000  # read at once: others wait meanwhile; picked

_OWNER = """
    CASE typeof(root) WHEN 'blob' THEN root ELSE x'' END,
    CASE typeof(session) WHEN 'text' THEN session ELSE '' END,
    CASE typeof(asked_at) WHEN 'real' THEN asked_at ELSE 0.0 END
"""
_LINKS = f"""
SELECT id, CAST(start AS INTEGER), key, parent, {_OWNER} FROM entries
WHERE fingerprint = ? AND id > ? AND typeof(key) = 'blob' ORDER BY id LIMIT {_BATCH_ROWS}
"""
_FOLLOWERS = """
WITH RECURSIVE following (key, start) AS (
    SELECT key, start FROM entries WHERE parent = ?1 AND substr(tokens, 1, ?2) = ?3
    UNION SELECT entries.key, entries.start
    FROM entries JOIN following ON entries.parent = following.key
)
SELECT key FROM following ORDER BY start DESC
"""


def known_time(asked_at: float, newest: float) -> float:
    """Return when something stored was asked for, to compare it with deletions.

    A time in the future is that of a wrong clock. The newest deletion counts as later.
    """
    return asked_at if asked_at <= time.time() else newest


def _owned(catalog: Catalog, fingerprint: Key, newest: float) -> Iterator[tuple[int, Link]]:
    """Yield the entries of a model with their positions, in the order in which they were added."""
    last = 0
    while True:
        with catalog.reading() as connection:
            rows = connection.execute(_LINKS, (fingerprint, last)).fetchall()
        if not rows:
            return
        for _, start, key, parent, root, session, asked_at in rows:
            yield start, Link(key, parent, root, session, known_time(asked_at, newest))
        last = rows[-1][0]


def parents_first(catalog: Catalog, fingerprint: Key, newest: float) -> list[Link]:
    """Return the entries of a model, for deletions of which the newest was then."""
    found = sorted(_owned(catalog, fingerprint, newest), key=lambda each: each[0])
    return [link for _, link in found]


def followers(catalog: Catalog, holder: Key, tokens: bytes) -> list[Key]:
    """Return the entries after a block that start with the tokens, and all after them."""
    with catalog.reading() as connection:
        return column(connection, _FOLLOWERS, (holder, len(tokens), tokens))


def models(catalog: Catalog) -> list[Key]:
    """Return the fingerprints of models with entries or names."""
    with catalog.reading() as connection:
        query = "SELECT fingerprint FROM totals UNION SELECT fingerprint FROM names"
        return column(connection, query)


def hand_over(catalog: Catalog, heirs: Mapping[Key, Heir]) -> None:
    """Give entries to other requests."""
    with catalog.writing() as connection:
        rows = [(*heir, key) for key, heir in heirs.items()]
        query = "UPDATE entries SET session = ?, asked_at = ? WHERE key = ?"
        connection.executemany(query, rows)


def trace_roots(catalog: Catalog) -> None:
    """Find the namespaces of entries that were added before their parents."""
    with catalog.writing() as connection:
        if column(connection, "SELECT 1 FROM entries WHERE root = x'' LIMIT 1"):
            connection.execute(TRACE_ROOTS)
