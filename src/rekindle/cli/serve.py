"""`rekindle serve`: flags from the settings; then the socket, the model and the server."""

import gc
import inspect
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import ASCII
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from rekindle.cli.llama_args import tell_unused
from rekindle.cli.plain import SafeConsole, SafeFormatter, plain_console
from rekindle.config.choices import EngineKind, LogLevel
from rekindle.config.declare import Bytes
from rekindle.config.server import ServerSettings
from rekindle.config.settings import CONFIG_VARIABLE, Setting, Settings, all_settings
from rekindle.config.sources import MODELS, Resolved, api_keys, read_file, resolve
from rekindle.errors import StartupError

if TYPE_CHECKING:  # importing the server would slow down `--help`
    from rekindle.server.assembly import Assembly
    from rekindle.supervisor.process import EngineProcess

_METAVARS = {int: "N", float: "SECONDS", Bytes: "SIZE", Path: "PATH", str: "TEXT"}
INTERRUPTED = 128 + signal.SIGINT  # the exit code that shells report for Ctrl-C
_BACKLOG = 2048  # uvicorn's own default
# Between two collections; Python's 700 would double the time in which a large body is parsed, and
# nothing else runs meanwhile. Picked.
YOUNG_OBJECTS = 10_000


def serve(*, config: str | None, print_config: bool, **flags: object) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    A flag wins over its environment variable, and the variable over the configuration file.
    Command lines of llama-server work as they are.
    """
    resolved = load_settings(config, flags)
    tell_unused(resolved.unused)
    if print_config:
        _print(resolved)
        return
    settings = resolved.settings
    _configure_logging(settings.server.log_level)
    sock = bind(settings.server)
    assembly = load_model(settings)

    from rekindle.server.serving import run

    run(assembly, settings, sock)


def load_settings(config: str | None, flags: Mapping[str, object]) -> Resolved:
    """Return the settings, with `flags` that are not None. Raises StartupError."""
    given = {name: value for name, value in flags.items() if value is not None}
    for setting in all_settings():
        if setting.about.off_flag and given.pop(_off_name(setting), False):
            if setting.name in given:
                raise StartupError(
                    f"{setting.flag} and {setting.about.off_flag} contradict each other."
                )
            given[setting.name] = "0"
    resolved = settings_with(given, config)
    api_keys(resolved.settings.server)  # report an unreadable key file before the model loads
    return resolved


def settings_with(flags: Mapping[str, object], config: str | None) -> Resolved:
    """Return the settings from flags, the environment and the configuration file."""
    config = config or os.environ.get(CONFIG_VARIABLE)
    file = read_file(Path(config).expanduser()) if config else {}
    return resolve(flags, os.environ, file)


def load_model(settings: Settings) -> "Assembly":
    """Load the model without garbage collection, which would take an eighth of the start."""
    gc.disable()
    try:
        return _load_model(settings)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


def _load_model(settings: Settings) -> "Assembly":
    if settings.engine.engine is EngineKind.VLLM:
        with _deferred_interrupt():
            from rekindle.models.vllm_model import find_upstreams
            from rekindle.server.assembly import assemble

        return assemble(settings, find_upstreams(settings))
    if settings.engine.upstream:
        raise StartupError("--upstream requires --engine vllm.")
    from rekindle.supervisor.process import EngineProcess

    engine = EngineProcess()  # it imports its modules while this process imports its own
    try:
        return _load_into(engine, settings)
    except BaseException:
        engine.close()
        raise


def _load_into(engine: "EngineProcess", settings: Settings) -> "Assembly":
    with _deferred_interrupt():  # these imports load llama.cpp
        from rekindle.models.llama_model import open_ahead
        from rekindle.models.source import first_model

    model = first_model(settings.model)
    if model is None:
        from rekindle.server.assembly import assemble

        engine.close()
        return assemble(settings, None)
    console = SafeConsole(stderr=True)
    with (
        _deferred_interrupt() as interrupted,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(f"Loading {model.name}", total=1.0)
        given_up = threading.Event()

        def on_progress(fraction: float) -> bool:
            progress.update(task, completed=fraction)
            return not (interrupted.is_set() or given_up.is_set())

        def on_digest(done: int, total: int) -> None:
            progress.update(task, description="Reading the weights (once)")
            progress.update(task, completed=done, total=total)

        name = settings.model.alias or model.name
        opened = open_ahead(settings.of(name), model, on_progress, engine)
        try:
            from rekindle.models.serving_model import LoadProgress
            from rekindle.server.assembly import assemble

            return assemble(settings, model, LoadProgress(on_progress, on_digest), opened)
        except BaseException:
            given_up.set()  # else the process would read the whole file before it exits
            raise


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Yield a flag that Ctrl-C sets, and exit at the end if it is set.

    A KeyboardInterrupt would be lost while Python runs inside a callback of llama.cpp.
    """
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted.is_set():
            raise typer.Exit(INTERRUPTED)


def bind(server: ServerSettings) -> socket.socket:
    """Return a listening socket. Bound before the model loads, to report a busy port at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python appends the address to the reason; our message has it already.
        reason = (error.strerror or "").partition(" (while")[0]
        raise StartupError(
            f"Cannot listen on {server.host}:{server.port} ({reason})."
            " Choose another address with --host or --port."
        ) from error


def _configure_logging(level: LogLevel) -> None:
    threshold = logging.getLevelNamesMapping()[level.name]
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(
        handlers=[handler],
        level=max(threshold, logging.WARNING),  # for libraries, whose INFO lines do not help here
    )
    logging.getLogger("rekindle").setLevel(threshold)


def _print(resolved: Resolved) -> None:
    table = Table("key", "value", "source", box=ASCII)
    for setting in all_settings():
        section = getattr(resolved.settings, setting.section)
        value = _shown(setting, getattr(section, setting.name))
        table.add_row(f"{setting.section}.{setting.name}", value, resolved.sources[setting.name])
    by_name = {setting.name: setting for setting in all_settings()}
    for model, sources in resolved.by_model.items():
        for name, source in sources.items():
            setting = by_name[name]
            section = getattr(resolved.settings.of(model), setting.section)
            value = _shown(setting, getattr(section, name))
            table.add_row(f'{MODELS}."{model}".{name}', value, source)
    plain_console().print(table)


def _shown(setting: Setting, value: object) -> str:
    if value is None or value == ():
        return "-"
    if setting.about.secret:
        return ", ".join("****" for _ in value) if isinstance(value, tuple) else "****"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


def _parameters() -> list[inspect.Parameter]:
    """Return the parameters for Typer: every setting as text. `config/sources.py` converts it."""
    config_help = f"Configuration file (TOML). {_env(CONFIG_VARIABLE)}"
    print_help = "Print every setting with its source, and exit."
    return [
        *(_parameter(setting) for setting in all_settings()),
        *(_off_parameter(setting) for setting in all_settings() if setting.about.off_flag),
        keyword("config", str | None, typer.Option(metavar="PATH", help=config_help)),
        keyword("print_config", bool, typer.Option("--print-config", help=print_help)),
    ]


def _parameter(setting: Setting) -> inspect.Parameter:
    help_text = f"{escape(setting.about.help)} {_env(setting.variable)}"
    if setting.name == "model":
        return keyword("model", str | None, typer.Argument(metavar="MODEL", help=help_text))
    about: dict[str, Any] = {
        "help": help_text + _default(setting),
        "rich_help_panel": f"{setting.section.capitalize()} settings",
    }
    if setting.type is bool:
        # Click takes ` /--no-x` as a name that turns the switch off.
        off = (f" /{name}" for name in setting.off_flags)
        return keyword(setting.name, bool | None, typer.Option(*setting.flags, *off, **about))
    option = typer.Option(*setting.flags, metavar=_metavar(setting), **about)
    kind = list[str] if setting.type == tuple[str, ...] else str
    return keyword(setting.name, kind | None, option)


def _off_parameter(setting: Setting) -> inspect.Parameter:
    option = typer.Option(
        setting.about.off_flag,
        help=f"The same as {setting.flag} 0.",
        rich_help_panel=f"{setting.section.capitalize()} settings",
    )
    return keyword(_off_name(setting), bool, option)


def _off_name(setting: Setting) -> str:
    return f"no_{setting.name}"


def _metavar(setting: Setting) -> str:
    if setting.about.metavar is not None:
        return setting.about.metavar
    if setting.type == tuple[str, ...]:
        return "TEXT"
    if setting.type in _METAVARS:
        return _METAVARS[setting.type]
    choices = "|".join(member.value for member in setting.type)
    return choices if len(choices) < 30 else "TYPE"


def _default(setting: Setting) -> str:
    if setting.default is None or setting.default == ():
        return ""
    return f" [dim]{escape(f'[default: {_shown(setting, setting.default)}]')}[/]"


def _env(variable: str) -> str:
    return f"[yellow]{escape(f'[env: {variable}]')}[/]"


def keyword(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if kind is bool else None,
        annotation=Annotated[kind, info],
    )


serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
