"""The stalls of a server are in its metrics."""

import os
import signal
import time

import httpx

from tests.support.server_process import ServerProcess, serve

COUNTED = "rekindle_event_loop_stalls_total"
# Of these times, those in which the host runs other machines do not count.
HELD_SECONDS = (1, 2, 4, 8, 16)


def hold_up(server: ServerProcess, seconds: float) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(server.process.pid, signal.SIGCONT)


def test_a_server_that_was_held_up_counts_a_stall() -> None:
    with serve() as server:
        for seconds in HELD_SECONDS:
            hold_up(server, seconds)
            if f"{COUNTED} 0.0" not in httpx.get(f"{server.url}/metrics").text:
                break
        server.wait_for_metric(COUNTED)
        assert "rekindle_engine_stalls_total 0.0" in httpx.get(f"{server.url}/metrics").text
        assert "event loop stalled" in server.log
