"""`rekindle prime`: computes the prompts of files before a request needs them.

The prompts are computed by a running server, or by a temporary one into the disk cache.
"""

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import ASCII
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID
from rich.table import Table

from rekindle.cli.plain import plain_console, progress_bar
from rekindle.cli.remote import base_url, client_of, refusal_of
from rekindle.cli.serve import keyword, load_model, load_settings, serve
from rekindle.config import all_settings
from rekindle.config_sources import api_keys
from rekindle.errors import PrimeError, StartupError

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

    from rekindle.priming.files import PrimeRequest
    from rekindle.priming.stream import Primed


@dataclass(slots=True)
class FileReport:
    file: str
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
    """Compute the prompts of files ahead, so that later requests find them in the cache.

    A file is a system prompt (.md, .txt), or it holds a system prompt with tools, a request of
    any API, or recorded traffic (.json, .jsonl, .yaml, .toml). Each may be compressed (.gz).
    """
    if url is not None:
        _check_no_model_flags({"config": config, **flags})
        endpoint = _running(url, api_key, model, persist=not no_persist)
    else:
        if no_persist:
            raise StartupError(
                "--no-persist requires --url: otherwise the disk is the only target."
            )
        endpoint = _own(config, {**flags, "model": model})
    readable = _read_files(files)
    console = plain_console()
    with endpoint as primer, progress_bar(console, MofNCompleteColumn()) as progress:
        reports = [_prime_file(primer, file, progress) for file in readable]
    console.print(_table(reports))
    if any(report.n_failed for report in reports):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _ReadFile:
    name: str
    requests: "tuple[PrimeRequest, ...]"
    error: str | None


def _read_files(names: Sequence[str]) -> list[_ReadFile]:
    """Read all files before anything is loaded. Raises StartupError if none is usable."""
    files = [_read_file(name) for name in names]
    if not any(file.requests for file in files):
        raise StartupError(" ".join(file.error or "" for file in files))
    return files


def _read_file(name: str) -> _ReadFile:
    from rekindle.priming.files import read_prime_file

    try:
        return _ReadFile(name, read_prime_file(Path(name)), None)
    except PrimeError as error:
        return _ReadFile(name, (), error.message)


@dataclass(frozen=True, slots=True)
class Primer:
    """The server that gets the requests, and what is changed in them."""

    http: "httpx.Client"
    model: str | None
    persist: bool

    def body_of(self, request: "PrimeRequest") -> dict[str, Any]:
        body = {**request.body, "persist": self.persist}
        return body if self.model is None else {**body, "model": self.model}


@contextmanager
def _running(
    url: str, api_key: str | None, model: str | None, *, persist: bool
) -> Iterator[Primer]:
    with client_of(url, api_key, read_seconds=None) as http:
        yield Primer(http, model, persist)


@contextmanager
def _own(config: str | None, flags: dict[str, object]) -> Iterator[Primer]:
    """Start a server in this process. The disk cache keeps its prompts."""
    settings = load_settings(config, flags).settings
    if not settings.cache.cache_disk:
        raise StartupError(
            "Without --url, prompts are primed into the disk cache, and cache_disk is 0."
        )
    key = next(iter(api_keys(settings.server)), None)

    from rekindle.server import background

    with background(load_model(settings)) as url, client_of(url, key, read_seconds=None) as http:
        yield Primer(http, None, persist=True)


def _check_no_model_flags(flags: Mapping[str, object]) -> None:
    parameters = inspect.signature(serve).parameters
    for name, value in flags.items():
        if value != parameters[name].default:
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} cannot be used with --url: that server has its own model.")


def _prime_file(primer: Primer, file: _ReadFile, progress: Progress) -> FileReport:
    report = FileReport(file.name)
    task = progress.add_task(file.name, total=None)
    if file.error is not None:
        _print_error(progress.console, file.error)
        report.n_failed += 1
    for request in file.requests:
        progress.reset(task, description=request.name, total=None)
        start = time.monotonic()
        try:
            primed = _send(primer, request, progress, task)
        except PrimeError as error:
            _print_error(progress.console, f"{request.name}: {error.message}")
            report.n_failed += 1
        else:
            report.add(primed, time.monotonic() - start)
    progress.remove_task(task)
    if report.n_requests:
        progress.console.print(_line(report), soft_wrap=True)
    return report


def _send(primer: Primer, request: "PrimeRequest", progress: Progress, task: TaskID) -> "Primed":
    import httpx

    from rekindle.priming.stream import PrefillUpdate, outcome_of

    def show(event: PrefillUpdate) -> None:
        progress.update(task, completed=event.n_done, total=event.n_tokens)

    try:
        with primer.http.stream("POST", request.path, json=primer.body_of(request)) as response:
            if response.is_error:
                raise PrimeError(refusal_of(response))
            return outcome_of(response.iter_lines(), show)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PrimeError(f"{base_url(primer.http)} cannot be reached: {error}.") from error


def _print_error(console: Console, message: str) -> None:
    console.print(message, style="red", soft_wrap=True)


def _line(report: FileReport) -> str:
    several = f" in {report.n_requests} requests" if report.n_requests > 1 else ""
    return (
        f"{report.file}: {report.n_tokens} tokens{several}, {report.n_cached} cached,"
        f" {report.n_computed} computed, {report.seconds:.2f} s"
    )


def _table(reports: Sequence[FileReport]) -> Table:
    table = Table("file", box=ASCII)
    for column in ("requests", "tokens", "cached", "computed", "seconds", "failed"):
        table.add_column(column, justify="right")
    for report in reports:
        numbers = (report.n_requests, report.n_tokens, report.n_cached, report.n_computed)
        cells = [*map(str, numbers), f"{report.seconds:.2f}", str(report.n_failed)]
        table.add_row(report.file, *cells)
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
                "--no-persist", help="Do not wait until the server has stored it on disk."
            ),
        ),
        *(parameter for parameter in shared if parameter.name not in left_out),
    ]


def _option(name: str, metavar: str, help_text: str) -> inspect.Parameter:
    return keyword(name, str | None, typer.Option(metavar=metavar, help=help_text))


prime.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
