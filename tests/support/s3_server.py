"""SeaweedFS for tests: S3 on a free port of loopback, with one bucket; starts in 4 seconds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.server_process import free_port

BUCKET = "shared"
START_SECONDS = 60
PARTS = ("master", "volume", "filer", "s3")


class S3Server:
    url = f"s3://{BUCKET}/prefix"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._ports = {f"-{part}.port": free_port() for part in PARTS} | {"-s3.port": self._port}
        self._grpc_ports = {f"-{part}.port.grpc": free_port() for part in PARTS}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of a client process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "some-secret",
        }

    def start(self) -> None:
        """Start the server, also after `kill`: on the same port, with its objects."""
        # With credentials in its environment it would let nobody else in, us included.
        environment = {name: os.environ[name] for name in os.environ if name[:4] != "AWS_"}
        self._process = subprocess.Popen(
            self._command(),
            cwd=self._folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._takes_objects():
            assert self._process.poll() is None, "the S3 server ended"
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.02)

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

    def _command(self) -> list[str]:
        ports = self._ports | self._grpc_ports
        return [
            str(Path(sys.executable).with_name("weed")),
            "server",
            f"-dir={self._folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            "-master.peers=none",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=64",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            *(f"{option}={port}" for option, port in ports.items()),
        ]

    def _takes_objects(self) -> bool:
        # It creates a bucket before its volumes are ready, and then a write may take seconds.
        try:
            bucket = httpx.put(f"{self.endpoint}/{BUCKET}", timeout=5)
            if bucket.status_code not in (200, 409):
                return False
            return httpx.put(f"{self.endpoint}/{BUCKET}/ready", content=b"?", timeout=5).is_success
        except httpx.HTTPError:
            return False


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
