"""Values of several measures by size, as curves."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.curves.curve import Curve, CurvePoint

MILLISECONDS = "ms"
BYTES = "bytes"


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
