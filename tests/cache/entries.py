"""Entries to store, and what a look at a cache directory from outside shows."""

import random
import sqlite3
import subprocess
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import (
    BLOCK_TOKENS,
    Entry,
    Header,
    Key,
    Kind,
    Reason,
    entry_key,
    token_bytes,
)

MODEL = b"m" * 16
OTHER_MODEL = b"o" * 16
MIB = 2**20


def make_entry(
    seed: int,
    *,
    parent: Key | None = None,
    model: Key = MODEL,
    payload_bytes: int = 20_000,
    n_tokens: int = BLOCK_TOKENS,
    compute_seconds: float = 1.0,
    kind: Kind = Kind.BLOCK,
) -> Entry:
    """Equal arguments give equal entries, in every process."""
    noise = random.Random(seed)
    tokens = token_bytes([noise.randrange(50_000) for _ in range(n_tokens)])
    parent = model if parent is None else parent
    header = Header(
        key=entry_key(parent, kind, tokens),
        parent=parent,
        fingerprint=model,
        kind=kind,
        start=0,
        tokens=tokens,
        payload_bytes=payload_bytes,
        compute_seconds=compute_seconds,
        reason=Reason.PREFILL,
        created_at=1_700_000_000.0 + seed,
    )
    return Entry(header, noise.randbytes(payload_bytes))


def make_chain(seed: int, length: int, *, payload_bytes: int = 20_000) -> list[Entry]:
    """Each one follows the one before it."""
    chain: list[Entry] = []
    for n in range(length):
        parent = chain[-1].header.key if chain else None
        chain.append(make_entry(seed * 1000 + n, parent=parent, payload_bytes=payload_bytes))
    return chain


def nobody(key: Key) -> bool:
    return False


def open_tier(
    directory: Path,
    *,
    budget_bytes: int = 64 * MIB,
    model: Key = MODEL,
    is_leased: Callable[[Key], bool] = nobody,
    now: Callable[[], float] = lambda: 1_800_000_000.0,
) -> DiskTier:
    tier = DiskTier(
        directory, fingerprint=model, budget_bytes=budget_bytes, is_leased=is_leased, now=now
    )
    tier.open()
    return tier


def fill(tier: DiskTier, entries: Iterable[Entry]) -> list[Key]:
    """What had to go."""
    return [key for entry in entries for key in tier.put(entry)]


def stored_keys(tier: DiskTier) -> list[Key]:
    return [row.header.key for batch in tier.rows() for row in batch]


def file_of(directory: Path, key: Key) -> Path:
    return directory / "entries" / key.hex()[:2] / f"{key.hex()}.kv"


def bytes_by_du(directory: Path) -> int:
    output = subprocess.run(
        ["du", "-sk", str(directory)], capture_output=True, text=True, check=False
    ).stdout  # a file that vanishes meanwhile is a complaint, and no matter
    return int(output.split()[0]) * 1024


def assert_catalogue_is_true(directory: Path) -> None:
    """Rows and files agree, and what triggers maintain is what counting gives."""
    with closing(sqlite3.connect(directory / "catalog.sqlite3")) as connection:
        rows = connection.execute(
            "SELECT key, parent, fingerprint, kind, length(tokens), disk_bytes, n_children"
            " FROM entries"
        ).fetchall()
        totals = sorted(connection.execute("SELECT * FROM totals").fetchall())
    files = {path.stem for path in (directory / "entries").rglob("*.kv")}
    assert {row[0].hex() for row in rows} == files
    parents = [row[1] for row in rows]
    assert all(row[6] == parents.count(row[0]) for row in rows)
    counted: dict[Key, list[int]] = {}
    for _, _, fingerprint, kind, token_length, disk_bytes, _ in rows:
        numbers = counted.setdefault(fingerprint, [0, 0, 0])
        numbers[0] += 1
        numbers[1] += token_length // 4 if kind == Kind.BLOCK else 0
        numbers[2] += disk_bytes
    assert totals == sorted((fingerprint, *numbers) for fingerprint, numbers in counted.items())
