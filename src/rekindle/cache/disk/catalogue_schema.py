"""The tables of the catalogue.

Triggers keep two facts exact for every writer: how many stored entries follow each entry (only a
leaf is evicted), and the totals of each model.
"""

import sqlite3

from rekindle.cache.entry import TOKEN_BYTES, Kind
from rekindle.cache.policy import priority
from rekindle.cache.sqlite.schema import Schema

# Rows removed, those of them that a VACUUM has wiped, and deletions for clients: see wiping.py.
_WIPING = """
CREATE TABLE wiping (
    n_removed INTEGER NOT NULL,
    n_wiped INTEGER NOT NULL,
    n_begun INTEGER NOT NULL,
    n_ended INTEGER NOT NULL
);
INSERT INTO wiping VALUES (0, 0, 0, 0);
CREATE TRIGGER removed_entry AFTER DELETE ON entries BEGIN
    UPDATE wiping SET n_removed = n_removed + 1;
END;
CREATE TRIGGER removed_name AFTER DELETE ON names BEGIN
    UPDATE wiping SET n_removed = n_removed + 1;
END;
"""
_TABLES = f"""
CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    parent BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    kind INTEGER NOT NULL,
    start INTEGER NOT NULL,
    payload_bytes INTEGER NOT NULL,
    compute_seconds REAL NOT NULL,
    reason INTEGER NOT NULL,
    created_at REAL NOT NULL,
    disk_bytes INTEGER NOT NULL,
    last_used_at REAL NOT NULL,
    hits INTEGER NOT NULL,
    priority REAL NOT NULL,
    n_children INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    session TEXT NOT NULL,
    pinned_until REAL NOT NULL,
    asked_at REAL NOT NULL,
    root BLOB NOT NULL,
    tokens BLOB NOT NULL
);
CREATE INDEX by_parent ON entries (parent);
CREATE INDEX leaves ON entries (rank DESC, priority) WHERE n_children = 0;
CREATE TABLE names (
    fingerprint BLOB NOT NULL,
    root BLOB NOT NULL,
    name TEXT NOT NULL,
    tokens BLOB NOT NULL,
    session TEXT NOT NULL,
    named_at REAL NOT NULL,
    PRIMARY KEY (root, name)
);
CREATE TABLE totals (
    fingerprint BLOB PRIMARY KEY,
    n_entries INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE eviction (clock REAL NOT NULL);
INSERT INTO eviction VALUES (0.0);
{_WIPING}
CREATE TRIGGER added AFTER INSERT ON entries BEGIN
    UPDATE entries SET n_children = n_children + 1 WHERE key = NEW.parent;
    INSERT OR IGNORE INTO totals VALUES (NEW.fingerprint, 0, 0, 0);
    UPDATE totals SET
        n_entries = n_entries + 1,
        n_tokens = n_tokens + (NEW.kind = {Kind.BLOCK:d}) * length(NEW.tokens) / {TOKEN_BYTES},
        n_bytes = n_bytes + NEW.disk_bytes
    WHERE fingerprint = NEW.fingerprint;
END;
CREATE TRIGGER removed AFTER DELETE ON entries BEGIN
    UPDATE entries SET n_children = n_children - 1 WHERE key = OLD.parent;
    UPDATE totals SET
        n_entries = n_entries - 1,
        n_tokens = n_tokens - (OLD.kind = {Kind.BLOCK:d}) * length(OLD.tokens) / {TOKEN_BYTES},
        n_bytes = n_bytes - OLD.disk_bytes
    WHERE fingerprint = OLD.fingerprint;
    DELETE FROM totals WHERE fingerprint = OLD.fingerprint AND n_entries = 0;
END;
"""


# An entry without a root is given that of its chain: the parent of the chain's first entry.
TRACE_ROOTS = """
WITH RECURSIVE chain (key, root) AS (
    SELECT key, coalesce(nullif(root, x''), parent) FROM entries WHERE start = 0 OR root != x''
    UNION SELECT entries.key, chain.root FROM entries JOIN chain ON entries.parent = chain.key
    WHERE entries.root = x''
)
UPDATE entries SET root = chain.root FROM chain WHERE chain.key = entries.key AND entries.root = x''
"""
_FROM_VERSION_2 = f"""
ALTER TABLE entries ADD COLUMN asked_at REAL NOT NULL DEFAULT 0.0;
ALTER TABLE entries ADD COLUMN root BLOB NOT NULL DEFAULT x'';
UPDATE entries SET asked_at = created_at;
{TRACE_ROOTS};
{_WIPING}
UPDATE wiping SET n_removed = 1;  -- version 2 left deleted rows in unused pages
"""


def _prepare(connection: sqlite3.Connection) -> None:
    connection.create_function("priority", 4, priority, deterministic=True)
    # The token ids of a deleted entry are its text: they must not stay in free pages.
    connection.execute("PRAGMA secure_delete = ON")


CATALOG = Schema(
    file_name="catalog.sqlite3",
    application_id=0x524B4E44,  # "RKND"
    version=3,
    migrations={2: _FROM_VERSION_2},
    tables=_TABLES,
    on_connect=_prepare,
    is_rebuildable=True,  # from the headers of the entry files
)
