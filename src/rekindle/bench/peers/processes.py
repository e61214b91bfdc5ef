"""A server as a process of its own: started, killed, started again, and what it took."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.bench.peers.contenders import Flags, Program
from rekindle.errors import RekindleError

START_LIMIT_SECONDS = 120
STOP_LIMIT_SECONDS = 15
TAIL_CHARACTERS = 300
LINUX_BLOCK_BYTES = 512  # of `ru_oublock`: what was caused to be written to a disk
OWN_SETTINGS = ("LLAMA_", "REKINDLE_", "OTEL_")  # variables that would change what is measured


class DidNotStart(RekindleError):
    """With the end of what the server wrote."""


@dataclass(slots=True)
class ProcessUsage:
    """None: the system does not tell."""

    peak_memory_bytes: int | None = None
    written_bytes: int | None = None

    def add(self, other: "ProcessUsage") -> None:
        """Of another process that did a part of the work."""
        peaks = [n for each in (self, other) if (n := each.peak_memory_bytes) is not None]
        written = [n for each in (self, other) if (n := each.written_bytes) is not None]
        self.peak_memory_bytes = max(peaks, default=None)
        self.written_bytes = sum(written) if written else None


class ServerProcess:
    """On one port and in one folder, however often it is started."""

    def __init__(
        self, program: Program, flags: Flags, folder: Path, more: Sequence[str] = ()
    ) -> None:
        self.program = program
        self.usage = ProcessUsage()
        self._port = free_port()
        self._command = [*program.command(flags, folder), *more]
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    async def start(self) -> float:
        """Seconds until it is ready."""
        began = time.monotonic()
        try:
            self._process = process = self._spawn()
        except OSError as error:
            raise DidNotStart(f"did not start: {error}") from error
        async with httpx.AsyncClient(base_url=self.url, timeout=2) as http:
            while time.monotonic() - began < START_LIMIT_SECONDS:
                if process.poll() is not None:
                    break
                try:
                    if (await http.get(self.program.health)).is_success:
                        return time.monotonic() - began
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.02)
        raise DidNotStart(f"did not start: {' '.join(self.log[-TAIL_CHARACTERS:].split())}")

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        peak = _peak_memory(process.pid)
        if process.returncode is None:
            # Not by the methods of Popen: they reap what has ended.
            os.kill(process.pid, number)
            if not await _has_ended(process.pid, STOP_LIMIT_SECONDS):
                os.kill(process.pid, signal.SIGKILL)
                await _has_ended(process.pid, STOP_LIMIT_SECONDS)
            # What it wrote at its end counts too; /proc no longer tells everyone at that point.
            _, status, resources = os.wait4(process.pid, 0)  # noqa: ASYNC222 - it has ended
            process.returncode = os.waitstatus_to_exitcode(status)
            is_linux = sys.platform == "linux"
            written = resources.ru_oublock * LINUX_BLOCK_BYTES if is_linux else None
            self.usage.add(ProcessUsage(peak, written))

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(OWN_SETTINGS)}
        arguments = [*self._command, "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: we have something to ask it first
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _has_ended(pid: int, limit_seconds: float) -> bool:
    deadline = time.monotonic() + limit_seconds
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, options) is not None:  # noqa: ASYNC222 - it does not wait
            return True
        await asyncio.sleep(0.01)
    return False


def _peak_memory(pid: int) -> int | None:
    kilobytes = _number(Path(f"/proc/{pid}/status"), r"VmHWM:\s+(\d+) kB")
    return None if kilobytes is None else kilobytes * 1024


def _number(file: Path, pattern: str) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None
