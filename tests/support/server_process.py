"""`rekindle serve` as a process of its own, on a free port."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import httpx

from tests.support.engine_processes import kill_with_engines
from tests.support.fork_server import fork_rekindle

START_SECONDS = 120  # a machine under load; nothing is measured here
WAIT_SECONDS = 180


class Process(Protocol):
    """A running server: a `subprocess.Popen`, or one that was forked."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]


class ServerProcess:
    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    @property
    def n_file_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
        raise AssertionError(f"the server does not answer:\n{self.log}")

    def slots_in_use(self) -> int:
        metrics = httpx.get(f"{self.url}/metrics").text
        [value] = re.findall(r"^rekindle_slots_busy (\S+)$", metrics, re.MULTILINE)
        return int(float(value))

    def wait_until_idle(self) -> None:
        _wait(lambda: self.slots_in_use() == 0, "slots are still in use")

    def wait_for_metric(self, name: str) -> None:
        """Wait until the metric is not 0."""

        def is_counted() -> bool:
            metrics = httpx.get(f"{self.url}/metrics").text
            return re.search(rf"^{name} (?!0\.0$)", metrics, re.MULTILINE) is not None

        _wait(is_counted, f"{name} stays 0")

    def wait_for_log(self, text: str, *, times: int = 1) -> None:
        _wait(lambda: self.log.count(text) >= times, f"the log lacks {text!r}")

    def wait_for_descriptors(self, limit: int) -> None:
        """A connection that the client closed is open here for a moment longer."""
        _wait(lambda: self.n_file_descriptors <= limit, "file descriptors leak")

    def kill(self) -> None:
        """End the server and its engine processes at once, as a power cut does."""
        if self.process.poll() is None:
            if sys.platform == "linux":
                kill_with_engines(self.process.pid)
            self.process.kill()
            self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    prefix: Sequence[str] = (),
    python: str | Path = sys.executable,
    cwd: Path | None = None,
) -> Process:
    """Start a server as a user does. `fork_rekindle` starts the same server faster."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*prefix, str(python), "-m", "rekindle", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
        )


# A fork of a process that has used Apple's frameworks is not supported by them.
start_fast: Start = fork_rekindle if sys.platform == "linux" else launch


@contextmanager
def serve(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    start: Start = start_fast,
    port: int | None = None,
) -> Iterator[ServerProcess]:
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ours = {"REKINDLE_CACHE_DIR": str(Path(folder) / "cache")}  # never the user's own
        if "PYTEST_XDIST_WORKER" in os.environ:
            # Beside the servers of other workers: threads that wait for each other would crawl.
            ours["REKINDLE_THREADS"] = "1"
        process = start(
            ("serve", *arguments, "--port", str(port)),
            {**os.environ, **ours, **(environment or {})},
            log,
        )
        server = ServerProcess(process, port, log)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()
