"""Installs the faults that a test has ordered into an engine process. See `__init__.py`.

Moments: Python calls an audit hook before each system call, so what is left in the directory is
what a kill there leaves. The server dies with its engine, as in a power cut.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ENGINE_MODULE = "rekindle.engine_process"
SHARE_WRITTEN = {"EMPTY_FILE": 0.0, "HALF_A_FILE": 0.5}


def _ordered(name: str) -> str | None:
    try:
        return (_FOLDER / name).read_text("utf-8")
    except FileNotFoundError:
        return None


def _install_aborts() -> None:
    from rekindle.llama.context import LlamaBackend

    decode = LlamaBackend.decode
    has_started = False

    def faulty(self: Any, tokens: list[int], *arguments: Any) -> None:
        nonlocal has_started
        poison = _ordered("token")
        if poison is not None and int(poison) in tokens:
            os.abort()
        if not has_started and _ordered("start") is not None:
            os.abort()
        has_started = True
        decode(self, tokens, *arguments)

    LlamaBackend.decode = faulty  # type: ignore[assignment, method-assign]


def _die() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_when_gone(path: str) -> None:
    while os.path.exists(path):
        pass
    _die()


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("os.rename", "os.remove"):
        return
    moment, path = _ordered("moment"), os.fspath(arguments[0])
    if event == "os.remove":
        if moment == "REMOVED_ROW" and path.endswith(".kv"):
            _die()
    elif moment is not None and path.endswith(".tmp") and moment != "REMOVED_ROW":
        if moment == "RENAMED":
            threading.Thread(target=_die_when_gone, args=(path,), daemon=True).start()
            return
        if moment in SHARE_WRITTEN:
            os.truncate(path, int(os.path.getsize(path) * SHARE_WRITTEN[moment]))
        _die()


if ENGINE_MODULE in sys.orig_argv and "TEST_FAULTS" in os.environ:
    _FOLDER = Path(os.environ["TEST_FAULTS"])
    _install_aborts()
    sys.addaudithook(_on_event)
