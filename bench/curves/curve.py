"""A curve: values by size, the exponents between them, and the bound of the last decade."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from typing import NamedTuple, Protocol, TypeVar

MIN_REPEATS = 3
MAX_REPEATS = 20
REPEAT_SECONDS = 0.1  # CPU time for the repeats of one point; picked
BEND = 0.3  # a smaller change of the exponent is noise; picked
MILLISECONDS = "ms"
BYTES = "bytes"
LINEAR = 1.2  # an exponent, with room for noise and for missed caches of the processor; picked
FLAT = 0.5  # for work that does not depend on the size, with room for missed caches; picked

T = TypeVar("T")


class CurvePoint(NamedTuple):
    size: int
    value: float


class Bend(NamedTuple):
    """The exponent changes here."""

    size: int
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    axis: str  # what grows: `entries`
    name: str
    unit: str  # MILLISECONDS or BYTES
    bound: float  # of the exponent over the last decade
    points: Sequence[CurvePoint]
    remark: str = ""  # what the bound allows for

    @property
    def exponents(self) -> list[float]:
        """Return the exponent between each two neighbours: 1 is linear, 0 is flat."""
        return [_exponent(a, b) for a, b in pairwise(self.points)]

    @property
    def last_exponent(self) -> float:
        """Return the exponent over the last decade, or over all points if they span less."""
        *before, last = self.points
        first = next((p for p in reversed(before) if p.size * 10 <= last.size), before[0])
        return _exponent(first, last)

    @property
    def is_linear(self) -> bool:
        return self.last_exponent <= LINEAR

    @property
    def is_within_bound(self) -> bool:
        return self.last_exponent <= self.bound

    @property
    def bends(self) -> list[Bend]:
        """Return where the exponent changes by more than noise does."""
        inner = self.points[1:-1]
        return [
            Bend(point.size, before, after)
            for point, (before, after) in zip(inner, pairwise(self.exponents), strict=True)
            if abs(after - before) > BEND
        ]


class Measured(NamedTuple):
    """A measure of an axis: its unit and the bound of its exponent."""

    name: str
    unit: str
    bound: float
    remark: str = ""


def curves_of(
    axis: str, measures: Sequence[Measured], values: Mapping[int, Mapping[str, float]]
) -> list[Curve]:
    """Return a curve for each measure. `values` holds them by size, then by name."""
    return [
        Curve(
            axis=axis,
            name=each.name,
            unit=each.unit,
            bound=each.bound,
            points=[CurvePoint(size, named[each.name]) for size, named in values.items()],
            remark=each.remark,
        )
        for each in measures
    ]


class Axis(Protocol):
    """A module that measures curves over one axis."""

    NAME: str
    ABOUT: str  # what the sizes count
    SIZES: tuple[int, ...]
    QUICK_SIZES: tuple[int, ...]

    def measure(self, sizes: Sequence[int]) -> list[Curve]: ...


def cpu_milliseconds(action: Callable[[], object]) -> float:
    """Return the least CPU time of several calls: other work on the machine only adds time."""
    return cpu_milliseconds_after(lambda: None, lambda _: action())


def cpu_milliseconds_after(
    prepare: Callable[[], T],
    action: Callable[[T], object],
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Return the same, with a new argument for each call; preparing it is not counted.

    `time.process_time` as the clock includes threads that the action waits for.
    """
    best, spent, n_calls = inf, 0.0, 0
    while n_calls < MIN_REPEATS or (spent < REPEAT_SECONDS and n_calls < MAX_REPEATS):
        prepared = prepare()
        began = clock()
        action(prepared)
        seconds = clock() - began
        best, spent, n_calls = min(best, seconds), spent + seconds, n_calls + 1
    return best * 1e3


def _exponent(a: CurvePoint, b: CurvePoint) -> float:
    return log(b.value / a.value) / log(b.size / a.size)
