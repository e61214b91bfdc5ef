"""Options that several `rekindle cache` commands have, and the question before a deletion."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from rekindle.cli.remote import exit_1_on_error
from rekindle.errors import StartupError

_DIR_HELP = "Cache directory. Default: REKINDLE_CACHE_DIR, or in the user's cache directory."

Dir = Annotated[str | None, typer.Option("--dir", metavar="PATH", help=_DIR_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm(question: Callable[[], str]) -> None:
    """Ask on the terminal, and end the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise StartupError("There is no terminal to ask for confirmation. Add --yes to delete.")
    typer.confirm(question(), abort=True, err=True)


def check_no_directory(directory: str | None, *, every: bool = False) -> None:
    with exit_1_on_error():
        if directory is not None or every:
            flag = "--all" if every else "--dir"
            raise StartupError(f"{flag} is about a directory and cannot be used with --url.")
