"""The cache directory of a command, and its entries by key, by the start of a key, or by name."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rekindle.cli.serve import settings_with
from rekindle.errors import StartupError

if TYPE_CHECKING:  # these import numpy, which would slow down `--help`
    from rekindle.cache.tools.inventory import Inventory, Listed
    from rekindle.cache.tools.lineage import Lineage, Stored

_MOST_NAMED = 8


def directory_of(given: str | None) -> Path:
    """Return the given directory, or the one that a server would use."""
    from rekindle.cache.fingerprint import default_cache_dir

    if given is not None:
        return Path(given).expanduser()
    return settings_with({}, None).settings.cache.cache_dir or default_cache_dir()


def lineage_of(stored: "Stored", key: str, home: Path) -> "Lineage":
    """Return the entries of the prompt that a name or the start of a key means."""
    named = stored.named(key)
    if len(named) > 1:
        raise StartupError(f"{len(named)} namespaces in {home} have a prompt named {key!r}.")
    lineage = (
        stored.of_name(named[0])
        if named
        else stored.of_entry(entry_of(stored.inventory, key, home))
    )
    if not lineage.entries or not lineage.entries[0].is_complete:
        raise StartupError(f"{key!r} is incomplete: {home} does not hold all its entries.")
    return lineage


def entry_of(inventory: "Inventory", key: str, home: Path) -> "Listed":
    found = inventory.find(key.lower())
    if len(found) == 1:
        return found[0]
    if not found:
        raise StartupError(f"No entry in {home} has a key that starts with {key!r}.")
    some = [entry.key.hex() for entry in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(some)} more" if len(found) > len(some) else ""
    raise StartupError(
        f"{len(found)} keys start with {key!r}: {', '.join(some)}{more}. Give more digits."
    )


def complete_key(context: typer.Context, incomplete: str) -> list[str]:
    """Return names and keys of conversations, for completion in the shell."""
    from rekindle.cache.tools.directory import read_stored

    try:
        stored = read_stored(directory_of(context.params.get("directory")))
    except StartupError:
        return []
    known = [named.name for named in stored.names]
    known += [entry.key.hex() for entry in stored.inventory.tips()]
    return [each for each in known if each.startswith(incomplete)]
