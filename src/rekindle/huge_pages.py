"""New memory for the payloads of the cache, in huge pages.

The first touch of new memory takes longer than to fill it, but far less in huge pages. A
payload that is not a multiple of their size would end in small pages. A buffer is therefore
filled in whole huge pages and then shrunk. The kernel may keep the rest, at most an eighth, until
memory is short.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress

import numpy as np

HUGE_PAGE_BYTES = 2**21  # of x86-64, and of ARM with pages of 4 KiB
_MAX_REST_SHARE = 1 / 8  # of a payload; picked

Fill = Callable[[memoryview], None]


def filled_buffer(n_bytes: int, fill: Fill) -> memoryview:
    """Return new memory after `fill` has written all of it. It is freed with its last reference."""
    n_huge_bytes = -(-n_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    is_worth_it = n_bytes > 0 and n_huge_bytes - n_bytes <= n_bytes * _MAX_REST_SHARE
    if not is_worth_it or not hasattr(mmap, "MADV_HUGEPAGE"):
        plain = np.empty(n_bytes, np.uint8).data
        fill(plain)
        return plain
    # Since 6.7, Linux aligns a mapping of whole huge pages to one.
    memory = mmap.mmap(-1, n_huge_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(memory) as whole, whole[:n_bytes] as view:
        fill(view)
    memory.resize(-(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return memoryview(memory)[:n_bytes]
