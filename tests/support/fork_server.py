"""`rekindle` processes that start fast: forked from one that has imported everything.

Importing takes 1.4 of the 1.6 seconds of a start, and the tests start some hundred servers. The
parent imports what neither loads llama.cpp nor reads the environment. Each child then runs the
command with its own arguments, environment and output, in a session of its own.

    parent process                        here
    accepts a connection   <----------    {"arguments": [...], "environment": {...}, "output": path}
    forks                  ---------->    pid
    reaps the child        ---------->    exit status
"""

import atexit
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOMS = ("api", "cache", "chat", "engine")  # of rekindle
LIBRARIES = ("uvicorn", "uvloop", "httptools", "rekindle.cli", "rekindle.observe.telemetry")
START_SECONDS = 60


class ForkedProcess:
    """The part of `subprocess.Popen` that tests need. `returncode` is negative for a signal."""

    def __init__(self, connection: socket.socket) -> None:
        self._answers = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"rekindle (pid {self.pid})", timeout or 0)
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_status(self) -> None:
        line = self._answers.readline()  # none: the parent has ended, and killed its children
        self.returncode = os.waitstatus_to_exitcode(int(line)) if line else -signal.SIGKILL
        self._answers.close()
        self._connection.close()


def fork_rekindle(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path
) -> ForkedProcess:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_parent_address())
    order = {"arguments": arguments, "environment": dict(environment), "output": str(output)}
    connection.sendall(json.dumps(order).encode() + b"\n")
    return ForkedProcess(connection)


@cache
def _parent_address() -> str:
    """Start the parent once. The parent ends with this process, which holds its stdin."""
    folder = tempfile.mkdtemp(prefix="rekindle-tests-", dir="/tmp")  # a socket's path is short
    atexit.register(shutil.rmtree, folder)
    address = f"{folder}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fork_server", address],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no thread may run at a fork
        stdin=subprocess.PIPE,
    )
    atexit.register(process.communicate)
    deadline = time.monotonic() + START_SECONDS
    while not os.path.exists(address):
        assert process.poll() is None, "the fork server ended"
        assert time.monotonic() < deadline, "the fork server does not listen"
        time.sleep(0.01)
    return address


def _import_ahead() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for room in ROOMS:
        package = importlib.import_module(f"rekindle.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    assert "llama_cpp" not in sys.modules  # a GPU's driver does not survive a fork
    assert "huggingface_hub" not in sys.modules  # it reads the environment when imported


def _serve_forks(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    # A child's end wakes the select below.
    ended, ended_writer = os.pipe()
    os.set_blocking(ended_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended_writer)
    os.set_blocking(ended, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then end this
    children: dict[int, socket.socket] = {}
    try:
        _fork_for_each(listener, (ended, ended_writer), children)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _fork_for_each(
    listener: socket.socket, pipe: tuple[int, int], children: dict[int, socket.socket]
) -> None:
    ended, ended_writer = pipe
    while True:
        ready, _, _ = select.select([listener, ended, sys.stdin], [], [])
        if sys.stdin in ready:  # EOF: the tests have ended
            return
        if ended in ready:
            os.read(ended, 4096)
            _report_ends(children)
        if listener in ready:
            connection, _ = listener.accept()
            line = connection.makefile("r").readline()
            if not line:  # a test that was given up
                connection.close()
                continue
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (listener, connection, *children.values()):
                    other.close()
                os.close(ended)
                os.close(ended_writer)
                _become(order["arguments"], order["environment"], order["output"])
            children[pid] = connection
            with suppress(OSError):
                connection.sendall(f"{pid}\n".encode())


def _report_ends(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = children.pop(pid)
        with connection, suppress(OSError):  # nobody may wait for it
            connection.sendall(f"{status}\n".encode())


def _become(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Never returns: this process is `rekindle` from here on."""
    status = 1
    try:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["rekindle", *arguments]

        from rekindle.cli import main

        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _import_ahead()
    _serve_forks(sys.argv[1])
