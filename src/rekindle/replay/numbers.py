"""Numbers of a report: percentiles, and how counts and decimals are written."""

from collections.abc import Sequence
from math import ceil

NOTHING = "-"  # shown where a number is unknown


def percentile(values: Sequence[float], share: int) -> float | None:
    """Return the smallest value that `share` percent of the values do not exceed."""
    return sorted(values)[max(ceil(len(values) * share / 100), 1) - 1] if values else None


def count_text(value: float | None) -> str:
    return decimal_text(value, 0)


def decimal_text(value: float | None, n_digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{n_digits}f}"
