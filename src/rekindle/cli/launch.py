"""`rekindle launch`: starts an agent that uses this server, for one run."""

import os
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.status import Status
from rich.text import Text

from rekindle.cli.llama_args import ServeCommand
from rekindle.cli.plain import SafeConsole, filled_table, plain_console, printable
from rekindle.cli.remote import Remote, Stranger, answers, connected, local_server
from rekindle.cli.serve import load_settings, serve
from rekindle.config.sources import api_keys
from rekindle.errors import StartupError
from rekindle.launch.child_server import ChildServer, ended_by_signals
from rekindle.launch.plan import Endpoint, KnownAgent
from rekindle.launch.run import end_like, environment_of, files_for, run_agent, run_folder
from rekindle.launch.shell_lines import shell_lines
from rekindle.launch.table import AGENTS, find_agent

URL_VARIABLE = "REKINDLE_URL"
KEY_VARIABLE = "REKINDLE_API_KEY"
NO_KEY = "none"  # agents insist on a key
_LOAD_SECONDS = 3600.0  # picked: a large model, downloaded first
_POLL_SECONDS = 1.0
_LOG = "server.log"


def launch(
    agent: Annotated[
        str | None, typer.Argument(metavar="AGENT", help="Agent to start. Without it: list them.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments for the agent.")
    ] = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=URL_VARIABLE,
            help="Server to use. Default: the local one, or one started for this run.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help=f"Key to send. Default: {KEY_VARIABLE}."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the model; for a server that is started: its MODEL."
        ),
    ] = None,
    serve_args: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="ARGUMENTS",
            help="Start a server with these arguments of `rekindle serve`.",
        ),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print what would be done, as shell lines.")
    ] = False,
) -> None:
    """Start an agent that uses this server, and change none of its settings.

    The agent gets its settings as variables, arguments and temporary files.
    Its exit code is the exit code of this command.

    \b
    Examples:
      rekindle launch claude
      rekindle launch codex --serve "model.gguf" -- exec "Explain main.py"
      rekindle launch opencode --print
    """
    if agent is None:
        _print_agents()
        return
    known = find_agent(agent)
    wanted = _ServerChoice(url, api_key, model, serve_args)
    given = arguments or []
    if only_print:
        _print_plan(known, given, wanted)
        return
    program = _program(known)
    with (
        ended_by_signals(),
        run_folder() as run,
        _endpoint(wanted, run) as server,
    ):
        _warn_if_short(known, server)
        folder = run / "agent"
        folder.mkdir()
        plan = known.plan(server, folder)
        environment = environment_of(plan, server.url, os.environ)
        with files_for(plan, folder, os.environ) as kept:
            code = run_agent([program, *plan.arguments, *given], environment)
    for path in kept:
        typer.echo(
            f"rekindle: {known.title} made files that could not be moved to its own folder."
            f" They are in {path}.",
            err=True,
        )
    raise typer.Exit(end_like(code))


class _ServerChoice(NamedTuple):
    """What the command line says about the server."""

    url: str | None
    key: str | None
    model: str | None
    serve_args: str | None


def _program(agent: KnownAgent) -> str:
    program = shutil.which(agent.program)
    if program is None:
        raise StartupError(
            f"{agent.title} is not installed: there is no {agent.program} on the PATH."
            f" To install it: {agent.install}"
        )
    return program


@contextmanager
def _endpoint(wanted: _ServerChoice, folder: Path) -> Iterator[Endpoint]:
    """Yield the server that is wanted or runs here; else start one in `folder`."""
    with SafeConsole(stderr=True, highlight=False).status("Asking the server"):
        found = _running(wanted)
    if found is not None:
        yield found
        return
    with _started(wanted, folder) as started:
        yield started


def _running(wanted: _ServerChoice) -> Endpoint | None:
    """Return the server that is wanted, or the local one if it has the model. Or None."""
    if wanted.serve_args is not None:
        if wanted.url is not None:
            raise StartupError("--serve starts a server: it cannot be used with --url.")
        return None
    if wanted.url is not None:
        return _described(wanted.url, wanted.key or _key_of_shell(), wanted.model)
    url, key = local_server()
    if not answers(url):
        return None
    try:
        return _described(url, wanted.key or key, wanted.model)
    except (Stranger, ModelAway):
        return None


class ModelAway(StartupError):
    """The server does not have the model."""


def _described(url: str, key: str | None, model: str | None) -> Endpoint:
    with connected(url, key, read_seconds=_LOAD_SECONDS) as remote:
        listed = remote.call_if_there("GET", "/v1/models")
        if listed is None:
            raise remote.stranger()
        try:
            if any(each["owned_by"] != "rekindle" for each in listed["data"]):
                raise remote.stranger()
            chosen = _loaded(remote, _chosen(listed["data"], model))
            return Endpoint(
                url=remote.url,
                key=key or NO_KEY,
                model=chosen["id"],
                n_ctx=(chosen.get("meta") or {}).get("n_ctx"),
            )
        except (LookupError, TypeError, AttributeError) as error:
            raise remote.stranger() from error


def _chosen(listed: Sequence[Any], name: str | None) -> Any:
    if name is not None:
        named = [each for each in listed if each["id"] == name]
        if not named:
            names = ", ".join(each["id"] for each in listed)
            raise ModelAway(f"The server has no model {name!r}. Its models: {names}.")
        return named[0]
    if not listed:
        raise StartupError("The server has no model.")
    loaded = [each for each in listed if each["status"] == "loaded"]
    return (loaded or listed)[0]


def _loaded(remote: Remote, model: Any) -> Any:
    """Load the model if it is not loaded: only then its context is known."""
    if model["status"] == "loaded":
        return model
    return remote.call("POST", f"/v1/models/{model['id']}/load")


def _key_of_shell() -> str | None:
    return os.environ.get(KEY_VARIABLE, "").partition(",")[0] or None


@contextmanager
def _started(wanted: _ServerChoice, folder: Path) -> Iterator[Endpoint]:
    words, key = _serve_words(wanted)
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    console = SafeConsole(stderr=True, highlight=False)
    server = ChildServer(["--host", "127.0.0.1", "--port", str(port), *words], folder / _LOG)
    try:
        with console.status("Starting a server") as status:
            server.wait_until(lambda: _is_ready(url), partial(show_line, status))
            endpoint = _described(url, wanted.key or key, None)
        console.print(f"{endpoint.model} at {url}, for this run", style="dim", markup=False)
        yield endpoint
        if server.has_ended:
            console.print(f"The server has ended.\n{server.last_lines()}", markup=False)
    finally:
        server.close()


def show_line(status: Status, line: str) -> None:
    status.update(Text(f"Starting a server: {line}"))  # not markup: paths may have brackets


def _serve_words(wanted: _ServerChoice) -> tuple[list[str], str | None]:
    """Return the arguments of `rekindle serve`, and a key that its clients must send."""
    words = shlex.split(wanted.serve_args or "")
    if wanted.model is not None:
        words.append(wanted.model)
    app = typer.Typer()
    app.command(cls=ServeCommand)(serve)
    given = typer.main.get_command(app).make_context("serve", list(words)).params
    flags = {name: None if value == () else value for name, value in given.items()}
    if flags.pop("print_config") or flags["host"] or flags["port"]:
        raise StartupError("--serve takes no --host, no --port and no --print-config.")
    settings = load_settings(flags.pop("config"), flags).settings
    return words, next(iter(api_keys(settings.server)), None)


def _is_ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=_POLL_SECONDS, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _warn_if_short(agent: KnownAgent, server: Endpoint) -> None:
    if server.n_ctx is None or server.n_output is None:
        return
    if agent.n_first_prompt > server.n_ctx - server.n_output:
        typer.echo(
            f"rekindle: {agent.title} sends about {agent.n_first_prompt} tokens before the first"
            f" word of yours; {printable(server.model)} has a context of {server.n_ctx}.",
            err=True,
        )


def _print_agents() -> None:
    rows = [
        {
            "agent": agent.name,
            "API": agent.api,
            "program": shutil.which(agent.program) or f"not installed: {agent.install}",
        }
        for agent in AGENTS
    ]
    plain_console().print(filled_table(rows, numbers=()))


def _print_plan(agent: KnownAgent, arguments: Sequence[str], wanted: _ServerChoice) -> None:
    """Print the plan as lines for a shell. The key is hidden."""
    server = _running(wanted)
    if server is None:
        words, _ = _serve_words(wanted)
        typer.echo(f"# starts a server: {shlex.join(['rekindle', 'serve', *words])}")
        typer.echo("# PORT, MODEL and the limits of tokens are known when it runs.")
        server = Endpoint(url="http://127.0.0.1:PORT", key=NO_KEY, model="MODEL", n_ctx=None)
    else:
        context = f"context {server.n_ctx}" if server.n_ctx else "unknown context"
        typer.echo(f"# {server.url}, model {server.model}, {context}")
    if shutil.which(agent.program) is None:
        typer.echo(f"# not installed: {agent.install}")
    shown = server if server.key == NO_KEY else replace(server, key="****")
    for line in shell_lines(agent, shown, arguments):
        typer.echo(printable(line))
