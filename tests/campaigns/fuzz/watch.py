"""Watch a server from outside: `/health?live` all the time, memory, deaths of engines, the log.

The prober is a process of its own, so that the campaign's own work does not delay it.
"""

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.engine_processes import engines_of
from tests.support.server_process import ServerProcess

STALL_SECONDS = 1.0  # of the event loop, on a quiet machine
PROBE_SECONDS = 0.05
PROBE_TIMEOUT_SECONDS = 120.0
REQUEST = b"GET /health?live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
MIB = 2**20
WORDS = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b")


@contextmanager
def probing(server: ServerProcess, stall_seconds: float) -> Iterator["Probed"]:
    """Ask for `/health` inside the block. The result is complete behind it."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", __name__, server.url),
            *map(str, (server.process.pid, stall_seconds)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    probed = Probed()
    try:
        yield probed
    finally:
        told, _ = process.communicate("end\n")
        probed.read(told)


@dataclass(slots=True)
class Probed:
    """What the prober found, once it has ended."""

    n_probes: int = 0
    longest_seconds: float = 0.0
    stalls: list[str] = field(default_factory=list)

    def read(self, told: str) -> None:
        ended = {"stalls": ["the prober ended early"]}
        found: dict[str, Any] = json.loads(told) if told.strip() else ended
        self.n_probes = found.get("n_probes", 0)
        self.longest_seconds = found.get("longest", 0.0)
        self.stalls = found["stalls"]

    def line(self) -> str:
        return f"/health: {self.n_probes} probes, longest {self.longest_seconds:.2f} s"


def probe_until_told(url: str, pid: int, stall_seconds: float) -> dict[str, object]:
    """Ask for `/health` until a line arrives on stdin. Time without a CPU does not count."""
    host, _, port = url.removeprefix("http://").partition(":")
    n_probes, longest = 0, 0.0
    stalls: list[str] = []
    while not select.select([sys.stdin], [], [], PROBE_SECONDS)[0]:
        began, waited = time.monotonic(), _cpu_waits(pid)
        try:
            ok = _is_healthy(host, int(port))
        except OSError as error:
            stalls.append(f"/health failed: {error!r}")
            continue
        seconds = time.monotonic() - began - (_cpu_waits(pid) - waited)
        n_probes += 1
        longest = max(longest, seconds)
        if not ok:
            stalls.append("/health did not answer 200")
        elif seconds > stall_seconds:
            stalls.append(f"/health took {seconds:.2f} s at {time.strftime('%H:%M:%S')}")
    return {"n_probes": n_probes, "longest": longest, "stalls": stalls}


def _is_healthy(host: str, port: int) -> bool:
    with socket.create_connection((host, port), timeout=PROBE_TIMEOUT_SECONDS) as connection:
        connection.sendall(REQUEST)
        return connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def _cpu_waits(pid: int) -> float:
    """Seconds that the server's event loop and this process were runnable without a CPU."""
    waits = (
        Path(f"/proc/{name}/schedstat").read_text("ascii").split()[1] for name in (pid, "self")
    )
    return sum(map(int, waits)) / 1e9


@dataclass(slots=True)
class Memory:
    """Resident bytes of the server and its engines, and open files, once per checkpoint."""

    server: list[int] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        self.files.append(len(os.listdir(f"/proc/{pid}/fd")))
        self.server.append(resident_bytes(pid))
        self.engines.append(sum(map(resident_bytes, engines_of(pid))))

    def growth(self) -> dict[str, int]:
        """Return by how many bytes a typical look of the last quarter is above one of the second.

        Engine processes come and go with the models that requests load and unload, and fill their
        caches anew: for them, the highest look of the second half counts, above that of the first.
        """
        quarter = len(self.server) // 4
        if not quarter:
            return {}
        before, now = self.server[quarter : 2 * quarter], self.server[-quarter:]
        half = len(self.engines) // 2
        return {
            "server": int(median(now) - median(before)),
            "engines": max(self.engines[half:]) - max(self.engines[:half]),
        }

    def line(self) -> str:
        if not self.server:
            return "memory: not looked at"
        return (
            f"server {self.server[-1] // MIB} MiB, engines {self.engines[-1] // MIB} MiB,"
            f" {self.files[-1]} open files"
        )


def resident_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return 0
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def log_problems(log: str) -> Counter[str]:
    """Return the lines that report a bug, without their times and ids."""
    lines = [line for line in log.splitlines() if WORDS.search(line)]
    return Counter(re.sub(r"^\S+ |request=\S+", "", line)[:200] for line in lines)


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(probe_until_told(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    )
