"""Entry point of an engine process: `python -m rekindle.engine_process SOCKET PAGE`.

The arguments are descriptors that the server has opened: the link, and the activity page.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from rekindle.link.activity_page import ActivityPage
from rekindle.observe.timeline import ENGINE_PROBES, FOLDER_VARIABLE, install

# How long one thread may hold the GIL. Python's default of 5 ms is half a decode step of a
# small model.
SWITCH_SECONDS = 0.0005
FAILED = 70  # exit code: a Python exception ended the engine


def main() -> None:
    # Ctrl-C and a service manager signal the whole group. The server decides when an engine ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    os.dup2(2, 1)  # a library that prints must not write into the server's own output
    sock = socket.socket(fileno=int(sys.argv[1]))
    page = ActivityPage(int(sys.argv[2]))
    page.beat()

    from rekindle.engine_process.loading import load
    from rekindle.engine_process.service import EngineService

    if folder := os.environ.get(FOLDER_VARIABLE):
        install(Path(folder), "engine", ENGINE_PROBES)
    sys.setswitchinterval(SWITCH_SECONDS)
    code = 0
    try:
        EngineService(sock, page, load=load, log_to=_log_to, give_up=lambda: os._exit(FAILED)).run()
    except BaseException:
        traceback.print_exc()  # the supervisor logs it
        code = FAILED
    sys.stderr.flush()
    os._exit(code)  # other threads may be busy, and all that is worth storing is stored


def _log_to(handler: logging.Handler, level: int) -> None:
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("rekindle").setLevel(level)


if __name__ == "__main__":
    main()
