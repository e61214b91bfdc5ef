"""`rekindle chat`: a conversation in the terminal over /v1/chat/completions.

Talks to a running server, or starts one in this process.
"""

import io
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from rekindle.cli.plain import SafeConsole
from rekindle.cli.remote import Remote, answers, client_of, refusal_of
from rekindle.cli.serve import load_model, load_settings
from rekindle.config.sources import api_keys
from rekindle.errors import StartupError
from rekindle.priming.stream import PrefillUpdate, events_in, progress_in

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    import httpx

_HELP = """\
/clear        start a new conversation
/system TEXT  set the system prompt; without TEXT, remove it
/exit         leave (also Ctrl-D)
Ctrl-C        stop the reply"""

ChatMessage = dict[str, str]


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    timings: dict[str, Any]  # as in the reply


@dataclass(frozen=True, slots=True)
class Failed:
    message: str


ChatEvent = PrefillUpdate | ReasoningPiece | TextPiece | ReplyEnd | Failed


def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Load this model for the chat; as MODEL of serve."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server to talk to. Default: the local one, or one started for this chat.",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
) -> None:
    """Chat in the terminal with a running server, or with a temporary one."""
    console = SafeConsole(highlight=False)
    with (
        _endpoint(model, url, api_key, console) as (address, key),
        client_of(address, key, read_seconds=None) as http,
    ):
        talk(ChatClient(http), console, _line_reader(), system)


@contextmanager
def _endpoint(
    model: str | None, url: str | None, key: str | None, console: Console
) -> Iterator[tuple[str, str | None]]:
    """Yield the address of a server and the key to send."""
    if url is not None:
        # The configured keys belong to the local server: no other server may see them.
        yield url, key
        return
    settings = load_settings(None, {"model": model}).settings
    key = key or next(iter(api_keys(settings.server)), None)
    local = f"http://127.0.0.1:{settings.server.port}"
    if model is None:
        if answers(local):
            yield local, key
            return
        why = f"No server at {local} (another: --url): this chat starts one for itself"
        console.print(why, style="dim", markup=False, soft_wrap=True)

    from rekindle.server.serving import background

    with background(load_model(settings)) as own:
        yield own, key


class ChatClient:
    """Sends messages to the first model that the server lists."""

    def __init__(self, http: "httpx.Client") -> None:
        self._http = http
        remote = Remote(http)
        try:
            self.model = str(json.loads(remote.get_text("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise StartupError(
                f"{remote.url} does not answer like an OpenAI server with a model."
            ) from error

    def reply(self, messages: Sequence[ChatMessage]) -> Generator[ChatEvent]:
        """Yield the events of one reply. Ends after `Failed`; closing it cancels the request."""
        import httpx

        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    yield Failed(refusal_of(response))
                    return
                for chunk in events_in(response.iter_lines()):
                    yield from _events(chunk)
        except httpx.HTTPError as error:
            yield Failed(f"The connection was lost: {error}.")


def _events(chunk: dict[str, Any]) -> Iterator[ChatEvent]:
    if error := chunk.get("error"):
        yield Failed(error["message"])
        return
    if progress := progress_in(chunk):
        yield progress
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        # Servers other than ours, given with --url, call it `reasoning`.
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ReasoningPiece(reasoning)
        if text := delta.get("content"):
            yield TextPiece(text)
    if timings := chunk.get("timings"):
        yield ReplyEnd(timings)


def _line_reader() -> Callable[[], str]:
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):  # a pipe may carry invalid UTF-8
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        return input
    import readline  # noqa: F401 - editing and history for input()

    return lambda: input("> ")


def talk(
    client: ChatClient, console: Console, read_line: Callable[[], str], system: str | None
) -> None:
    """Run the chat until `read_line` raises EOFError, or the user leaves."""
    console.print(f"{client.model} - /help for commands, Ctrl-D to leave", style="dim")
    history: list[ChatMessage] = []
    while True:
        try:
            line = read_line().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves", style="dim")
            continue
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit":
                return
            case "/clear":
                history.clear()
            case "/system":
                system = rest.strip() or None
            case "/help":
                console.print(_HELP, style="dim", markup=False)
            case _ if command.startswith("/"):
                console.print(f"There is no {command}; see /help", style="dim", markup=False)
            case _:
                start = [{"role": "system", "content": system}] if system else []
                question = {"role": "user", "content": line}
                text = draw(client.reply([*start, *history, question]), console)
                if text:
                    history += [question, {"role": "assistant", "content": text}]


def draw(events: Generator[ChatEvent], console: Console) -> str:
    """Show a reply as it streams. Return its text; after Ctrl-C, the text so far."""
    parts: list[str] = []
    thinking = False
    ending: Failed | ReplyEnd | None = None
    with Status("Reading the prompt", console=console) as status, closing(events):
        try:
            for event in events:
                match event:
                    case PrefillUpdate(n_done, n_tokens):
                        status.update(f"Reading the prompt: {n_done} of {n_tokens} tokens")
                    case ReasoningPiece(text):
                        status.stop()
                        thinking = True
                        console.print(text, end="", style="dim", markup=False, soft_wrap=True)
                    case TextPiece(text):
                        status.stop()
                        if thinking:
                            console.print("\n")
                            thinking = False
                        parts.append(text)
                        console.print(text, end="", markup=False, soft_wrap=True)
                    case Failed() | ReplyEnd():
                        ending = event
        except KeyboardInterrupt:
            ending = None
    console.print()
    match ending:
        case Failed(message):
            console.print(message, style="red", markup=False, soft_wrap=True)
        case ReplyEnd(timings):
            console.print(summary(timings), style="dim", markup=False)
        case None:
            console.print("stopped", style="dim")
    return "".join(parts)


def summary(timings: dict[str, Any]) -> str:
    n_cached, n_prefilled = timings["cache_n"], timings["prompt_n"]
    line = (
        f"prefilled {n_prefilled} of {n_cached + n_prefilled} tokens ({n_cached} cached)"
        f" in {timings['prompt_ms'] / 1000:.2f} s - {timings['predicted_n']} tokens"
        f" at {timings['predicted_per_second']:.1f} tokens/s"
    )
    if n_drafted := timings.get("draft_n"):
        line += f" - {timings['draft_n_accepted']} of {n_drafted} drafted tokens accepted"
    return line
