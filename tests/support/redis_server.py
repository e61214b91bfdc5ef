"""A real redis-server for tests, on a free port of loopback; nothing of it is on disk."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.support.needs import program
from tests.support.server_process import free_port

START_SECONDS = 30


class RedisServer:
    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.password = ""
        if "--requirepass" in options:
            self.password = options[options.index("--requirepass") + 1]
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, also after `kill`: on the same port, empty."""
        self._process = subprocess.Popen(
            [
                program("redis-server"),
                "--port",
                str(self.port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                *self._options,
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert self._process.poll() is None, "redis-server ended"
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.01)

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, password=self.password or None)

    def freeze(self) -> None:
        """Freeze the process: connections stay open and get no answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
