"""A real haproxy on docs/deploy/haproxy.cfg, and small servers to put behind it."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.needs import program
from tests.support.server_process import free_port

CONFIG = Path(__file__).parents[2] / "docs" / "deploy" / "haproxy.cfg"
START_SECONDS = 30  # nothing is measured here


class EchoServer:
    """A server that replies with its name. `is_draining`: 503; `stop`: its port is closed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_draining = False
        self.n_answered = 0
        self.n_refused = 0
        self.may_go_on = threading.Event()  # for the second half of a stream
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._http.server_port}"

    def stop(self) -> None:
        self.may_go_on.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        echo = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"status": "draining" if echo.is_draining else "ok"})

            def do_POST(self) -> None:
                n_bytes = len(self.rfile.read(int(self.headers["content-length"])))
                if self.path == "/stream":
                    self._stream()
                    return
                if echo.is_draining:
                    echo.n_refused += 1
                else:
                    echo.n_answered += 1
                self._answer({"server": echo.name, "n_bytes": n_bytes})

            def _answer(self, body: dict[str, object]) -> None:
                data = json.dumps(body).encode()
                self.send_response(503 if echo.is_draining else 200)
                self.send_header("content-length", str(len(data)))
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(b"data: first\n\n")
                echo.may_go_on.wait(START_SECONDS)
                self.wfile.write(b"data: second\n\n")

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def echo_servers(n_servers: int) -> Iterator[list[EchoServer]]:
    servers = [EchoServer(f"server-{index}") for index in range(n_servers)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


def haproxy_environment(port: int, addresses: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of the configuration."""
    servers = {f"REKINDLE_{index}": address for index, address in enumerate(addresses, start=1)}
    return {**os.environ, "REKINDLE_BIND": f"127.0.0.1:{port}", **servers}


@contextmanager
def haproxy(addresses: Sequence[str], config: Path = CONFIG) -> Iterator[str]:
    """Its URL, in front of three servers."""
    port = free_port()
    process = subprocess.Popen(
        [program("haproxy"), "-db", "-f", str(config)],
        env=haproxy_environment(port, addresses),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "haproxy ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "haproxy does not listen"
            time.sleep(0.02)
