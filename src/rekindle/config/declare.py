"""How a setting is declared: its default, its limits and its help."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType, TypeVar, cast

Bytes = NewType("Bytes", int)
T = TypeVar("T")

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Metadata of a settings field: its help and its limits."""

    help: str
    minimum: float = 0
    maximum: float = INT32_MAX
    metavar: str | None = None  # of the flag; None: by the type
    secret: bool = False
    off_flag: str | None = None  # a switch that sets the value to 0
    words: Mapping[str, object] = field(default_factory=dict)  # texts that stand for a value
    may_be_blank: bool = False  # of a list: white space is a value
    splits: bool = False  # of a list: commas separate several values of one flag
    unit: int = 1  # bytes that a plain number counts, of a size
    per_model: bool = True  # of sections that models have: `[models."name"]` may replace it


def setting(default: T, help: str, **limits: Any) -> T:
    """Declare one setting. The result has the type of the default, which mypy checks."""
    made: Any = field(default=default, metadata={"about": About(help=help, **limits)})
    return cast(T, made)
