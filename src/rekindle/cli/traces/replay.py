"""`rekindle replay`: sends recorded traffic to servers, and compares what each computed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, Progress

from rekindle.cli.plain import SafeConsole, plain_console, print_json, progress_bar
from rekindle.cli.serve import INTERRUPTED
from rekindle.errors import StartupError

if TYPE_CHECKING:  # importing httpx and the wire formats would slow down `--help`
    from rekindle.replay.client import Changes, Server
    from rekindle.replay.prompts import FloorCounter
    from rekindle.replay.report import ReplayRun
    from rekindle.replay.traffic import ReplayRequest

DEFAULT_MAX_TOKENS = 16  # picked: a replay measures prompts


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE", help="Recorded requests: a trace, JSON or JSON lines; also .gz."
        ),
    ],
    *,
    url: Annotated[
        list[str],
        typer.Option(
            metavar="URL", help="Server to send the requests to; may be repeated, to compare."
        ),
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Order of requests: recorded (without think time; the default if times are"
            " known), sequential, interleaved (conversations in turn) or concurrent:N.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Send only the first N requests.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Maximum tokens of each reply; 0: as recorded.")
    ] = DEFAULT_MAX_TOKENS,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model to ask for. Default: the recorded one, or the server's first.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")] = None,
    repeat: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Number of rounds; the order of servers alternates."),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as a web page as well.")
    ] = None,
) -> None:
    """Send recorded traffic to servers again, and compare how much they computed and how fast.

    Amplification is the number of prefilled tokens for each prompt token sent for the first time.
    """
    import asyncio

    from rekindle.replay.client import Changes
    from rekindle.replay.page import page_of
    from rekindle.replay.report import Report, json_of, notes_of, table_of
    from rekindle.replay.shape import shape_of
    from rekindle.replay.traffic import read_traffic

    traffic = read_traffic(traces, limit)
    chosen = shape_of(traffic, shape)
    _check_writable(html)
    runs: list[ReplayRun] = []
    # On stderr, because the results may go to a file.
    console = SafeConsole(stderr=True, highlight=False)
    was_interrupted = False
    with progress_bar(console, MofNCompleteColumn()) as progress:
        try:
            replay = _Replay(traffic.requests, chosen, repeat, runs, progress)
            asyncio.run(replay.run(url, api_key, Changes(max_tokens or None, model)))
        except KeyboardInterrupt:
            was_interrupted = True
    report = Report(traffic.requests, chosen, traffic.skipped, runs, was_interrupted)
    if html is not None:
        html.write_text(page_of(report), "utf-8")
    if as_json:
        print_json(json_of(report))
    else:
        output = plain_console()
        output.print(table_of(report))
        for note in notes_of(report):
            output.print(note, soft_wrap=True)
    if report.was_interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.n_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Replay:
    """One replay. Fills `runs` as it goes, so that an interruption keeps finished replies."""

    requests: "Sequence[ReplayRequest]"
    shape: str
    n_repeats: int
    runs: "list[ReplayRun]"
    progress: Progress

    async def run(self, urls: Sequence[str], api_key: str | None, changes: "Changes") -> None:
        from rekindle.replay.client import Server
        from rekindle.replay.prompts import FloorCounter

        servers = [Server(url, api_key, changes) for url in urls]
        try:
            for server in servers:
                await server.check()
            counters = [FloorCounter(server) for server in servers]
            targets = list(zip(labels_of(urls), servers, counters, strict=True))
            for repeat in range(1, self.n_repeats + 1):
                # Servers take turns at going first, as other load on the machine may change.
                for label, server, counter in targets if repeat % 2 else reversed(targets):
                    await self._run_once(label, server, counter, repeat)
        finally:
            for server in servers:
                await server.http.aclose()

    async def _run_once(
        self, label: str, server: "Server", counter: "FloorCounter", repeat: int
    ) -> None:
        from rekindle.replay.client import Outcome, run
        from rekindle.replay.report import ReplayRun
        from rekindle.replay.shape import schedule_of

        this = ReplayRun(label, repeat)
        self.runs.append(this)
        task = self.progress.add_task(label, total=len(self.requests))

        def show(what: str) -> None:
            self.progress.update(task, description=f"{label}  {what}")

        def add(outcome: Outcome) -> None:
            this.outcomes.append(outcome)
            self.progress.advance(task)
            if outcome.error is not None:
                text = f"{self.requests[outcome.index].name} at {label}: {outcome.error}."
                self.progress.console.print(text, style="red", markup=False, soft_wrap=True)

        start = time.monotonic()
        try:
            await run(
                schedule_of(self.requests, self.shape),
                lambda index: server.send(index, self.requests[index], start),
                on_start=lambda index: show(self.requests[index].name),
                on_end=add,
            )
        finally:
            # Also after Ctrl-C, for finished replies; a second Ctrl-C ends this too.
            this.seconds = time.monotonic() - start
            self.progress.reset(task, total=len(this.outcomes))
            show("counting the floor")
            async for counted in counter.count(self.requests, this.outcomes):
                this.counted[counted.index] = counted
                self.progress.advance(task)
            self.progress.remove_task(task)


def labels_of(urls: Sequence[str]) -> list[str]:
    """Return the URLs. A repeated one gets a number."""
    labels: list[str] = []
    for index, url in enumerate(urls):
        n_before = urls[:index].count(url)
        labels.append(f"{url} ({n_before + 1})" if n_before else url)
    return labels


def _check_writable(file: Path | None) -> None:
    """Raise StartupError before the replay starts if the report cannot be written."""
    if file is None:
        return
    try:
        file.touch()
    except OSError as error:
        raise StartupError(f"{file} cannot be written: {error.strerror}.") from error
