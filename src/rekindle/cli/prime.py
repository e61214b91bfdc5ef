"""`rekindle prime`: computes the prompts of files before a request needs them.

The prompts are computed by a running server, or by a temporary one into the disk cache.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import ASCII
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from rekindle.cli.plain import plain_console, progress_bar
from rekindle.cli.remote import base_url, client_of, refusal_of
from rekindle.cli.serve import keyword, load_model, load_settings, serve
from rekindle.config.settings import all_settings
from rekindle.config.sources import api_keys
from rekindle.errors import PrimeError, StartupError, UnreadableFile

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

    from rekindle.priming.files import PrimeRequest
    from rekindle.priming.stream import PrefillUpdate, Primed


@dataclass(slots=True)
class PrimedFile:
    name: str
    requests: "Sequence[PrimeRequest]" = ()
    error: str | None = None  # why it has no requests
    n_requests: int = 0
    n_cached: int = 0
    n_computed: int = 0
    seconds: float = 0.0
    n_failed: int = 0

    @property
    def n_tokens(self) -> int:
        return self.n_cached + self.n_computed

    def add(self, primed: "Primed", seconds: float) -> None:
        self.n_requests += 1
        self.n_cached += primed.n_cached
        self.n_computed += primed.n_computed
        self.seconds += seconds


def prime(
    files: list[str],
    *,
    url: str | None,
    api_key: str | None,
    model: str | None,
    no_persist: bool,
    config: str | None,
    **flags: object,
) -> None:
    """Compute the prompts in files now, so that later requests find them in the cache.

    A .md or .txt file is one system prompt. A .json, .jsonl, .yaml or .toml file holds system
    prompts with tools, requests of any API, or recorded traffic. Any file may be gzipped (.gz).
    """
    if url is not None:
        _check_no_model_flags({"config": config, **flags})
    elif no_persist:
        raise StartupError("--no-persist requires --url: otherwise the disk is the only target.")
    prime_files = _read_files(files)
    server: AbstractContextManager[httpx.Client]
    if url is not None:
        server = client_of(url, api_key, read_seconds=None)
    else:
        server = _own_server(config, {**flags, "model": model})
        model = None  # our own server has only this model
    changes = changes_of(model, persist=not no_persist)
    console = plain_console()
    with server as http, progress_bar(console, MofNCompleteColumn()) as progress:
        for file in prime_files:
            _prime_file(file, http, changes, progress)
    console.print(_table(prime_files))
    if any(file.n_failed for file in prime_files):
        raise typer.Exit(1)


def _read_files(names: Sequence[str]) -> list[PrimedFile]:
    """Read all files before anything is loaded. Raises StartupError if none is usable."""
    from rekindle.priming.files import read_prime_file

    files = []
    for name in names:
        try:
            files.append(PrimedFile(name, read_prime_file(Path(name))))
        except (PrimeError, UnreadableFile) as error:
            files.append(PrimedFile(name, error=error.message, n_failed=1))
    if not any(file.requests for file in files):
        raise StartupError(" ".join(file.error or "" for file in files))
    return files


def changes_of(model: str | None, *, persist: bool) -> dict[str, object]:
    """Return the fields that replace those of every request."""
    return {"persist": persist} | ({} if model is None else {"model": model})


@contextmanager
def _own_server(config: str | None, flags: dict[str, object]) -> "Iterator[httpx.Client]":
    """Start a server in this process. The disk cache keeps its prompts."""
    settings = load_settings(config, flags).settings
    if not settings.cache.cache_disk:
        raise StartupError(
            "Without --url, prompts are stored in the disk cache, but cache_disk is 0."
        )
    key = next(iter(api_keys(settings.server)), None)

    from rekindle.server.serving import background

    with background(load_model(settings)) as url, client_of(url, key, read_seconds=None) as http:
        yield http


def _check_no_model_flags(flags: Mapping[str, object]) -> None:
    parameters = inspect.signature(serve).parameters
    for name, value in flags.items():
        if value != parameters[name].default:
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} cannot be used with --url: that server has its own model.")


def _prime_file(
    file: PrimedFile, http: "httpx.Client", changes: Mapping[str, object], progress: Progress
) -> None:
    task = progress.add_task(file.name, total=None)
    if file.error is not None:
        _print_error(progress.console, file.error)
    for request in file.requests:
        progress.reset(task, description=request.name, total=None)
        start = time.monotonic()
        try:
            primed = _send(
                http,
                request.path,
                {**request.body, **changes},
                lambda done: progress.update(task, completed=done.n_done, total=done.n_tokens),
            )
        except PrimeError as error:
            _print_error(progress.console, f"{request.name}: {error.message}")
            file.n_failed += 1
        else:
            file.add(primed, time.monotonic() - start)
    progress.remove_task(task)
    if file.n_requests:
        progress.console.print(_line(file), soft_wrap=True)


def _send(
    http: "httpx.Client",
    path: str,
    body: Mapping[str, Any],
    on_progress: "Callable[[PrefillUpdate], None]",
) -> "Primed":
    import httpx

    from rekindle.priming.stream import outcome_of

    try:
        with http.stream("POST", path, json=body) as response:
            if response.is_error:
                raise PrimeError(refusal_of(response))
            return outcome_of(response.iter_lines(), on_progress)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PrimeError(f"{base_url(http)} cannot be reached: {error}.") from error


def _print_error(console: Console, message: str) -> None:
    console.print(message, style="red", soft_wrap=True)


def _line(file: PrimedFile) -> str:
    several = f" in {file.n_requests} requests" if file.n_requests > 1 else ""
    return (
        f"{file.name}: {file.n_tokens} tokens{several}, {file.n_cached} cached,"
        f" {file.n_computed} computed, {file.seconds:.2f} s"
    )


def _table(files: Sequence[PrimedFile]) -> Table:
    table = Table("file", box=ASCII)
    for column in ("requests", "tokens", "cached", "computed", "seconds", "failed"):
        table.add_column(column, justify="right")
    for file in files:
        numbers = (file.n_requests, file.n_tokens, file.n_cached, file.n_computed)
        table.add_row(file.name, *map(str, numbers), f"{file.seconds:.2f}", str(file.n_failed))
    return table


def _parameters() -> list[inspect.Parameter]:
    """Return our own parameters, and those of `serve` about the model and the cache."""
    of_server = {each.name for each in all_settings() if each.section == "server"}
    left_out = of_server | {"model", "warm", "print_config"}
    shared = inspect.signature(serve).parameters.values()
    return [
        inspect.Parameter(
            "files",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[list[str], typer.Argument(metavar="FILE", help="File to prime.")],
        ),
        _option(
            "url", "URL", "Server to prime. Without it: load the model, and fill the disk cache."
        ),
        _option("api_key", "KEY", "Key to send to that server."),
        _option("model", "NAME", "With --url: name of the model. Without: the MODEL of serve."),
        keyword(
            "no_persist",
            bool,
            typer.Option(
                "--no-persist", help="Do not wait until the server has stored the prompts."
            ),
        ),
        *(parameter for parameter in shared if parameter.name not in left_out),
    ]


def _option(name: str, metavar: str, help_text: str) -> inspect.Parameter:
    return keyword(name, str | None, typer.Option(metavar=metavar, help=help_text))


prime.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
