"""The llama.cpp library, loaded once, with its process-wide log turned into ours.

Everything in this package takes `lib` from here; nobody else imports llama_cpp.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_cpp import llama_cpp as lib

__all__ = ["lib", "listen_to_log", "recent_errors"]

_log = logging.getLogger("rekindle.llama")

# llama.cpp talks to developers: its errors reach our users as sentences of our own, its
# warnings are advice on flags we set on purpose. So all of it is debug output here.
_ERROR, _CONTINUE = 4, 5  # enum ggml_log_level

recent_errors: deque[str] = deque(maxlen=16)
_listeners: list[Callable[[str], None]] = []
_line: list[str] = []


def _on_log(level: int, text: bytes | None, _user_data: int | None) -> None:
    chunk = (text or b"").decode("utf-8", "replace")
    if level != _CONTINUE:
        _line.clear()
    _line.append(chunk)
    if level == _ERROR:
        recent_errors.append(chunk.strip())
    for listener in _listeners:
        listener("".join(_line))
    if chunk.endswith("\n"):
        _log.debug("%s", "".join(_line).rstrip())
        _line.clear()


@contextmanager
def listen_to_log(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with each (possibly still growing) line while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


# Kept for the life of the process: llama.cpp holds the bare pointer.
_callback = lib.llama_log_callback(_on_log)
lib.llama_log_set(_callback, ctypes.c_void_p(0))
lib.llama_backend_init()
