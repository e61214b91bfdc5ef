"""Run the proxy: until a signal comes, or while a command runs."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from rekindle.errors import StartupError
from rekindle.local_hosts import is_loopback
from rekindle.record.command import environment_for, run_command
from rekindle.record.proxy import Proxy
from rekindle.record.signals import ENDING, first_signal
from rekindle.record.trace_writer import TraceWriter

LOCAL = "127.0.0.1"
ANY_PORT = 0
GRACE_SECONDS = 5  # for streams that still run when the proxy ends; picked

Work = Callable[[str], Coroutine[None, None, int]]  # takes the URL, returns an exit code


@dataclass(frozen=True, slots=True)
class Recording:
    n_requests: int
    exit_code: int  # of the command; 0 without one
    failure: str | None  # why lines are missing


async def record(
    upstream: str, trace: Path, host: str, port: int, on_start: Callable[[str], None]
) -> Recording:
    """Run the proxy until SIGINT or SIGTERM. Raises StartupError.

    `on_start` is called with the URL of the proxy.
    """

    async def wait(url: str) -> int:
        signalled = first_signal(ENDING)
        on_start(url)
        await signalled
        return 0

    return await _while(upstream, TraceWriter(trace), host, port, wait)


async def record_command(
    command: str, upstream: str, trace: Path, *, output: int | None = None
) -> Recording:
    """Run a shell command whose agents and SDKs use the proxy. Raises StartupError.

    The trace has this run alone. `output`: descriptor for what the command prints; None: stdout.
    """

    async def run(url: str) -> int:
        return await run_command(command, environment_for(url), output)

    return await _while(upstream, TraceWriter(trace, is_new=True), LOCAL, ANY_PORT, run)


async def _while(upstream: str, writer: TraceWriter, host: str, port: int, work: Work) -> Recording:
    """Serve until `work` ends, then write the last lines."""
    try:
        listener = _listener(host, port)
        server = _ProxyServer(
            uvicorn.Config(
                Proxy(upstream, writer, is_local=is_loopback(host)),
                ws="none",
                log_config=None,
                access_log=False,
                # A stream that the upstream cuts is cut for the client, too: no traceback.
                log_level="critical",
                # The upstream's own headers pass.
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        address, its_port = listener.getsockname()[:2]
        url = f"http://[{address}]:{its_port}" if ":" in address else f"http://{address}:{its_port}"
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            exit_code = await work(url)
        finally:
            server.should_exit = True
            await serving
    finally:
        writer.close()
    return Recording(writer.n_written, exit_code, writer.failure)


class _ProxyServer(uvicorn.Server):
    """uvicorn without its signal handling: the work decides when it ends."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def _listener(host: str, port: int) -> socket.socket:
    """Listen before the work starts: a connection then waits until it is accepted."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StartupError(f"{host}:{port} cannot be listened on: {error.strerror}.") from error
