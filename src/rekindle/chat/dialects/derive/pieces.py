"""Rendered text as a sequence of atoms, and what such sequences have in common.

An atom is a mark (`<...>` or `[...]` without white space), a word, or a single other character.
Literal text is compared by atoms, so that `<a>` and `<b>` share nothing. The place
of a marker word is an atom too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rekindle.chat.dialects.call_format import MemberSlot, Slot


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """Where a marker word stands."""

    slot: Slot | MemberSlot
    n: int = 0  # of the call, or of the argument


Atom = str | FoundSlot
Atoms = tuple[Atom, ...]

_ATOM = re.compile(r"<[^<>\s]{1,80}>|\[[^\[\]<>\s\"'{}:,]{2,80}\]|\w+|.", re.DOTALL)


def atoms(text: str, places: Mapping[str, FoundSlot] | None = None) -> Atoms:
    """Split the text. Each marker word of `places` becomes its place."""
    found: list[Atom] = []
    places = places or {}
    pattern = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    for piece in pieces:
        if piece in places:
            found.append(places[piece])
        else:
            found.extend(_ATOM.findall(piece))
    return tuple(found)


def n_common_start(a: Sequence[Atom], b: Sequence[Atom]) -> int:
    n = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        n += 1
    return n


def common_start(a: Atoms, b: Atoms) -> Atoms:
    return a[: n_common_start(a, b)]


def common_end(a: Atoms, b: Atoms) -> Atoms:
    n = n_common_start(a[::-1], b[::-1])
    return a[len(a) - n :]


def split_between(before: Atoms, between: Atoms, after: Atoms, first_behind: Atom | None) -> int:
    """Return where the end of one item ends in `between`, the text from it to the next item.

    Items end as `after` begins, and begin as `before` ends. Where both could claim an atom, an
    item begins with the atom that stands behind the last slot: `]<x>` and `]</x>`.
    """
    most = n_common_start(between, after)
    least = len(between) - len(common_end(before, between))
    for i in range(most - 1, max(least, 1) - 1, -1):
        if between[i] == first_behind and not is_space(between[i]):
            return i
    return len(without_trailing_space(between[:most]))


def is_space(atom: Atom) -> bool:
    return isinstance(atom, str) and atom.isspace()


def without_leading_space(found: Atoms) -> Atoms:
    n = 0
    while n < len(found) and is_space(found[n]):
        n += 1
    return found[n:]


def without_trailing_space(found: Atoms) -> Atoms:
    return without_leading_space(found[::-1])[::-1]


def unnumbered(found: Atoms) -> Atoms:
    """Return the same atoms, with places that do not tell calls apart."""
    return tuple(FoundSlot(atom.slot) if isinstance(atom, FoundSlot) else atom for atom in found)


def literal(found: Iterable[Atom]) -> str:
    """Return the text of atoms that hold no slot."""
    text = []
    for atom in found:
        if not isinstance(atom, str):
            raise ValueError("a slot stands where only literal text can be")
        text.append(atom)
    return "".join(text)


def joined(found: Iterable[Atom]) -> tuple[str | Slot | MemberSlot, ...]:
    """Join neighbouring literal atoms, and return places as their slots."""
    parts: list[str | Slot | MemberSlot] = []
    for atom in found:
        if isinstance(atom, FoundSlot):
            parts.append(atom.slot)
        elif parts and isinstance(last := parts[-1], str):
            parts[-1] = last + atom
        else:
            parts.append(atom)
    return tuple(parts)


def find(found: Atoms, part: Atoms) -> int:
    """Return the first position of `part`, or -1."""
    for i in range(len(found) - len(part) + 1):
        if found[i : i + len(part)] == part:
            return i
    return -1


def is_mark(text: str) -> bool:
    """Return whether the text is unlikely in an answer."""
    return any(len(atom) > 2 and atom[0] in "<[" for atom in _ATOM.findall(text))
