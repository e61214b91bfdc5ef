"""The common prefix of two texts or of two encoded token sequences."""

from typing import AnyStr


def n_common(a: AnyStr, b: AnyStr) -> int:
    """Return the length of the common prefix. Halving compares long equal parts at once."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if b.startswith(a[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
