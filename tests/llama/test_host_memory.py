"""Buffers for exported state: made ahead, used again, never waited for."""

import gc
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.llama.devices import PinnedBuffer, PinnedMemory, gpus, pinned_memory
from rekindle.llama.host_memory import MIN_BYTES, HostMemory

BLOCK = 2 * MIN_BYTES


class CountedMemory(PinnedMemory):
    """Real memory, counted, of a driver that says yes."""

    def __init__(self, n_max: int = 1000) -> None:
        super().__init__(_Driver(self, 1), _Driver(self, -1))
        self.n_made = self.n_pinned = 0
        self._n_max = n_max

    def make(self, n_bytes: int) -> PinnedBuffer | None:
        if self.n_made == self._n_max:
            return None
        self.n_made += 1
        return super().make(n_bytes)


class _Driver:
    def __init__(self, memory: CountedMemory, change: int) -> None:
        self._memory = memory
        self._change = change

    def __call__(self, *_: object) -> int:
        self._memory.n_pinned += self._change
        return 0


@pytest.fixture
def source() -> CountedMemory:
    return CountedMemory()


def pinned(memory: HostMemory) -> NDArray[np.uint8]:
    array = memory.allocate(BLOCK)
    assert array is not None
    return array


def ready(memory: HostMemory, n_buffers: int) -> None:
    deadline = time.monotonic() + 30
    while len(memory._ready) != n_buffers:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_size_that_is_expected_is_made_ahead(source: CountedMemory) -> None:
    memory = HostMemory(source, spare_bytes=3 * BLOCK)
    memory.expect(BLOCK)
    ready(memory, 3)
    for n_bytes in (BLOCK - 1, 5, 2 * BLOCK):
        assert memory.allocate(n_bytes) is None
    assert source.n_made == 3
    memory.close()
    assert source.n_pinned == 0


def test_what_was_dropped_is_used_again_and_what_is_held_is_not(source: CountedMemory) -> None:
    memory = HostMemory(source, spare_bytes=BLOCK)
    memory.expect(BLOCK)
    ready(memory, 1)
    first = pinned(memory)
    first[:] = 7
    payload = first[: BLOCK - 1].data.toreadonly()  # as exports are handed on
    del first
    gc.collect()
    ready(memory, 1)
    second = pinned(memory)
    second[:] = 9
    assert np.all(np.frombuffer(payload, dtype=np.uint8) == 7)
    ready(memory, 1)
    del payload
    gc.collect()
    ready(memory, 2)  # it came back
    n_made = source.n_made
    held = [pinned(memory) for _ in range(2)]
    assert len(held) == 2
    ready(memory, 1)
    assert source.n_made == n_made + 1
    memory.close()


def test_without_a_buffer_ready_nobody_waits_for_one() -> None:
    memory = HostMemory(CountedMemory(n_max=1), spare_bytes=4 * BLOCK)
    memory.expect(BLOCK)
    ready(memory, 1)
    first, *others = (memory.allocate(BLOCK) for _ in range(5))
    assert first is not None
    assert others == [None] * 4
    memory.close()


def test_a_buffer_may_outlive_the_memory_it_came_from(source: CountedMemory) -> None:
    memory = HostMemory(source, spare_bytes=BLOCK)
    memory.expect(BLOCK)
    ready(memory, 1)
    array = pinned(memory)
    memory.close()
    array[:] = 3
    assert int(array.sum()) == 3 * BLOCK
    assert source.n_pinned == 1
    del array
    gc.collect()
    assert source.n_pinned == 0


def test_without_a_gpu_nothing_is_pinned() -> None:
    if gpus():
        pytest.skip("there is a GPU")
    assert pinned_memory() is None
    memory = HostMemory(pinned_memory())
    memory.expect(BLOCK)
    assert memory.allocate(BLOCK) is None
    assert memory._thread is None
