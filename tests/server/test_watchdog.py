"""The stalls of a server are in its metrics."""

import os
import signal
import time

import httpx

from tests.support.server_process import serve


def test_a_server_that_was_held_up_counts_a_stall() -> None:
    with serve() as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(server.process.pid, signal.SIGCONT)
        server.wait_for_metric("rekindle_event_loop_stalls_total")
        assert "rekindle_engine_stalls_total 0.0" in httpx.get(f"{server.url}/metrics").text
        assert "event loop stalled" in server.log
