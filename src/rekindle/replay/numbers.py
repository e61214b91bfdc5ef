"""Numbers of a report: percentiles, sums with unknown parts, and their text."""

from collections.abc import Iterable, Sequence
from math import ceil

NOTHING = "-"  # shown where a number is unknown


def percentile(values: Sequence[float], share: int) -> float | None:
    """Return the smallest value that `share` percent of the values do not exceed."""
    return sorted(values)[max(ceil(len(values) * share / 100), 1) - 1] if values else None


def count_text(value: float | None) -> str:
    return decimal_text(value, 0)


def decimal_text(value: float | None, n_digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{n_digits}f}"


def sum_if_all_known(values: Iterable[int | None]) -> int | None:
    """Return the sum. None: a value is unknown, or there is none."""
    listed = list(values)
    return sum_known(listed) if None not in listed else None


def sum_known(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values. None: there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
