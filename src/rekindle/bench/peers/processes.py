"""A server as a process: start, kill, restart, and the memory and disk writes it used."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.bench.peers.contenders import Flags, Program
from rekindle.errors import RekindleError

START_LIMIT_SECONDS = 600  # vLLM compiles its graph before its first start
STOP_LIMIT_SECONDS = 15
TAIL_CHARACTERS = 300
LINUX_BLOCK_BYTES = 512  # unit of `ru_oublock`, the blocks that a process wrote to disks
OWN_SETTINGS = (
    "LLAMA_",
    "REKINDLE_",
    "VLLM_",
    "OTEL_",
)  # variables that would change the measurement


class DidNotStart(RekindleError):
    """A server did not start. The message has the end of its log."""


@dataclass(slots=True)
class ProcessUsage:
    """Resources of one or several processes. None: the system does not report them."""

    peak_memory_bytes: int | None = None
    written_bytes: int | None = None

    def add(self, other: "ProcessUsage") -> None:
        peaks = [n for each in (self, other) if (n := each.peak_memory_bytes) is not None]
        written = [n for each in (self, other) if (n := each.written_bytes) is not None]
        self.peak_memory_bytes = max(peaks, default=None)
        self.written_bytes = sum(written) if written else None


async def started(
    program: Program,
    flags: Flags,
    scratch: Path,
    stack: AsyncExitStack,
    more_arguments: Sequence[str] = (),
) -> "ServerProcess":
    """Start `program` in a new folder. Closing `stack` ends it and removes the folder."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
    command = [*program.command(flags, folder), *more_arguments]
    process = ServerProcess(command, folder, program.health)
    stack.push_async_callback(process.end)
    await process.start()
    return process


class ServerProcess:
    """A server that keeps its port and its folder over restarts."""

    def __init__(self, command: Sequence[str], folder: Path, health: str) -> None:
        self.usage = ProcessUsage()
        self.folder = folder
        self.port = _free_port()
        self._command = command
        self._health = health
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    async def start(self) -> float:
        """Start the server and return the seconds until it was ready."""
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
                    if (await http.get(self._health)).is_success:
                        return time.monotonic() - began
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.02)
        raise DidNotStart(f"did not start: {' '.join(self.log[-TAIL_CHARACTERS:].split())}")

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the server and add what it used to `usage`. Safe to call when none runs.

        A kill ends all its processes at once, as a reset of the machine would.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        peak = peak_memory_bytes(process.pid)
        if process.returncode is None:
            # Do not use the methods of Popen: they reap the process before `wait4` can.
            if number is signal.SIGKILL:
                _kill_all(process.pid)
            else:
                os.kill(process.pid, number)
            if not await _has_ended(process.pid, STOP_LIMIT_SECONDS):
                os.kill(process.pid, signal.SIGKILL)
                await _has_ended(process.pid, STOP_LIMIT_SECONDS)
            # Includes the writes of its shutdown; /proc may be unreadable by then.
            _, status, resources = os.wait4(process.pid, 0)  # noqa: ASYNC222 - it has ended
            process.returncode = os.waitstatus_to_exitcode(status)
            is_linux = sys.platform == "linux"
            written = resources.ru_oublock * LINUX_BLOCK_BYTES if is_linux else None
            self.usage.add(ProcessUsage(peak, written))
        _kill_all(process.pid)  # also behind one that ended by itself

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(OWN_SETTINGS)}
        arguments = [*self._command, "--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # Ctrl-C must not reach the server: its counters are read first.
                start_new_session=True,
            )


def _kill_all(leader: int) -> None:
    """Kill what is left of a server.

    vLLM leaves processes behind. Our engine process has a group of its own, stores its rows when
    the server is gone, and is started again when only the engine is gone.
    """
    if sys.platform != "linux":
        with suppress(ProcessLookupError, PermissionError):  # macOS: only a zombie is left
            os.killpg(leader, signal.SIGKILL)
        return
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _session(leader):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _session(leader: int) -> list[int]:
    """Return the processes of the session that this process began."""
    pids = []
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError):
            if name.isdigit() and os.getsid(int(name)) == leader:
                pids.append(int(name))
    return pids


def _free_port() -> int:
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


def peak_memory_bytes(pid: int) -> int | None:
    """Return the peaks of the process and of those that it started, added up."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tasks = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    children = [peak_memory_bytes(int(child)) for task in tasks for child in task.split()]
    return int(found[1]) * 1024 + sum(each or 0 for each in children) if found else None
