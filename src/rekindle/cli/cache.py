"""`rekindle cache`: look at the stored prefixes of a directory, check them, throw them away.

No model is loaded. A server may be using the directory.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rekindle.config import CONFIG_VARIABLE, GIB, KIB, MIB, TIB
from rekindle.config_sources import read_file, resolve
from rekindle.errors import StartupError

if TYPE_CHECKING:  # numpy, which these need, takes longer to import than `--help` should take
    from rekindle.cache.inventory import Inventory, Listed

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

_DIR_HELP = "Cache directory. Without it: REKINDLE_CACHE_DIR, or the user's cache directory."
_MOST_NAMED = 8
_UNIT_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNIT_BYTES |= {"kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Dir = Annotated[str | None, typer.Option("--dir", metavar="PATH", help=_DIR_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def cache() -> None:
    """Look after stored prefixes; no model is loaded, and a server may be running."""
    # The commands say what went wrong; the log of the tiers is meant for a server's operator.
    logging.getLogger("rekindle").addHandler(logging.NullHandler())


@app.command()
def ls(
    *,
    directory: Dir = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every entry, not only where conversations end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List what is stored, most recently used first."""
    from rekindle.cache.directory import read_inventory
    from rekindle.cache.turn_upkeep import count_turns
    from rekindle.cli.cache_report import list_json, print_list

    home = _directory(directory)
    inventory = read_inventory(home)
    entries = inventory.entries if every else inventory.tips()
    if as_json:
        typer.echo(list_json(entries))
    else:
        print_list(inventory, entries, count_turns(home))


@app.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, or how it starts.")],
    *,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Show one entry: its header, what it follows, its token ids."""
    from rekindle.cache.directory import read_inventory
    from rekindle.cli.cache_report import details_json, print_details

    home = _directory(directory)
    inventory = read_inventory(home)
    chain = inventory.chain(_one_of(inventory, key, home))
    if as_json:
        typer.echo(details_json(home, chain))
    else:
        print_details(home, chain)


@app.command()
def verify(
    *,
    directory: Dir = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Set damaged files aside, and bring the catalogue up to date."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every entry and check it; exit code 1 when anything was wrong."""
    from rekindle.cache.directory import repair
    from rekindle.cache.directory import verify as check
    from rekindle.cli.cache_report import findings_json, print_findings

    home = _directory(directory)
    with _progress("Reading entries") as on_progress:
        findings = check(home, on_progress)
    if fix and findings.problems:
        repair(home, findings.problems)
    if as_json:
        typer.echo(findings_json(findings, fixed=fix))
    else:
        print_findings(findings, fixed=fix)
    if findings.problems:
        raise typer.Exit(1)


@app.command()
def prune(
    *,
    directory: Dir = None,
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Until no more than this is left.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="What was not used for this long: 90m, 12h, 7d, 2w."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what was not used for longest, the ends of conversations first."""
    from rekindle.cache.directory import read_inventory, remove
    from rekindle.cli.cache_report import print_pruned, pruned_json

    if to is None and older_than is None:
        raise StartupError("Say what is to go, with --to SIZE or --older-than AGE.")
    home = _directory(directory)
    inventory = read_inventory(home)
    pruned = inventory.to_prune(
        to_bytes=None if to is None else _size(to),
        used_before=None if older_than is None else time.time() - _age(older_than),
    )
    n_stuck_bytes = 0 if dry_run else remove(home, [entry.key for entry in pruned])
    if as_json:
        typer.echo(pruned_json(inventory, pruned, dry_run=dry_run))
    else:
        print_pruned(inventory, pruned, dry_run=dry_run)
    if n_stuck_bytes:
        raise StartupError(f"Files of {decimal(n_stuck_bytes)} in {home} could not be deleted.")


@app.command()
def clear(
    *,
    directory: Dir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete everything that is stored. Files that are not ours stay."""
    from rekindle.cache.directory import check_is_cache, entry_paths
    from rekindle.cache.directory import clear as clear_directory
    from rekindle.cli.cache_report import cleared_json, print_cleared

    home = _directory(directory)
    check_is_cache(home)
    if not yes:
        if not sys.stdin.isatty():
            raise StartupError("Nobody can be asked here; to delete everything, add --yes.")
        n_entries = len(entry_paths(home))
        typer.confirm(f"Delete all {n_entries} entries in {home}?", abort=True, err=True)
    cleared = clear_directory(home)
    if as_json:
        typer.echo(cleared_json(cleared))
    else:
        print_cleared(home, cleared)


def _directory(given: str | None) -> Path:
    from rekindle.cache.fingerprint import default_cache_dir

    if given is not None:
        return Path(given).expanduser()
    config = os.environ.get(CONFIG_VARIABLE)
    file = read_file(Path(config).expanduser()) if config else {}
    return resolve({}, os.environ, file).settings.cache.cache_dir or default_cache_dir()


def _one_of(inventory: "Inventory", key: str, home: Path) -> "Listed":
    found = inventory.find(key.lower())
    if len(found) == 1:
        return found[0]
    if not found:
        raise StartupError(f"No entry in {home} has a key that starts with {key!r}.")
    some = [entry.key.hex() for entry in found[:_MOST_NAMED]]
    more = f" and {len(found) - len(some)} more" if len(found) > len(some) else ""
    raise StartupError(f"The keys of {len(found)} entries start so: {', '.join(some)}{more}.")


def _size(text: str) -> int:
    # A number alone may be meant as MiB or GiB, and would leave next to nothing.
    match = re.fullmatch(r"(\d+)\s*([kmgt]i?b|b)|0", text.strip().lower())
    if match is None:
        raise StartupError(f"--to must be a size such as 500MB, 20GiB or 0, but is {text!r}.")
    return int(match[1]) * _UNIT_BYTES[match[2]] if match[2] else 0


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise StartupError(f"--older-than must be an age such as 12h or 7d, but is {text!r}.")
    return float(match[1]) * _AGE_SECONDS[match[2]]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
