"""The engine processes of a server as the operating system shows them (Linux only).

The names that these tests share with the server are here: the child's module, the metric, the
states in `/health`.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

ENGINE_MODULE = "rekindle.engine_process"
RESTARTS_METRIC = "rekindle_engine_restarts_total"
RUNNING, RESTARTING, FAILED = "running", "restarting", "failed"
CAUSES = {
    signal.SIGSEGV: "segfault",
    signal.SIGABRT: "abort",
    signal.SIGKILL: "killed",
    signal.SIGSTOP: "hang",
}
MARK = "TEST_SERVER_MARK"  # a variable by which a server's processes are known when it is dead
WAIT_SECONDS = 180


def engines_of(server: int) -> list[int]:
    """The engine processes that are children of the server, oldest first."""
    return [pid for pid in children_of(server) if is_engine(pid)]


def children_of(parent: int) -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return sorted(pid for pid in pids if _stat(pid)[1] == parent)


def zombies_of(parent: int) -> list[int]:
    return [pid for pid in children_of(parent) if state_of(pid) == "Z"]


def is_engine(pid: int) -> bool:
    return ENGINE_MODULE in _read(pid, "cmdline").split("\0")


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), Z (zombie) as in `ps`; empty once the process is gone."""
    return _stat(pid)[0]


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_for(
        lambda: all(_stat(int(task.name))[0] in ("T", "") for task in tasks.iterdir()),
        "every thread stops",
    )


def marked(mark: str) -> list[int]:
    """Every live process that was started with this mark, whoever its parent is by now."""
    wanted = f"{MARK}={mark}"
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if wanted in _read(pid, "environ").split("\0")]


def _stat(pid: int) -> tuple[str, int]:
    """State and parent. The name before them may contain anything."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else ("", -1)


def _read(pid: int, name: str) -> str:
    with suppress(OSError):  # it has just ended, or is another user's
        return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")
    return ""


def kill_with_engines(server: int) -> None:
    """End a server and its engines as a power cut does: nobody notices anybody's death."""
    with suppress(ProcessLookupError):
        os.kill(server, signal.SIGSTOP)  # or it would start another engine
        engines = engines_of(server)
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        wait_for(
            lambda: not any(state_of(pid) not in ("", "Z") for pid in engines), "the engines end"
        )


def engine_health(url: str) -> dict[str, Any]:
    """The `engine` object of `/health`, of the only loaded model."""
    health = httpx.get(f"{url}/health", timeout=30).json()
    engine: dict[str, Any] = health["engine"]
    return engine


def deaths_by_cause(url: str) -> dict[str, int]:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(rf'^{RESTARTS_METRIC}{{[^}}]*cause="(\w+)"[^}}]*}} (\S+)$', text, re.M)
    counted: dict[str, int] = {}
    for cause, value in found:
        counted[cause] = counted.get(cause, 0) + int(float(value))
    return {cause: n for cause, n in counted.items() if n}


def wait_for(condition: Callable[[], bool], what: str, *, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.02)
