"""The llama.cpp library, loaded once, with its process-wide log sent to ours.

All modules of this package import `lib` from here; no other module imports llama_cpp.
"""

import ctypes
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from typing import Any

# The OpenMP runtime reads this when llama.cpp loads it. By default it spins for milliseconds at
# each of hundreds of barriers per token. One other busy process then makes decoding five to ten
# times slower. This value costs nothing on an idle machine. See docs/decisions/0003.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# A CUDA build of llama.cpp contains symbols of its own C++ library, and crashes in them unless
# the system's library is loaded first. Other systems may not have this library or need it.
with suppress(OSError):
    ctypes.CDLL("libstdc++.so.6", mode=ctypes.RTLD_GLOBAL)

# Allocations from this size on return to the kernel when they are freed. By default malloc would
# raise the limit to 32 MiB with the first one. Stored rows of all lengths then leave holes: 21 %
# more than the budget was measured, and evicted memory stayed allocated. Smaller allocations are
# arrays of a decode step. Measured by bench/memory/accounts.py; glibc only.
with suppress(AttributeError, TypeError):
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def _import_bindings() -> Any:
    """Import the ctypes bindings without the package's own classes.

    Those import Jinja, diskcache and more: a third of the start of an engine process.
    """
    if "llama_cpp" not in sys.modules:
        spec = find_spec("llama_cpp")
        assert spec is not None
        sys.modules["llama_cpp"] = module_from_spec(spec)  # found, and not executed
    return import_module("llama_cpp.llama_cpp")


lib = _import_bindings()
_log = logging.getLogger("rekindle.llama")

# llama.cpp's log is for developers. Users get our own error messages, and its warnings concern
# flags that we set on purpose. All of it is debug output here.
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
    """Call `listener` with each line while the block runs, and with each part of a growing line."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


# ggml's functions are found through libllama, which depends on it. Do not open ggml's own file:
# the package holds copies under several names, and another copy has other globals.
ggml: ctypes.CDLL = lib._lib


def _identity(name: str) -> str:
    """Call a function of the loaded library that returns its version or commit."""
    function = getattr(lib._lib, name, None)
    if function is None:
        return "unknown"
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _build() -> str:
    """Return the package's version, or the commit of a library that the user provides.

    The package's own build has no reliable commit: it depends on git in the build machine.
    """
    if "LLAMA_CPP_LIB_PATH" in os.environ:
        return _identity("ggml_commit")
    return version("llama_cpp_python")


def _attention() -> str:
    """Return the version of the attention kernels that our build adds to llama.cpp, if it has them.

    Rows computed by other kernels differ in their last bits.
    """
    if not hasattr(lib._lib, "rekindle_attention"):
        return ""
    return f", attention {_identity('rekindle_attention')}"


# Stored states are read only by the build that wrote them: llama.cpp may change their layout.
STATE_VERSION = (
    f"build {_build()}, llama.cpp {_identity('llama_version')}, ggml {_identity('ggml_version')},"
    f" state {lib.LLAMA_STATE_SEQ_VERSION}{_attention()}"
)


def has_faulty_amx() -> bool:
    """Return whether the library was built for AMX and lacks scripts/llama_cpp/amx.patch.

    Its AMX kernels crash, or give wrong logits where hybrid models have several streams.
    """
    return bool(lib._lib.ggml_cpu_has_amx_int8()) and not hasattr(lib._lib, "rekindle_amx")


def holding_gil(name: str) -> Any:
    """Return the library's function in a form that does not release the GIL.

    For calls of microseconds. Releasing the GIL hands it to the event loop, and the engine waits
    to get it back, many times per step.
    """
    original = getattr(lib, name)
    function = getattr(ctypes.PyDLL(lib._lib._name), name)
    function.argtypes, function.restype = original.argtypes, original.restype
    return function


sample_holding_gil = holding_gil("llama_sampler_sample")
logits_address = holding_gil("llama_get_logits")
logits_address.restype = ctypes.c_void_p  # an int is cheaper than a typed pointer

# Kept for the life of the process: llama.cpp holds the bare pointer.
_callback = lib.llama_log_callback(_on_log)
lib.llama_log_set(_callback, ctypes.c_void_p(0))
lib.llama_backend_init()
