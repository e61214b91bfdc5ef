"""The number of threads for llama.cpp: the physical cores that this process may use."""

import os
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def physical_cores() -> int:
    try:
        processors = os.sched_getaffinity(0)
        return len({Path(_SIBLINGS.format(cpu)).read_text() for cpu in processors})
    except (AttributeError, OSError):  # not Linux, or a container that hides its topology
        return os.cpu_count() or 1
