"""Host memory for exported state, pinned where a GPU computes.

A GPU copies from and to pinned memory four times as fast. Pinning takes longer than the copy
that it speeds up, so a thread pins buffers in advance, and dropped buffers are reused. If none
is ready, callers get none and use plain memory.
"""

import logging
import threading
import weakref
from collections import deque
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from rekindle.llama.devices import PinnedBuffer, PinnedMemory

_log = logging.getLogger("rekindle.llama")

SPARE_BYTES = 2**31  # pinned in advance: the rows of 16k tokens of an 8B model; picked
MIN_BYTES = 2**20  # smaller buffers are not pinned; picked


class HostMemory:
    """Allocates buffers. One thread calls `allocate`; any thread may drop the arrays."""

    def __init__(self, source: PinnedMemory | None, spare_bytes: int = SPARE_BYTES) -> None:
        self._source = source
        self._spare_bytes = spare_bytes
        self._made_bytes = 0  # the size of pinned buffers; 0: not known yet
        self._ready: deque[PinnedBuffer] = deque()
        # Arrays may be dropped at any moment, even inside our own calls, so there are no locks.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def expect(self, n_bytes: int) -> None:
        """Pin buffers of this size in advance: most allocations will have it."""
        if self._source is None or n_bytes < MIN_BYTES or self._thread is not None:
            return
        self._made_bytes = n_bytes
        self._thread = threading.Thread(target=self._make_ahead, name="pin", daemon=True)
        self._thread.start()

    def allocate(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Return a pinned buffer if one of this size is ready.

        It is reused once nothing refers to it.
        """
        if n_bytes != self._made_bytes:
            return None
        try:
            buffer = self._ready.popleft()
        except IndexError:
            return None
        finally:
            self._wakes.put(None)
        array = buffer.array()
        # Not at exit: the library may be unloaded by then, and the process frees the memory.
        weakref.finalize(array, self._take_back, buffer).atexit = False
        return array

    def close(self) -> None:
        """Free all buffers. Those in use are freed when they are dropped."""
        self._is_closed = True
        self._wakes.put(None)
        if self._thread is not None:
            self._thread.join()
        self._free_ready()

    def _free_ready(self) -> None:
        with suppress(IndexError):
            while True:
                self._ready.popleft().free()

    def _take_back(self, buffer: PinnedBuffer) -> None:
        self._ready.append(buffer)
        self._wakes.put(None)
        if self._is_closed:
            self._free_ready()

    def _make_ahead(self) -> None:
        assert self._source is not None
        n_ready = n_most = max(self._spare_bytes // self._made_bytes, 1)
        while not self._is_closed:
            if len(self._ready) < n_ready:
                buffer = self._source.make(self._made_bytes)
                if buffer is None:
                    _log.warning("memory: no more memory can be pinned, using plain memory")
                    n_ready = 0
                    continue
                self._ready.append(buffer)
                continue
            if len(self._ready) > n_most + n_most // 8 + 1:
                self._ready.pop().free()
                continue
            self._wakes.get()
