"""`rekindle chat`: a conversation in the terminal, drawn from the events of `client`.

Talks to a running server, or starts one in this process.
"""

import io
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from rekindle.cli.remote import client_of
from rekindle.cli.serve import load_model, load_settings
from rekindle.config_sources import api_keys
from rekindle.priming.stream import PrefillUpdate

if TYPE_CHECKING:  # httpx takes as long to import as all of `rekindle --help`
    from rekindle.cli.chat.client import ChatClient, ChatEvent, ReplyTimings

_HELP = """\
/clear        start a new conversation
/system TEXT  set the system prompt; without TEXT, remove it
/exit         leave (also Ctrl-D)
Ctrl-C        stop the reply"""


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
    from rekindle.cli.chat.client import ChatClient

    console = Console(highlight=False)
    with (
        _endpoint(model, url, api_key) as (address, key),
        client_of(address, key, read_seconds=None) as http,
    ):
        talk(ChatClient(http), console, _line_reader(), system)


@contextmanager
def _endpoint(
    model: str | None, url: str | None, key: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the address of a server and the key to send."""
    if url is not None:
        # The configured keys belong to the local server: no other server may see them.
        yield url, key
        return
    from rekindle.cli.chat.client import answers

    settings = load_settings(None, {"model": model}).settings
    key = key or next(iter(api_keys(settings.server)), None)
    local = f"http://127.0.0.1:{settings.server.port}"
    if model is None and answers(local):
        yield local, key
        return

    from rekindle.server import background

    with background(load_model(settings)) as own:
        yield own, key


def _line_reader() -> Callable[[], str]:
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):  # a pipe may carry invalid UTF-8
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        return input
    import readline  # noqa: F401 - editing and history for input()

    return lambda: input("> ")


def talk(
    client: "ChatClient", console: Console, read_line: Callable[[], str], system: str | None
) -> None:
    """Run the chat until `read_line` raises EOFError, or the user leaves."""
    from rekindle.cli.chat.client import ChatLine

    console.print(f"{client.model} - /help for commands, Ctrl-D to leave", style="dim")
    history: list[ChatLine] = []
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
                start = [ChatLine("system", system)] if system else []
                question = ChatLine("user", line)
                text = draw(client.reply([*start, *history, question]), console)
                if text:
                    history += [question, ChatLine("assistant", text)]


def draw(events: "Generator[ChatEvent]", console: Console) -> str:
    """Show a reply as it streams. Return its text; after Ctrl-C, the text so far."""
    from rekindle.cli.chat.client import Failed, ReasoningPiece, ReplyTimings, TextPiece

    parts: list[str] = []
    thinking = False
    ending: Failed | ReplyTimings | None = None
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
                    case Failed() | ReplyTimings():
                        ending = event
        except KeyboardInterrupt:
            ending = None
    console.print()
    match ending:
        case Failed(message):
            console.print(message, style="red", markup=False, soft_wrap=True)
        case ReplyTimings():
            console.print(summary(ending), style="dim", markup=False)
        case None:
            console.print("stopped", style="dim")
    return "".join(parts)


def summary(timings: "ReplyTimings") -> str:
    n_prompt = timings.n_cached + timings.n_prefilled
    return (
        f"prefilled {timings.n_prefilled} of {n_prompt} tokens ({timings.n_cached} cached)"
        f" in {timings.prefill_seconds:.2f} s - {timings.n_predicted} tokens"
        f" at {timings.predicted_per_second:.1f} tokens/s"
    )
