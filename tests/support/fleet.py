"""Three real servers with one store and haproxy in front of them, on loopback."""

import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.needs import program
from tests.support.server_process import ServerProcess, free_port, serve
from tests.support.workloads import Answer, Client, Message, ReferenceFloor

N_SERVERS = 3
THINK_SECONDS = 0.5  # of a client between two turns; nobody tells when a turn is in the store
WAIT_SECONDS = 60  # a machine under load; nothing is measured here

CONFIG = """
defaults
    mode http
    timeout connect 2s
    timeout client 600s
    timeout server 600s
    timeout check 30s
    retries 3
    option redispatch

frontend all
    bind 127.0.0.1:{port}
    default_backend servers

backend servers
    balance {balance}
    hash-type consistent
    option httpchk GET /health
    http-response set-header x-served-by %[srv_name]
{servers}
"""
IN_TURN = "roundrobin"
BY_SESSION = "hdr(x-rekindle-session)"


@contextmanager
def haproxy(folder: Path, ports: Sequence[int], *, balance: str) -> Iterator[str]:
    """Its base URL."""
    binary = program("haproxy")
    port = free_port()
    servers = "\n".join(
        f"    server s{n} 127.0.0.1:{each} check inter 200 fall 1 rise 1"
        for n, each in enumerate(ports)
    )
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG.format(port=port, balance=balance, servers=servers))
    process = subprocess.Popen([binary, "-db", "-f", str(config)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200, "haproxy has no server")
        yield url
    finally:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, complaint
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Reply:
    answer: Answer
    server: str  # as haproxy calls it


class Fleet:
    """Counts computed tokens of all servers against one floor."""

    def __init__(self, servers: Sequence[ServerProcess], balancer: str) -> None:
        self.servers = {f"s{n}": server for n, server in enumerate(servers)}
        self.clients = {name: Client(server.url) for name, server in self.servers.items()}
        self.floor = ReferenceFloor()
        self.n_prefilled = self.n_floor = 0
        self._prompts: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._http = httpx.Client(base_url=balancer, timeout=600)

    def close(self) -> None:
        self._http.close()
        for client in self.clients.values():
            client.close()

    @property
    def amplification(self) -> float:
        return self.n_prefilled / self.n_floor

    def chat(self, messages: Sequence[Message], *, session: str = "s", **fields: Any) -> Reply:
        """Ask through the balancer. Its reply names the server."""
        body = {"messages": list(messages), "logprobs": True, "temperature": 0, **fields}
        response = self._http.post(
            "/v1/chat/completions", json=body, headers={"x-rekindle-session": session}
        )
        server = response.headers["x-served-by"]
        assert response.status_code == 200, f"{response.text}\n{self.servers[server].log}"
        client = self.clients[server]
        # The same server says what the prompt was: its remembered turns are part of it.
        answer = client._answer(client.chat_prompt(messages), response.json())
        self.n_prefilled += answer.n_prefilled
        self.n_floor += self.floor.n_new(answer.prompt)
        self.floor.learn(answer.computed)
        self._prompts[server].add(tuple(answer.prompt))
        return Reply(answer, server)

    def is_told(self, server: str) -> bool:
        """Whether the store has everything that this server will share."""
        client = self.clients[server]
        client.wait_until_saved()
        in_memory = client.metric("rekindle_cache_entries", tier="memory")
        n_ends = len(self._prompts[server])  # of prompts: these are not shared
        return client.metric("rekindle_cache_entries", tier="shared") >= in_memory - n_ends

    def wait_until_told(self, server: str) -> None:
        time.sleep(THINK_SECONDS)
        eventually(lambda: self.is_told(server), "the store does not get what was computed")

    def kill(self, server: str) -> None:
        process = self.servers.pop(server)
        self.clients.pop(server).close()
        process.process.kill()
        process.process.wait()


@contextmanager
def running_fleet(
    folder: Path, *arguments: str, balance: str, environment: dict[str, str] | None = None
) -> Iterator[Fleet]:
    environment = {**(environment or {}), "REKINDLE_THREADS": "1"}
    with ExitStack() as stack:
        starting = [
            serve(*arguments, "--parallel", "2", environment=environment) for _ in range(N_SERVERS)
        ]
        with ThreadPoolExecutor(N_SERVERS) as pool:
            servers = list(pool.map(stack.enter_context, starting))
        ports = [httpx.URL(server.url).port for server in servers]
        balancer = stack.enter_context(
            haproxy(folder, [port for port in ports if port is not None], balance=balance)
        )
        fleet = Fleet(servers, balancer)
        stack.callback(fleet.close)
        yield fleet
