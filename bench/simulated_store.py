"""Headers of a store of any size, without rows.

Conversations of 64 blocks, each behind one of 16 heads (system prompt and tools) of 8 blocks.
"""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.entry import (
    BLOCK_TOKENS,
    TOKEN_BYTES,
    Header,
    Key,
    Kind,
    Reason,
    entry_key,
)

BATCH_ENTRIES = 10_000
N_HEADS = 16
HEAD_BLOCKS = 8
CHAIN_BLOCKS = 64
N_VOCAB = 49_152  # the embedded model's

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


def headers(n_entries: int, *, root: Key, payload_bytes: int) -> Iterator[Header]:
    """Yield headers, parents before children. Equal arguments give equal tokens."""
    return islice(_endless(root, payload_bytes), n_entries)


def chain(root: Key, tokens: bytes, *, payload_bytes: int) -> list[Header]:
    """Return the headers of every complete block of these tokens (big-endian ids)."""
    parent, made = root, []
    for begin in range(0, len(tokens) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        piece = tokens[begin : begin + _BLOCK_BYTES]
        header = _header(root, parent, begin // TOKEN_BYTES, piece, payload_bytes, time.time())
        parent = header.key
        made.append(header)
    return made


def write_store(directory: Path, listed: Iterator[Header]) -> None:
    """Give each entry a row in the catalogue and a sparse file."""
    files = EntryFiles(directory)
    with closing(open_catalog(directory)) as catalog:
        while batch := list(islice(listed, BATCH_ENTRIES)):
            for header in batch:
                _make_sparse(files.path(header.key), header.file_bytes)
            catalog.add(batch)


def _make_sparse(path: Path, n_bytes: int) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.truncate(descriptor, n_bytes)
    os.close(descriptor)


def _endless(root: Key, payload_bytes: int) -> Iterator[Header]:
    noise = np.random.default_rng(1)
    now = time.time()
    heads: list[Key] = []
    for _ in range(N_HEADS):
        made = list(_run(noise, root, root, 0, HEAD_BLOCKS, payload_bytes, now))
        heads.append(made[-1].key)
        yield from made
    while True:
        for head in heads:
            n_own = CHAIN_BLOCKS - HEAD_BLOCKS
            yield from _run(noise, root, head, HEAD_BLOCKS, n_own, payload_bytes, now)


def _run(
    noise: np.random.Generator,
    root: Key,
    parent: Key,
    first_block: int,
    n_blocks: int,
    payload_bytes: int,
    now: float,
) -> Iterator[Header]:
    tokens = noise.integers(0, N_VOCAB, n_blocks * BLOCK_TOKENS, np.uint32).astype(">u4").tobytes()
    for number in range(n_blocks):
        piece = tokens[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
        start = (first_block + number) * BLOCK_TOKENS
        header = _header(root, parent, start, piece, payload_bytes, now)
        parent = header.key
        yield header


def _header(
    root: Key, parent: Key, start: int, tokens: bytes, payload_bytes: int, now: float
) -> Header:
    return Header(
        key=entry_key(parent, Kind.BLOCK, tokens),
        parent=parent,
        fingerprint=root,
        kind=Kind.BLOCK,
        start=start,
        tokens=tokens,
        payload_bytes=payload_bytes,
        compute_seconds=1.0,
        reason=Reason.PREFILL,
        created_at=now,
    )
