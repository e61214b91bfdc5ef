"""The `rekindle` command: its subcommands, and its exit code after an error."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rekindle import __version__
from rekindle.cli import models
from rekindle.cli.bench import bench
from rekindle.cli.cache import commands as cache
from rekindle.cli.chat import chat
from rekindle.cli.launch import launch
from rekindle.cli.llama_args import ServeCommand
from rekindle.cli.plain import printable
from rekindle.cli.prime import prime
from rekindle.cli.serve import serve
from rekindle.cli.top.command import top
from rekindle.cli.traces.explain import explain
from rekindle.cli.traces.lint import lint
from rekindle.cli.traces.record import record
from rekindle.cli.traces.replay import replay
from rekindle.errors import StartupError, UpstreamsAway

OLLAMA_COMMANDS = {
    "run": "`rekindle serve hf:owner/repo:Q4_K_M`, then `rekindle chat`",
    "pull": "`rekindle serve hf:owner/repo:Q4_K_M` downloads a model once",
    "ps": "`rekindle top`",
    "list": "`rekindle top`, or `GET /v1/models`",
}


class Commands(TyperGroup):
    """Names of Ollama's commands are answered with ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # Typer hides its types
        if args and (ours := OLLAMA_COMMANDS.get(args[0])) is not None:
            raise StartupError(f"{args[0]} is a command of Ollama. Here: {ours}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ServeCommand)(serve)
for command in (chat, launch, prime, top, record, replay, explain, lint, bench):
    app.command()(command)
app.add_typer(cache.app, name="cache")
app.add_typer(models.app, name="models")


def main() -> None:
    try:
        app(prog_name="rekindle")
    except StartupError as error:
        sys.stderr.write(f"rekindle: {printable(error.message)}\n")
        sys.exit(1 if isinstance(error, UpstreamsAway) else 2)


def _print_version(*, asked: bool) -> None:
    if asked:
        typer.echo(f"rekindle {__version__}")
        raise typer.Exit


@app.callback()
def rekindle(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=lambda asked: _print_version(asked=asked),
        ),
    ] = False,
) -> None:
    """A local LLM server that never prefills the same token twice.

    \b
    Examples:
      rekindle serve                     serve the embedded model
      rekindle serve model.gguf          serve a GGUF file
      rekindle top                       watch the running server
    """
