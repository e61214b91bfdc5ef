"""Runs a native call on a thread whose stack is large enough for its recursion."""

import _thread
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_MIB = 2**20
_GLIBC_STACK_BYTES = 2 * _MIB  # of a thread if `ulimit -s` is unlimited
# A call may use a quarter of its thread's stack, 2 MiB at most: Python's and the caller's frames
# are on the same stack.
_SHARE = 4
# Larger stacks are used one at a time: a hostile text really fills its stack. Picked.
_LARGE_BYTES = 64 * _MIB
_START_SECONDS = 10  # until a thread that has not started counts as failed; picked

# `threading.stack_size` applies to the whole process.
_size_lock = threading.Lock()
_large_lock = threading.Lock()


def own_stack_bytes() -> int:
    """Return how much stack any thread of this process may use for one call."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == resource.RLIM_INFINITY:
        limit = _GLIBC_STACK_BYTES
    return min(limit, 8 * _MIB) // _SHARE


def call_with_stack(function: Callable[[], T], stack_bytes: int) -> T:
    """Return the result of `function`, which must not raise. Raise MemoryError for lack of memory.

    A reserved stack uses memory only as deep as the call recurses.
    """
    if stack_bytes <= _LARGE_BYTES:
        return _call(function, stack_bytes)
    with _large_lock:
        if stack_bytes > _available_bytes():
            raise MemoryError(f"{stack_bytes} bytes of stack are more than the free memory")
        return _call(function, stack_bytes)


def _call(function: Callable[[], T], stack_bytes: int) -> T:
    results: list[T] = []
    claim, done = threading.Lock(), threading.Lock()
    done.acquire()

    def run() -> None:
        if claim.acquire(blocking=False):
            try:
                results.append(function())
            finally:
                done.release()

    with _size_lock:
        before = threading.stack_size(-(-stack_bytes // _MIB) * _MIB)
        try:
            # Not threading.Thread: its `start` waits for ever if Python runs out of memory
            # before the thread's first line.
            _thread.start_new_thread(run, ())
        except RuntimeError as error:  # "can't start new thread": no address space for the stack
            raise MemoryError(str(error)) from error
        finally:
            threading.stack_size(before)
    if not done.acquire(timeout=_START_SECONDS):
        if claim.acquire(blocking=False):  # now the thread cannot start the call any more
            raise MemoryError("the thread did not start")
        done.acquire()
    if not results:
        raise MemoryError("the thread ran out of memory")
    return results[0]


def _available_bytes() -> int:
    """Return the memory left to this machine or container; without Linux, no limit."""
    available = 2**63
    meminfo = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        available = meminfo["MemAvailable:"] * 1024
    group = _control_group()
    try:
        limit = int((group / "memory.max").read_text("ascii"))
        used = int((group / "memory.current").read_text("ascii"))
    except (OSError, ValueError):
        return available
    # The kernel drops pages of files, such as mapped weights, when memory is short.
    return min(available, limit - used + _numbers(group / "memory.stat").get("file", 0))


def _control_group() -> Path:
    """Return the cgroup (v2) of this process, which systemd or a container runtime limits."""
    root = Path("/sys/fs/cgroup")
    try:
        own = root / Path("/proc/self/cgroup").read_text("ascii").partition("::/")[2].strip()
    except OSError:
        return root
    return own if (own / "memory.max").exists() else root


def _numbers(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value, *_ in map(str.split, lines)}
