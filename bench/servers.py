"""The servers under measurement: how each is found, started with equal flags, and stopped."""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import rekindle

START_LIMIT_SECONDS = 120
STOP_LIMIT_SECONDS = 15


class BenchError(Exception):
    """One sentence for the person at the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What both servers are told alike. The names are llama.cpp's."""

    model: Path
    ctx_size: int
    parallel: int
    threads: int
    batch_size: int = 2048
    ubatch_size: int = 512

    def arguments(self) -> list[str]:
        return [
            *("--ctx-size", str(self.ctx_size)),
            *("--parallel", str(self.parallel)),
            *("--threads", str(self.threads)),
            *("--batch-size", str(self.batch_size)),
            *("--ubatch-size", str(self.ubatch_size)),
            *("--flash-attn", "on"),
        ]


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    version: str
    command: tuple[str, ...]
    can_erase_slots: bool  # gives up the rows of finished requests when it is told to


@dataclass(frozen=True, slots=True)
class RunningServer:
    contender: Contender
    port: int
    n_slots: int

    def forget(self) -> None:
        """With a unified KV cache, rows that idle slots keep would slow the next burst.

        This server has to find that out by itself.
        """
        if self.contender.can_erase_slots:
            for slot in range(self.n_slots):
                url = f"http://127.0.0.1:{self.port}/slots/{slot}?action=erase"
                urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30).close()


def this_server(flags: Flags, scratch: Path) -> Contender:
    program = Path(sys.executable).with_name("rekindle")
    command = (str(program), "serve", str(flags.model), *flags.arguments())
    cache = ("--cache-dir", str(scratch / "cache"))
    return Contender("rekindle", rekindle.__version__, (*command, *cache), can_erase_slots=False)


def find_peer(llama_server: Path | None, flags: Flags, scratch: Path) -> Contender:
    found = llama_server or shutil.which("llama-server")
    if found is not None:
        name, version = "llama-server", _llama_server_version(str(found))
        command: tuple[str, ...] = (str(found), "--no-webui")
    elif importlib.util.find_spec("xllamacpp") is not None:
        name, version = "xllamacpp", importlib.metadata.version("xllamacpp")
        command = (sys.executable, "-m", "bench.xllamacpp_server")
    else:
        raise BenchError(
            "There is no server to compare with: put llama-server on PATH, name one with"
            " --llama-server, or install xllamacpp."
        )
    equal = (*flags.arguments(), "--kv-unified")
    # The directory is not written to; without it llama-server refuses to erase a slot.
    alone = ("--model", str(flags.model), "--cache-ram", "0", "--slot-save-path", str(scratch))
    return Contender(name, version, (*command, *equal, *alone), can_erase_slots=True)


@contextmanager
def running(contender: Contender, n_slots: int) -> Iterator[RunningServer]:
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*contender.command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "REKINDLE_"))},
        )
        try:
            if not _becomes_healthy(process, port):
                log.seek(0)
                tail = log.read().decode(errors="replace")[-2000:]
                raise BenchError(f"{contender.name} did not start:\n{tail}")
            yield RunningServer(contender, port, n_slots)
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _becomes_healthy(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _llama_server_version(program: str) -> str:
    try:
        result = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(f"{program} does not run: {error}") from error
    lines = (result.stdout + result.stderr).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if "version:" in line), "unknown")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
