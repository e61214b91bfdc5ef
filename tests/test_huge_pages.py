"""Memory that payloads are read into: whole, no larger than they are, and gone with them."""

import errno
import mmap
import sys

import numpy as np
import pytest

from rekindle.huge_pages import HUGE_PAGE_BYTES, filled_buffer
from tests.support.tables import anonymous_bytes

ALMOST_THREE = 3 * HUGE_PAGE_BYTES - HUGE_PAGE_BYTES // 4
SIZES = [0, 1, mmap.PAGESIZE, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, ALMOST_THREE, ALMOST_THREE + 1]

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux has mapped")


def ones(view: memoryview) -> None:
    np.frombuffer(view, np.uint8)[:] = 1


@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_buffer_of_any_size_holds_what_was_put_into_it(n_bytes: int) -> None:
    data = np.random.default_rng(n_bytes).bytes(n_bytes)

    def fill(view: memoryview) -> None:
        view[:] = data

    buffer = filled_buffer(n_bytes, fill)
    assert bytes(buffer) == data


@on_linux
def test_buffers_take_no_more_memory_than_their_payloads() -> None:
    before = anonymous_bytes()
    buffers = [filled_buffer(ALMOST_THREE, ones) for _ in range(8)]
    taken = anonymous_bytes() - before
    assert taken <= 1.05 * sum(map(len, buffers))


@on_linux
def test_a_dropped_buffer_is_given_back() -> None:
    before = anonymous_bytes()
    for _ in range(8):
        filled_buffer(ALMOST_THREE, ones)
    assert anonymous_bytes() - before < ALMOST_THREE


def test_a_fill_that_fails_is_told() -> None:
    def fail(view: memoryview) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        filled_buffer(ALMOST_THREE, fail)


@on_linux
def test_a_kernel_without_huge_pages_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert bytes(filled_buffer(ALMOST_THREE, ones)) == b"\1" * ALMOST_THREE
