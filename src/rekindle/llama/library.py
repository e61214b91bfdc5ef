"""The llama.cpp library, loaded once, with its process-wide log turned into ours.

Everything in this package takes `lib` from here; nobody else imports llama_cpp.
"""

import ctypes
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any

# Read by the OpenMP runtime when llama.cpp loads it. Its own default spins for milliseconds at
# each of hundreds of barriers per token, so one other busy process on the machine makes decoding
# five to ten times slower; this costs nothing when alone. See docs/decisions/0003.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# A CUDA build of llama.cpp carries symbols of its own C++ library and crashes in them unless
# the system's is there first. Elsewhere there may be none, and then it does not matter.
with suppress(OSError):
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

# Blocks from this size on are the kernel's and go back to it when they are dropped. malloc would
# move the limit up to 32 MiB with the first of them, and stored rows of all lengths leave holes
# between each other: 21 % beyond the budget was measured, and what was deleted stayed. Smaller
# than this are arrays of a decode step. Measured by bench/memory_accounts.py; glibc only.
with suppress(AttributeError, TypeError):
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD

from llama_cpp import llama_cpp as lib

__all__ = [
    "STATE_VERSION",
    "first_error",
    "ggml",
    "holding_gil",
    "lib",
    "listen_to_log",
    "logits_address",
    "recent_errors",
    "sample_holding_gil",
]

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


def first_error() -> str:
    """Return the first line of `recent_errors` that says something."""
    return next((line for line in recent_errors if line), "it gave no reason")


@contextmanager
def listen_to_log(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with each (possibly still growing) line while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


# ggml's functions are found through libllama, which depends on it. Its own file must not be
# opened: the package holds copies under several names, and another copy has other globals.
ggml: ctypes.CDLL = lib._lib


def _identity(name: str) -> str:
    """What the loaded library says of itself."""
    function = getattr(lib._lib, name, None)
    if function is None:
        return "unknown"
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _build() -> str:
    """Names the build: the package's version, or the commit of one that the user brought.

    The commit of the package's own build only tells whether git was installed there.
    """
    if "LLAMA_CPP_LIB_PATH" in os.environ:
        return _identity("ggml_commit")
    return version("llama_cpp_python")


# Stored states are read by the build that wrote them: their layout is not promised to anyone.
STATE_VERSION = (
    f"build {_build()}, llama.cpp {_identity('llama_version')}, ggml {_identity('ggml_version')},"
    f" state {lib.LLAMA_STATE_SEQ_VERSION}"
)


def holding_gil(name: str) -> Any:
    """The same function, called without letting other Python threads in.

    For calls of microseconds: letting go of the GIL there hands it to the event loop, and the
    engine waits for it to come back, many times per step.
    """
    original = getattr(lib, name)
    function = getattr(ctypes.PyDLL(lib._lib._name), name)
    function.argtypes, function.restype = original.argtypes, original.restype
    return function


sample_holding_gil = holding_gil("llama_sampler_sample")
logits_address = holding_gil("llama_get_logits")
logits_address.restype = ctypes.c_void_p  # an int: cheaper to take than a typed pointer

# Kept for the life of the process: llama.cpp holds the bare pointer.
_callback = lib.llama_log_callback(_on_log)
lib.llama_log_set(_callback, ctypes.c_void_p(0))
lib.llama_backend_init()
