"""The GPUs that llama.cpp computes on, found through ggml, and pinned host memory for them."""

import ctypes
import mmap as mmap_module
import sys
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.errors import StartupError
from rekindle.llama.library import ggml

PAGE_BYTES = 4096  # the smallest page size

_GPU = 1  # enum ggml_backend_dev_type


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml; None: this build does not have it."""
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
_device_name = _function("ggml_backend_dev_name", ctypes.c_char_p, _address)
_buffer_type = _function("ggml_backend_dev_buffer_type", _address, _address)
_buffer_type_name = _function("ggml_backend_buft_name", ctypes.c_char_p, _address)
_memory = _function(
    "ggml_backend_dev_memory", None, _address, ctypes.POINTER(_size), ctypes.POINTER(_size)
)


def gpus() -> list[int]:
    if None in (_n_devices, _device, _device_type, _memory):
        return []
    devices = [_device(number) for number in range(_n_devices())]
    return [device for device in devices if _device_type(device) == _GPU]


def device_name(device: int) -> str:
    name: bytes = _device_name(device)
    return name.decode("utf-8", "replace")


def chosen_gpus(names: Sequence[str] | None) -> list[int]:
    """Return the GPUs of these names; None: all. Raises StartupError."""
    known = {device_name(device): device for device in gpus()}
    if names is None:
        return list(known.values())
    for name in names:
        if name not in known:
            there_are = ", ".join(known) or "llama.cpp finds no GPU here"
            raise StartupError(f"There is no GPU named {name}. GPUs: {there_are}.")
    return [known[name] for name in names]


def buffer_types() -> dict[str, int]:
    """Return the buffer types that weights can be placed in, by name: CPU, CUDA0, ..."""
    found = [_buffer_type(_device(number)) for number in range(_n_devices())]
    return {_buffer_type_name(each).decode("utf-8", "replace"): each for each in found if each}


def free_bytes(device: int) -> int:
    free, total = _size(0), _size(0)
    _memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


class PinnedMemory:
    """Makes pinned buffers: memory that GPUs read and write directly.

    ggml can pin memory too, but in pages of 4 kB. That is three times slower and blocks all
    copies meanwhile. Here only the last, short step runs in the driver.
    """

    def __init__(self, register: Any, unregister: Any) -> None:
        register.argtypes = (_address, _size, ctypes.c_uint)
        unregister.argtypes = (_address,)
        self._register = register
        self._unregister = unregister

    def make(self, n_bytes: int) -> "PinnedBuffer | None":
        """Return a new buffer; None: no more memory can be pinned. Any thread may call it."""
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
        with suppress(OSError, AttributeError):  # some systems have no huge pages
            self._memory.madvise(mmap_module.MADV_HUGEPAGE)
        self.array()[::PAGE_BYTES] = 0  # makes the kernel allocate every page

    def array(self) -> NDArray[np.uint8]:
        """Return a new view of the memory, valid until `free`."""
        memory = (ctypes.c_uint8 * self.n_bytes).from_address(self.address)
        return np.frombuffer(memoryview(memory), dtype=np.uint8)

    def free(self) -> None:
        self._unregister(self.address)
        self._memory.close()


def _anonymous(n_bytes: int) -> mmap:
    """Return private memory. The default is shared, which gets no huge pages."""
    if sys.platform == "win32":
        return mmap(-1, n_bytes)
    return mmap(-1, n_bytes, flags=mmap_module.MAP_PRIVATE | mmap_module.MAP_ANONYMOUS)


def pinned_memory() -> PinnedMemory | None:
    """Return the pinning functions of the driver; None: no GPU, or an unknown driver."""
    if not gpus():
        return None
    try:
        return PinnedMemory(ggml.cudaHostRegister, ggml.cudaHostUnregister)
    except AttributeError:
        return None
