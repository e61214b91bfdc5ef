"""Deletes turns and responses of a cache directory, and with `forget.py` everything in it.

Servers may use the directory meanwhile. They notice the tombstone, and delete what they hold.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.responses.file import RESPONSES, ResponseFile
from rekindle.cache.responses.store import MAX_RESPONSES
from rekindle.cache.tools.directory import failures_reported
from rekindle.cache.tools.forget import forget_groups_in
from rekindle.cache.turns.database import MAX_BYTES, MAX_WAL_BYTES
from rekindle.cache.turns.file import TURNS, TurnFile
from rekindle.cache.turns.recent import MAX_TURNS
from rekindle.errors import CacheError
from rekindle.generation.forgetting import Deleted, Owner, Place, Tombstone, Tombstones, total

IsCovered = Callable[[Owner], bool]


def forget_everything(directory: Path, groups: Sequence[Sequence[Tombstone]]) -> list[Deleted]:
    """Keep the tombstones, and delete what they cover, of every model. Raises StartupError.

    Return what each group has deleted. A group costs about as much as a single deletion.
    """
    entries = forget_groups_in(directory, groups)
    texts = forget_texts(directory, [any_covers(group) for group in groups])
    deleted = [total(parts) for parts in zip(entries, texts, strict=True)]
    if not any(each.unreached for each in deleted):
        with failures_reported(directory, "changed"):
            TombstoneFile(directory).finish(chain.from_iterable(groups))
    return deleted


def any_covers(tombstones: Iterable[Tombstone]) -> IsCovered:
    return Tombstones(tombstones).cover


def forget_texts(directory: Path, covered: Sequence[IsCovered]) -> list[Deleted]:
    """Delete turns and responses. Return how many were covered by each test."""
    turns = _counted(Place.TURNS, covered, lambda: _forget_turns(directory, covered))
    responses = _counted(Place.RESPONSES, covered, lambda: _forget_responses(directory, covered))
    return [total(parts) for parts in zip(turns, responses, strict=True)]


def _counted(
    place: Place, covered: Sequence[IsCovered], delete: Callable[[], list[int]]
) -> list[Deleted]:
    try:
        return [Deleted(counts={place: n} if n else {}) for n in delete()]
    except CacheError as error:
        return [Deleted(counts={}, unreached=(f"{place}: {error.message}.",)) for _ in covered]


def _forget_turns(directory: Path, covered: Sequence[IsCovered]) -> list[int]:
    if not (directory / TURNS.file_name).exists():
        return [0 for _ in covered]
    file = TurnFile(
        directory,
        fingerprint=b"",
        max_turns=MAX_TURNS,
        max_bytes=MAX_BYTES,
        wal_bytes=MAX_WAL_BYTES,
    )
    try:
        file.open(EntryFiles(directory).set_aside)
        return [file.forget(is_covered) for is_covered in covered]
    finally:
        file.close()


def _forget_responses(directory: Path, covered: Sequence[IsCovered]) -> list[int]:
    if not (directory / RESPONSES.file_name).exists():
        return [0 for _ in covered]
    file = ResponseFile(directory, max_responses=MAX_RESPONSES, max_bytes=MAX_BYTES)
    return [file.forget(is_covered) for is_covered in covered]
