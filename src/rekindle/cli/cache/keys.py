"""Which cache directory is meant, and which of its entries: by key, by how one starts, by name."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rekindle.cli.serve import settings_with
from rekindle.errors import StartupError

if TYPE_CHECKING:  # numpy, which these need, takes longer to import than `--help` should take
    from rekindle.cache.tools.inventory import Inventory, Listed
    from rekindle.cache.tools.lineage import Lineage, Stored

_MOST_NAMED = 8


def directory_of(given: str | None) -> Path:
    """The one that a server would use, where none is given."""
    from rekindle.cache.fingerprint import default_cache_dir

    if given is not None:
        return Path(given).expanduser()
    return settings_with({}, None).settings.cache.cache_dir or default_cache_dir()


def lineage_of(stored: "Stored", key: str, home: Path) -> "Lineage":
    """Of a name, or of a key that starts so."""
    named = stored.named(key)
    if len(named) > 1:
        raise StartupError(f"{len(named)} namespaces in {home} have a prompt named {key!r}.")
    lineage = (
        stored.of_name(named[0])
        if named
        else stored.of_entry(entry_of(stored.inventory, key, home))
    )
    if not lineage.entries or not lineage.entries[0].is_complete:
        raise StartupError(f"In {home} not all is stored that {key!r} needs.")
    return lineage


def entry_of(inventory: "Inventory", key: str, home: Path) -> "Listed":
    found = inventory.find(key.lower())
    if len(found) == 1:
        return found[0]
    if not found:
        raise StartupError(f"No entry in {home} has a key that starts with {key!r}.")
    some = [entry.key.hex() for entry in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(some)} more" if len(found) > len(some) else ""
    raise StartupError(f"The keys of {len(found)} entries start so: {', '.join(some)}{more}.")


def complete_key(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: names, and keys of conversations."""
    from rekindle.cache.tools.directory import read_stored

    try:
        stored = read_stored(directory_of(context.params.get("directory")))
    except StartupError:
        return []
    known = [named.name for named in stored.names]
    known += [entry.key.hex() for entry in stored.inventory.tips()]
    return [each for each in known if each.startswith(incomplete)]
