"""A page of memory that outlives the engine process: what the engine was doing when it died.

The engine process writes, the server reads. Writing takes about a microsecond and no lock: the
server reads while the engine is dead, or compares counters.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

PAGE_BYTES = 4096
N_PREPARERS = 4  # threads that compile grammars or make samplers
_COUNTERS = struct.Struct(f"<QQ{N_PREPARERS}Q")  # heartbeats, steps, what each preparer is at
_DOING = struct.Struct("<BBH")  # is busy, activity, count of numbers
_NUMBER_BYTES = 8
_DOING_AT = _COUNTERS.size
_NUMBERS_AT = _DOING_AT + _DOING.size + 4
MAX_NUMBERS = (PAGE_BYTES - _NUMBERS_AT) // _NUMBER_BYTES


class Activity(IntEnum):
    STARTING = 0
    IDLE = 1
    DECODE = 2  # computing and sampling a batch
    RESTORE = 3  # importing stored rows
    EMBED = 4
    ADMIT = 5  # looking up a prompt, giving it a slot
    ANSWER = 6  # a question
    OTHER = 7  # such as exports


class LastActivity(NamedTuple):
    activity: Activity
    numbers: tuple[int, ...]  # of the requests that were concerned
    preparing: tuple[int, ...]  # numbers whose grammars or samplers were prepared
    n_steps: int


class Pulse(NamedTuple):
    n_heartbeats: int
    n_steps: int
    is_busy: bool  # with work that steps should advance


class ActivityPage:
    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._n_heartbeats = 0
        self._n_steps = 0

    def beat(self) -> None:
        """Tell that the process runs, whatever its engine does."""
        self._n_heartbeats += 1
        struct.pack_into("<Q", self._map, 0, self._n_heartbeats)

    def begin_step(self) -> None:
        self._n_steps += 1
        struct.pack_into("<Q", self._map, 8, self._n_steps)
        self._set(Activity.OTHER, 0)

    def note(self, activity: Activity, numbers: Sequence[int]) -> None:
        """Note what the engine is about to do, and for which requests."""
        numbers = numbers[:MAX_NUMBERS]
        count = len(numbers)
        struct.pack_into(f"<{count}Q", self._map, _NUMBERS_AT, *numbers)
        self._set(activity, count)

    def rest(self) -> None:
        """Note that the engine waits for an order."""
        self._set(Activity.IDLE, 0)

    def prepare(self, number: int, preparer: int) -> None:
        """Note which grammar or sampler a preparing thread is at; 0: none."""
        struct.pack_into("<Q", self._map, 16 + 8 * preparer, number)

    def _set(self, activity: Activity, count: int) -> None:
        _DOING.pack_into(self._map, _DOING_AT, activity > Activity.IDLE, activity, count)

    def pulse(self) -> Pulse:
        n_heartbeats, n_steps, *_ = _COUNTERS.unpack_from(self._map, 0)
        is_busy, _, _ = _DOING.unpack_from(self._map, _DOING_AT)
        return Pulse(n_heartbeats, n_steps, is_busy=bool(is_busy))

    def last(self) -> LastActivity:
        _, n_steps, *preparing = _COUNTERS.unpack_from(self._map, 0)
        _, activity, count = _DOING.unpack_from(self._map, _DOING_AT)
        numbers = struct.unpack_from(f"<{min(count, MAX_NUMBERS)}Q", self._map, _NUMBERS_AT)
        # A process that overwrites its own memory may have written anything here.
        known = Activity(min(activity, Activity.OTHER))
        return LastActivity(known, numbers, tuple(filter(None, preparing)), n_steps)


def new_page_file() -> int:
    """Return the descriptor of an unnamed file of one page, full of zeros."""
    if hasattr(os, "memfd_create"):  # a file on disk could be full, or busy
        descriptor = os.memfd_create("rekindle-activity")
        os.ftruncate(descriptor, PAGE_BYTES)
        return descriptor
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE_BYTES)
        return os.dup(file.fileno())
