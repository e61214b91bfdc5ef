"""Deletes what tombstones cover from a directory, for every model, without loading one.

Servers may use the directory. They notice the tombstone in it, and drop what they hold.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

from rekindle.cache.disk.deletion import erase, forget_rows
from rekindle.cache.disk.entry_file import EntryFiles
from rekindle.cache.disk.owners import models
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.disk.wiping import begin_deletion
from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.sqlite.directory_lock import alone_in
from rekindle.cache.tools.directory import failures_reported
from rekindle.generation.forgetting import Deleted, Tombstone, total


def forget_in(directory: Path, *tombstones: Tombstone) -> Deleted:
    """Keep tombstones, and delete entries, names and the quarantine. Raises StartupError."""
    [deleted] = forget_groups_in(directory, [tombstones])
    return deleted


def forget_groups_in(directory: Path, groups: Sequence[Sequence[Tombstone]]) -> list[Deleted]:
    """Run deletions as `forget_in` does, and return what each group has deleted.

    The catalogue is opened, reconciled and wiped once for all of them.
    """
    files, alone = EntryFiles(directory), partial(alone_in, directory)
    with failures_reported(directory, "changed"):
        kept = TombstoneFile(directory)
        for tombstone in chain.from_iterable(groups):
            kept.add(tombstone)
        with closing(open_catalog(directory)) as catalog:
            begin_deletion(catalog)
            fingerprints = models(catalog)
            gone = [
                [forget_rows(catalog, files, alone, group, each) for each in fingerprints]
                for group in groups
            ]
            # The quarantine counts as deleted by the first group.
            gone[0].append(erase(catalog, files))
    return [total([part.deleted for part in parts]) for parts in gone]
