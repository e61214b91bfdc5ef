"""The parts of a grammar, as a tree of values."""

from collections.abc import Iterator
from dataclasses import dataclass

LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters

Range = tuple[int, int]  # the first and the last code point


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: tuple[Range, ...]  # ascending, with gaps between them


@dataclass(frozen=True, slots=True)
class Ref:
    name: str  # of a rule


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alt:
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: "Node"
    least: int
    most: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A regular expression that is read as a whole. Its node has no references."""

    node: "Node"


Node = Chars | Ref | Seq | Alt | Repeat | Lexeme
EMPTY = Seq(())


def chars_of(ranges: list[Range], *, is_negated: bool = False) -> Chars:
    """Return the set of these ranges, or of all other characters."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    if is_negated:
        ends = [-1, *(last for _, last in merged)]
        starts = [*(first for first, _ in merged), LAST_CHARACTER + 1]
        merged = [(end + 1, start - 1) for end, start in zip(ends, starts, strict=True)]
    return Chars(tuple(_without_surrogates(merged)))


def _without_surrogates(ranges: list[Range]) -> Iterator[Range]:
    low, high = SURROGATES
    for first, last in ranges:
        for start, stop in ((first, min(last, low - 1)), (max(first, high + 1), last)):
            if start <= stop:
                yield start, stop


def inner(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq(items) | Alt(items):
            return items
        case Repeat(item):
            return (item,)
    return ()


class TooComplex(ValueError):
    """Reading the grammar would take too long."""


class Work:
    """Counts steps, and ends what takes too many."""

    def __init__(self, n_most: int) -> None:
        self._n_left = n_most

    def spend(self, n_steps: int = 1) -> None:
        self._n_left -= n_steps
        if self._n_left < 0:
            raise TooComplex("it is too complex: use fewer rules, repetitions or alternatives.")


def refs(node: Node) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Ref):
            yield each.name
        waiting += inner(each)
