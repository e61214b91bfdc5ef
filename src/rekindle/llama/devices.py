"""The devices that llama.cpp computes on besides the CPU, and memory that they copy fastest.

By ggml's own functions.
"""

import ctypes
import mmap as mmap_module
import sys
from contextlib import suppress
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.llama.library import ggml

PAGE_BYTES = 4096  # the least that there is

_GPU = 1  # enum ggml_backend_dev_type


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """None: this build of ggml does not have it."""
    function = getattr(ggml, name, None)
    if function is None:
        return None
    function.restype, function.argtypes = result, arguments
    return function


_address = ctypes.c_void_p
_size = ctypes.c_size_t
_n_devices = _function("ggml_backend_dev_count", _size)
_device = _function("ggml_backend_dev_get", _address, _size)
_device_type = _function("ggml_backend_dev_type", ctypes.c_int, _address)
_memory = _function(
    "ggml_backend_dev_memory", None, _address, ctypes.POINTER(_size), ctypes.POINTER(_size)
)


def gpus() -> list[int]:
    if None in (_n_devices, _device, _device_type, _memory):
        return []
    devices = [_device(number) for number in range(_n_devices())]
    return [device for device in devices if _device_type(device) == _GPU]


def free_bytes(device: int) -> int:
    free, total = _size(0), _size(0)
    _memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


class PinnedMemory:
    """Makes pinned buffers: memory that GPUs read and write by themselves.

    ggml has some too, but makes it page by page of 4 kB, three times slower, and nobody can copy
    anything meanwhile. Here only the last and short step belongs to the driver.
    """

    def __init__(self, register: Any, unregister: Any) -> None:
        register.argtypes = (_address, _size, ctypes.c_uint)
        unregister.argtypes = (_address,)
        self._register = register
        self._unregister = unregister

    def make(self, n_bytes: int) -> "PinnedBuffer | None":
        """None: there is no more of it. Any thread may."""
        try:
            buffer = PinnedBuffer(n_bytes, self._unregister)
        except (OSError, ValueError):
            return None
        if self._register(buffer.address, n_bytes, 0) != 0:
            return None
        return buffer


class PinnedBuffer:
    def __init__(self, n_bytes: int, unregister: Any) -> None:
        self.n_bytes = n_bytes
        self._unregister = unregister
        self._memory = _anonymous(n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        with suppress(OSError, AttributeError):  # where there is no such advice
            self._memory.madvise(mmap_module.MADV_HUGEPAGE)
        self.array()[::PAGE_BYTES] = 0  # now it is there

    def array(self) -> NDArray[np.uint8]:
        """A new view; its memory is there until `free`."""
        memory = (ctypes.c_uint8 * self.n_bytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype=np.uint8)

    def free(self) -> None:
        self._unregister(self.address)
        self._memory.close()


def _anonymous(n_bytes: int) -> mmap:
    """Not shared, which is the default: the kernel gives huge pages to private memory alone."""
    if sys.platform == "win32":
        return mmap(-1, n_bytes)
    return mmap(-1, n_bytes, flags=mmap_module.MAP_PRIVATE | mmap_module.MAP_ANONYMOUS)


def pinned_memory() -> PinnedMemory | None:
    """None: there is no GPU here, or none whose driver is known."""
    if not gpus():
        return None
    try:
        return PinnedMemory(ggml.cudaHostRegister, ggml.cudaHostUnregister)
    except AttributeError:
        return None
