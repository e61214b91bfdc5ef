"""`rekindle prime`: computes the prompts of files before anyone needs their answer.

On a running server, or straight into the disk cache with a server of its own.
"""

import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import ASCII
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from rekindle.cli.serve import load_model, load_settings, serve
from rekindle.config import Settings, all_settings
from rekindle.config_sources import api_keys
from rekindle.errors import StartupError

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

    from rekindle.priming.files import PrimeRequest
    from rekindle.priming.stream import Primed

CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
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

    def with_request(self, primed: "Primed", seconds: float) -> "FileReport":
        return replace(
            self,
            n_requests=self.n_requests + 1,
            n_cached=self.n_cached + primed.n_cached,
            n_computed=self.n_computed + primed.n_computed,
            seconds=self.seconds + seconds,
        )


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
    """Compute the prompts of files, so that requests which begin with them find them.

    A file is a system prompt (.md, .txt), or holds a system prompt and tools, a request of any
    of the APIs, or recorded traffic (.json, .jsonl, .yaml, .toml; also with .gz).
    """
    if url is not None:
        _check_no_model_flags({"config": config, **flags})
        endpoint = _running(url, api_key, model)
    else:
        if no_persist:
            raise StartupError("--no-persist needs --url: without it the disk is all there is.")
        endpoint = _own(config, {**flags, "model": model})
    # A pipe has no width of its own: nothing is folded there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    with (
        endpoint as primer,
        Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ) as progress,
    ):
        reports = [
            _prime_file(replace(primer, persist=not no_persist), file, progress) for file in files
        ]
    console.print(_table(reports))
    if any(report.n_failed for report in reports):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Primer:
    """Where requests go, and what is changed in them."""

    http: "httpx.Client"
    model: str | None = None
    persist: bool = True

    def body_of(self, request: "PrimeRequest") -> dict[str, Any]:
        body = {**request.body, "persist": self.persist}
        return body if self.model is None else {**body, "model": self.model}


@contextmanager
def _running(url: str, api_key: str | None, model: str | None) -> Iterator[Primer]:
    with _client(url.rstrip("/").removesuffix("/v1"), api_key, is_remote=True) as http:
        yield Primer(http, model)


@contextmanager
def _own(config: str | None, flags: dict[str, object]) -> Iterator[Primer]:
    """A server of our own, which leaves what it computed on disk."""
    settings = load_settings(config, flags).settings
    _check_disk(settings)
    # Only the files that were named; the list is the server's.
    settings = replace(settings, chat=replace(settings.chat, warm=()))
    key = next(iter(api_keys(settings.server)), None)

    from rekindle.server import background

    with (
        background(load_model(settings), settings) as url,
        _client(url, key, is_remote=False) as http,
    ):
        yield Primer(http)


def _check_no_model_flags(flags: Mapping[str, object]) -> None:
    parameters = inspect.signature(serve).parameters
    for name, value in flags.items():
        if value != parameters[name].default:
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} is about a model of our own; with --url there is none.")


def _check_disk(settings: Settings) -> None:
    if not settings.cache.cache_disk:
        raise StartupError(
            "Without --url, what is primed goes to the disk cache, and that is off:"
            " cache_disk is 0."
        )


def _client(url: str, key: str | None, *, is_remote: bool) -> "httpx.Client":
    import httpx

    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(CONNECT_SECONDS, read=None),
        trust_env=is_remote,  # no proxy in front of the loopback
    )


def _prime_file(primer: Primer, file: str, progress: Progress) -> FileReport:
    from rekindle.errors import PrimeError
    from rekindle.priming.files import read_prime_file

    report = FileReport(file)
    task = progress.add_task(file, total=None)
    try:
        requests = read_prime_file(Path(file))
    except PrimeError as error:
        _print_error(progress.console, error.message)
        requests, report = (), replace(report, n_failed=1)
    for request in requests:
        progress.reset(task, description=request.name, total=None)
        start = time.monotonic()
        try:
            primed = _send(primer, request, progress, task)
        except PrimeError as error:
            _print_error(progress.console, f"{request.name}: {error.message}")
            report = replace(report, n_failed=report.n_failed + 1)
        else:
            report = report.with_request(primed, time.monotonic() - start)
    progress.remove_task(task)
    if report.n_requests:
        progress.console.print(_line(report), markup=False, soft_wrap=True)
    return report


def _send(primer: Primer, request: "PrimeRequest", progress: Progress, task: TaskID) -> "Primed":
    import httpx

    from rekindle.errors import PrimeError
    from rekindle.priming.stream import PrimeProgress, outcome_of, refusal_in

    def show(event: PrimeProgress) -> None:
        progress.update(task, completed=event.n_done, total=event.n_tokens)

    try:
        with primer.http.stream("POST", request.path, json=primer.body_of(request)) as response:
            if response.is_error:
                status = f"{response.status_code} {response.reason_phrase}"
                raise PrimeError(refusal_in(response.read(), status))
            return outcome_of(response.iter_lines(), show)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PrimeError(f"{primer.http.base_url} cannot be reached: {error}.") from error


def _print_error(console: Console, message: str) -> None:
    console.print(message, style="red", markup=False, soft_wrap=True)


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
        table.add_row(escape(report.file), *cells)
    return table


def _parameters() -> list[inspect.Parameter]:
    """Ours, and those of `serve` that say how the model is loaded and where its state is kept."""
    of_server = {each.name for each in all_settings() if each.section == "server"}
    left_out = of_server | {"model", "warm", "print_config"}
    shared = inspect.signature(serve).parameters.values()
    return [
        inspect.Parameter(
            "files",
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[list[str], typer.Argument(metavar="FILE", help="What to prime.")],
        ),
        _option("url", "URL", "Server to prime. Without it: the disk cache, with a model loaded."),
        _option("api_key", "KEY", "Key to send to that server."),
        _option("model", "NAME", "With --url: the model to ask for. Without: as MODEL of serve."),
        _switch("no_persist", "--no-persist", "Do not wait until the server has it on disk."),
        *(parameter for parameter in shared if parameter.name not in left_out),
    ]


def _option(name: str, metavar: str, help_text: str) -> inspect.Parameter:
    option = typer.Option(metavar=metavar, help=help_text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _switch(name: str, flag: str, help_text: str) -> inspect.Parameter:
    option = typer.Option(flag, help=help_text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


prime.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
