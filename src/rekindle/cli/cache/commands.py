"""`rekindle cache`: lists, checks, exports, imports and deletes stored prefixes.

No model is loaded. A server may use the directory meanwhile; --url asks a server instead.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.progress import DownloadColumn, TimeRemainingColumn

from rekindle.cli.cache.forget import forget
from rekindle.cli.cache.keys import complete_key, directory_of, entry_of, lineage_of
from rekindle.cli.cache.options import Dir, Json, Yes, check_no_directory, confirm
from rekindle.cli.cache.remote import directory_at, list_at, prune_at, show_at
from rekindle.cli.plain import SafeConsole, progress_bar
from rekindle.cli.remote import ApiKey, Url, exit_1_on_error
from rekindle.config.sources import parse_size
from rekindle.errors import StartupError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.command()(forget)

_AGE_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Key = typer.Argument(
    metavar="KEY", help="Key, its first digits, or a name.", autocompletion=complete_key
)


@app.callback()
def cache() -> None:
    """Manage stored prefixes. No model is loaded, and a server may be running.

    \b
    Examples:
      rekindle cache ls                         list what is stored
      rekindle cache export docs/v1 -o docs.rk  write a prompt to a file
      rekindle cache prune --to 20GiB           shrink the cache
    """
    # The commands report errors themselves; the log of the tiers is for a server's operator.
    logging.getLogger("rekindle").addHandler(logging.NullHandler())


@app.command()
def ls(
    *,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every entry, not only the ends of conversations.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List stored conversations, most recently used first.

    \b
    Examples:
      rekindle cache ls
      rekindle cache ls --all --json
      rekindle cache ls --url http://127.0.0.1:8080
    """
    if url is not None:
        check_no_directory(directory, every=every)
        list_at(url, api_key, as_json=as_json)
        return

    from rekindle.cache.tools.directory import read_stored
    from rekindle.cache.tools.turn_upkeep import count_turns
    from rekindle.cli.cache.report import report_list

    home = directory_of(directory)
    stored = read_stored(home)
    tips = {entry.key for entry in stored.inventory.tips()} | stored.names_by_entry().keys()
    entries = [entry for entry in stored.inventory.entries if every or entry.key in tips]
    report_list(stored, entries, count_turns(home), as_json=as_json)


@app.command()
def show(
    key: Annotated[str, Key],
    *,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Show one entry: its header, the entries before it, and its token ids.

    \b
    Examples:
      rekindle cache show 74aa01
      rekindle cache show docs/v1 --json
      rekindle cache show docs/v1 --url http://127.0.0.1:8080
    """
    if url is not None:
        check_no_directory(directory)
        show_at(url, api_key, key, as_json=as_json)
        return

    from rekindle.cache.tools.directory import read_stored
    from rekindle.cli.cache.report import report_details

    home = directory_of(directory)
    stored = read_stored(home)
    entry = lineage_of(stored, key, home).entries[-1] if stored.named(key) else None
    chain = stored.inventory.chain(entry or entry_of(stored.inventory, key, home))
    names = stored.names_by_entry().get(chain[-1].key, [])
    report_details(home, chain, names, as_json=as_json)


@app.command()
def export(
    keys: Annotated[list[str], Key],
    *,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write; an existing one is replaced."
        ),
    ],
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Write prompts with all their entries to one file, for `rekindle cache import`.

    KEY is a key, its first digits, or a name. Every entry is checked on the way.
    The file holds the text of conversations: keep it as private as the cache.

    \b
    Examples:
      rekindle cache export 74aa01 -o conversation.rk
      rekindle cache export docs/v1 docs/v2 -o docs.rk
      rekindle cache export docs/v1 -o docs.rk --url http://127.0.0.1:8080
    """
    from rekindle.cache.tools.archive import export_to
    from rekindle.cache.tools.directory import read_stored
    from rekindle.cli.cache.report import report_exported

    path = Path(output).expanduser()
    with exit_1_on_error():
        home = _home(directory, url, api_key)
        stored = read_stored(home)
        wanted = [lineage_of(stored, key, home) for key in keys]
        with _progress("Reading entries") as on_progress:
            exported = export_to(path, home, stored, wanted, on_progress)
    report_exported(path, exported, as_json=as_json)


@app.command(name="import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file that `cache export` wrote.")],
    *,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Add the entries of an exported file to this cache.

    The whole file is checked first, and nothing is added from a damaged one.
    Existing entries stay, so it is safe to import a file twice.
    A server that uses the directory finds the new entries at its next start.
    If they exceed its budget, it evicts entries as usual.

    \b
    Examples:
      rekindle cache import docs.rk
      rekindle cache import docs.rk --dir /srv/cache --json
    """
    from rekindle.cache.tools.archive import import_from
    from rekindle.cli.cache.report import report_imported

    with exit_1_on_error():
        home = _home(directory, url, api_key)
        with _progress("Importing entries") as on_progress:
            imported = import_from(Path(file).expanduser(), home, on_progress)
    report_imported(home, imported, as_json=as_json)


@app.command()
def verify(
    *,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Quarantine damaged files, and update the catalogue.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read and check every entry. The exit code is 1 if anything is wrong.

    \b
    Examples:
      rekindle cache verify
      rekindle cache verify --fix
      rekindle cache verify --url http://127.0.0.1:8080
    """
    from rekindle.cache.tools.directory import repair
    from rekindle.cache.tools.directory import verify as check
    from rekindle.cli.cache.report import report_findings

    home = _home(directory, url, api_key)
    with _progress("Reading entries") as on_progress:
        findings = check(home, on_progress)
    if fix and findings.problems:
        repair(home, findings.problems)
    report_findings(findings, fixed=fix, as_json=as_json)
    if findings.problems:
        raise typer.Exit(1)


@app.command()
def prune(
    *,
    directory: Dir = None,
    url: Url = None,
    api_key: ApiKey = None,
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum size to keep, such as 20GiB.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Delete entries unused for this long: 90m, 12h, 7d, 2w."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what would be deleted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete the least recently used entries, from the ends of conversations.

    With --url, a server forgets conversations that were unused for that long.
    Named and pinned conversations stay.

    \b
    Examples:
      rekindle cache prune --older-than 7d --dry-run
      rekindle cache prune --to 20GiB
      rekindle cache prune --older-than 12h --url http://127.0.0.1:8080
    """
    if url is not None:
        check_no_directory(directory)
        with exit_1_on_error():
            if to is not None or older_than is None:
                raise StartupError("With --url, prune requires --older-than AGE, without --to.")
            age = _age(older_than)
        prune_at(url, api_key, unused_seconds=age, dry_run=dry_run, as_json=as_json)
        return

    from rekindle.cache.tools.directory import read_stored, remove
    from rekindle.cli.cache.report import report_pruned

    if to is None and older_than is None:
        raise StartupError("prune requires --to SIZE or --older-than AGE.")
    home = directory_of(directory)
    inventory = read_stored(home).inventory
    pruned = inventory.to_prune(
        now=time.time(),
        to_bytes=None if to is None else _size(to),
        used_before=None if older_than is None else time.time() - _age(older_than),
    )
    n_stuck_bytes = 0 if dry_run else remove(home, [entry.key for entry in pruned])
    report_pruned(inventory, pruned, dry_run=dry_run, as_json=as_json)
    if n_stuck_bytes:
        raise StartupError(f"Files of {decimal(n_stuck_bytes)} in {home} could not be deleted.")


@app.command()
def clear(
    *,
    directory: Dir = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete everything that is stored. Other files in the directory stay.

    Running servers notice that, and delete what they hold in memory.

    \b
    Examples:
      rekindle cache clear
      rekindle cache clear --yes --dir /srv/cache
    """
    from rekindle.cache.tools.directory import check_is_cache, entry_paths
    from rekindle.cache.tools.directory import clear as clear_directory
    from rekindle.cli.cache.report import report_cleared

    home = directory_of(directory)
    check_is_cache(home)
    if not yes:
        confirm(lambda: f"Delete all {len(entry_paths(home))} entries in {home}?")
    cleared = clear_directory(home)
    report_cleared(home, cleared, as_json=as_json)


def _home(directory: str | None, url: str | None, api_key: str | None) -> Path:
    if url is None:
        return directory_of(directory)
    check_no_directory(directory)
    return directory_at(url, api_key)


def _size(text: str) -> int:
    # A number without a unit may be meant as MiB or GiB; as bytes it would delete nearly all.
    has_unit = text.strip() == "0" or not text.strip().isdigit()
    n_bytes = parse_size(text.strip()) if has_unit else None
    if n_bytes is None:
        raise StartupError(f"--to must be a size such as 500MB, 20GiB or 0, but is {text!r}.")
    return n_bytes


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise StartupError(f"--older-than must be an age such as 12h or 7d, but is {text!r}.")
    return float(match[1]) * _AGE_SECONDS[match[2]]


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar(
        SafeConsole(stderr=True), DownloadColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
