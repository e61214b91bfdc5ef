"""`rekindle top`: the state of a running server in the terminal, once a second."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from rekindle.cli.plain import SafeConsole, plain_console, print_json
from rekindle.cli.remote import ApiKey, Remote, connected, exit_1_on_error, local_server
from rekindle.errors import StartupError

if TYPE_CHECKING:
    from rekindle.cli.top.snapshot import ServerSnapshot, Tokens

INTERVAL_SECONDS = 1.0
_PIPE_WIDTH = 100  # picked: fits most terminals where the output is read later


def top(
    *,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server to watch. Default: the local one.")
    ] = None,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one snapshot as JSON and exit.")
    ] = False,
) -> None:
    """Watch a running server: slots, tokens by source, tiers and sessions.

    Leave with Ctrl-C. If the server goes away, `top` retries every second.

    \b
    Examples:
      rekindle top
      rekindle top --url http://127.0.0.1:8080 --once
      rekindle top --json | jq .tokens
    """
    with exit_1_on_error():
        if url is None:
            url, local_key = local_server()
            api_key = api_key or local_key
        with connected(url, api_key) as remote:
            observer = Observer(remote)
            if as_json:
                print_json(asdict(observer.look()))
            elif once or not sys.stdout.isatty():
                _print_one(observer)
            else:
                _watch(observer)


class Observer:
    """Takes snapshots of one server.

    `/metrics` and `/slots` are read every time. `/props` and `/v1/sessions` count as a use of
    the model, and would keep an idle model loaded: they are read only after a change.
    """

    def __init__(self, remote: Remote, now: Callable[[], float] = time.time) -> None:
        self.url = remote.url
        self._remote = remote
        self._now = now
        self._known = _LastSnapshot()

    def look(self) -> "ServerSnapshot":
        """Raises StartupError."""
        try:
            return self._look()
        except StartupError:
            self._known = _LastSnapshot()  # another server may answer next time
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise self._remote.stranger() from error

    def _look(self) -> "ServerSnapshot":
        from rekindle.cli.top.snapshot import Metrics, snapshot_of

        taken_at = self._now()
        metrics = Metrics(self._remote.get_text("/metrics"))
        slots = self._remote.get("/slots")
        if not slots:  # no model is loaded
            self._known = _LastSnapshot()
        elif self._known.props is None:
            self._known = _LastSnapshot(props=self._remote.get("/props"), props_at=taken_at)
        if slots and self._known.counted != (tokens := metrics.tokens()):
            told = self._remote.call_if_there("GET", "/v1/sessions")
            sessions = told["data"] if told is not None else []
            self._known = replace(self._known, counted=tokens, sessions=sessions)
        known = self._known
        return snapshot_of(
            taken_at=taken_at,
            props=known.props,
            props_age_seconds=taken_at - known.props_at,
            metrics=metrics,
            slots=slots,
            sessions=known.sessions,
        )


@dataclass(frozen=True, slots=True)
class _LastSnapshot:
    """Replies about the loaded model, kept from earlier snapshots."""

    props: dict[str, Any] | None = None
    props_at: float = 0.0
    counted: "Tokens | None" = None  # counters when the sessions were read
    sessions: Sequence[dict[str, Any]] = ()


def frames(observer: Observer, *, width: Callable[[], int]) -> Iterator[RenderableType]:
    """Yield one frame per snapshot, without end; the last one and an error while it fails."""
    from rekindle.cli.top.snapshot import rates_between
    from rekindle.cli.top.view import frame

    before: ServerSnapshot | None = None
    last: RenderableType = ""
    while True:
        try:
            snapshot = observer.look()
        except StartupError as error:
            before = None
            yield Group(Text(f"{error.message} Retrying.", style="red"), last)
            continue
        rates = rates_between(before, snapshot) if before else None
        before, last = snapshot, frame(observer.url, snapshot, rates, width=width())
        yield last


def _print_one(observer: Observer) -> None:
    from rekindle.cli.top.view import frame

    console = plain_console(_PIPE_WIDTH)
    console.print(frame(observer.url, observer.look(), None, width=console.width))


def _watch(observer: Observer) -> None:
    from rich.live import Live

    console = SafeConsole(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            for each in frames(observer, width=lambda: console.width):
                live.update(each, refresh=True)
                time.sleep(INTERVAL_SECONDS)
        except KeyboardInterrupt:
            return
