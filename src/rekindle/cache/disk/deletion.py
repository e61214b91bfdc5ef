"""Deletes what a tombstone covers from a cache directory: rows, files, names, the quarantine.

Files are removed, not overwritten. SQLite overwrites deleted rows, and its log is emptied: the
token ids in them are the text of a prompt.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rekindle.cache.disk.catalogue import Catalog
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.owners import hand_over, known_time, parents_first
from rekindle.cache.disk.wiping import begin_deletion, wipe
from rekindle.cache.entry import Key
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.forgetting.verdict import Verdict
from rekindle.cache.names import Named
from rekindle.errors import TierFailed
from rekindle.generation.forgetting import Deleted, Place, Tombstone

_BATCH_FILES = 64  # under one lock of the directory; a deleted file costs about 4 ms; picked
LOG_IN_USE = "Another process uses the catalogue. Its log is overwritten when that process is done."
NOT_WIPED = (
    "Unused bytes of the catalogue could not be overwritten: {why}."
    " The next deletion or start tries again."
)

Alone = Callable[[], AbstractContextManager[None]]  # locks the directory


@dataclass(slots=True)
class RowsForgotten:
    """What a deletion has removed from a directory."""

    keys: list[Key] = field(default_factory=list)
    n_names: int = 0
    n_quarantined: int = 0
    stuck_bytes: int = 0  # of files that could not be deleted
    unreached: list[str] = field(default_factory=list)

    def __iadd__(self, other: "RowsForgotten") -> "RowsForgotten":
        self.keys += other.keys
        self.n_names += other.n_names
        self.n_quarantined += other.n_quarantined
        self.stuck_bytes += other.stuck_bytes
        self.unreached += other.unreached
        return self

    @property
    def deleted(self) -> Deleted:
        counts = {
            Place.DISK: len(self.keys),
            Place.NAMES: self.n_names,
            Place.QUARANTINE: self.n_quarantined,
        }
        unreached = list(self.unreached)
        if self.stuck_bytes:
            unreached.append(f"Files of {self.stuck_bytes} bytes could not be deleted.")
        present = {place: count for place, count in counts.items() if count}
        return Deleted(counts=present, unreached=tuple(unreached))


def forget_rows(
    catalog: Catalog,
    files: EntryFiles,
    alone: Alone,
    tombstones: Sequence[Tombstone],
    fingerprint: Key,
) -> RowsForgotten:
    """Delete the rows, files and names of a model that tombstones cover. `erase` must follow."""
    newest = max(each.at for each in tombstones)
    links = parents_first(catalog, fingerprint, newest)
    verdict = Verdict(tombstones, fingerprint)
    for link in reversed(links):
        verdict.look_back(link)
    doomed = [link.key for link in links if verdict.judge(link)]
    deletions = Deletions(fingerprint, tombstones)
    names = [
        named
        for named in catalog.names(fingerprint=fingerprint)
        if deletions.covers(named.root, named.session, known_time(named.named_at, newest))
    ]
    if verdict.heirs:
        hand_over(catalog, verdict.heirs)
    return remove_entries(catalog, files, alone, doomed[::-1], names)  # children first


def remove_entries(
    catalog: Catalog, files: EntryFiles, alone: Alone, keys: Sequence[Key], names: Sequence[Named]
) -> RowsForgotten:
    """Delete entries and names. `erase` must follow."""
    gone = RowsForgotten(list(keys), n_names=len(names))
    if keys or names:
        begin_deletion(catalog)
    catalog.drop_names(names)
    for first in range(0, len(keys), _BATCH_FILES):
        batch = keys[first : first + _BATCH_FILES]
        with alone():
            catalog.remove(batch)
            gone.stuck_bytes += files.remove(batch)
    return gone


def erase(catalog: Catalog, files: EntryFiles) -> RowsForgotten:
    """Empty the quarantine, whose files belong to anybody, and wipe the catalogue.

    Does not raise: entries are gone by then, and only what is left must be reported.
    """
    gone = RowsForgotten()
    try:
        gone.n_quarantined = files.empty_quarantine()
    except OSError as error:
        gone.unreached.append(f"The quarantine could not be emptied: {error.strerror}.")
    try:
        if not wipe(catalog, files):
            gone.unreached.append(LOG_IN_USE)
    except (TierFailed, OSError) as error:
        why = error.message if isinstance(error, TierFailed) else error.strerror
        gone.unreached.append(NOT_WIPED.format(why=why))
    return gone
