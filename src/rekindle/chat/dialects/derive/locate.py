"""Finds calls, text and the end of a turn in what a template rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from rekindle.chat.conversation import Reasoning, Text
from rekindle.chat.dialects.call_format import Slot
from rekindle.chat.dialects.derive.arguments import (
    CannotDerive,
    DerivedMembers,
    json_region,
    members_span,
    places,
)
from rekindle.chat.dialects.derive.pieces import (
    Atoms,
    FoundSlot,
    atoms,
    common_end,
    find,
    is_mark,
    n_common_start,
    unnumbered,
    without_leading_space,
    without_trailing_space,
)
from rekindle.chat.dialects.derive.probes import IDS, NAMES, PAIR, TEXT, Probes, Turn, call

_ARGUMENTS = ("Zqargumentsx", "Zqargumentsy")


@dataclass(frozen=True, slots=True)
class Located:
    """A turn with calls, cut at the calls."""

    before: Atoms
    cores: tuple[Atoms, ...]  # from the first to the last slot of each call
    between: tuple[Atoms, ...]
    after: Atoms
    is_cut: bool


def located(
    turn: Turn, arguments: Sequence[Mapping[str, Any]], members: DerivedMembers | None
) -> Located:
    """Cut the turn at its calls, with the arguments as one slot each."""
    text = turn.text
    words: dict[str, FoundSlot] = {}
    for n, each in enumerate(arguments):
        words[NAMES[n]] = FoundSlot(Slot.NAME, n)
        words[IDS[n]] = FoundSlot(Slot.ID, n)
        if members is not None:
            words |= places(each, first=10 * n)
        elif region := json_region(text, each):
            text = text[: region[0]] + _ARGUMENTS[n] + text[region[1] :]
            words[_ARGUMENTS[n]] = FoundSlot(Slot.ARGUMENTS, n)
        else:
            raise CannotDerive("the arguments of a second call are written differently")
    found = atoms(text, words)
    if members is not None:
        for n, each in enumerate(arguments):
            items = range(10 * n, 10 * n + len(each))
            start, end = members_span(found, members, items)
            found = (*found[:start], FoundSlot(Slot.ARGUMENTS, n), *found[end:])
    spans = []
    for n in range(len(arguments)):
        at = [i for i, atom in enumerate(found) if isinstance(atom, FoundSlot) and atom.n == n]
        spans.append((at[0], at[-1] + 1))
    if any(a[1] > b[0] for a, b in pairwise(spans)):
        raise CannotDerive("it mixes the calls of a turn")
    return Located(
        before=found[: spans[0][0]],
        cores=tuple(unnumbered(found[start:end]) for start, end in spans),
        between=tuple(found[a[1] : b[0]] for a, b in pairwise(spans)),
        after=found[spans[-1][1] :],
        is_cut=turn.is_cut,
    )


def before_call(probes: Probes, part: Text | Reasoning, members: DerivedMembers | None) -> Atoms:
    """Return a turn of this part and a call, up to the call's first slot."""
    turn = probes.turn(part, call(PAIR))
    return located(turn, (PAIR,), members).before if turn is not None else ()


def n_header_atoms(probes: Probes, found: Atoms) -> int:
    """Return how many atoms of a turn belong to the prompt before the reply."""
    prompt = atoms(probes.generation_prompt)
    n_header = n_common_start(prompt, found)
    # Other text may stand before the header in the prompt.
    for n in range(min(len(prompt) - n_header, len(found)), 0, -1):
        at = find(found[: n_header + n], prompt[len(prompt) - n :])
        if at >= 0 and at + n > n_header:
            return at + n
    return n_header


def behind(found: Atoms, word: str) -> Atoms | None:
    """Return the atoms behind the marker word."""
    return found[found.index(word) + 1 :] if word in found else None


def text_tail(probes: Probes) -> tuple[Atoms, Atoms]:
    """Return what stands behind the text of a turn, and up to the next words."""
    turn = probes.turn(Text(TEXT))
    if turn is None:
        return (), ()
    tail = behind(atoms(turn.text), TEXT) or ()
    return (() if turn.is_cut else tail), (*tail, *atoms(turn.later))


def end_of_turn(probes: Probes, after: Atoms) -> Atoms:
    """Return the end of `after` that ends any turn, calls or not."""
    own, tail = text_tail(probes)
    shared: Atoms = common_end(after, own)
    for n in range(len(after) - len(shared)):
        if find(tail, after[n:]) >= 0:
            shared = after[n:]
            break
    user_end = atoms(probes.generation_prompt)
    for n in range(len(shared)):
        part = shared[n:]
        if without_trailing_space(part) and user_end[: len(part)] == part:
            return part
    # The mark may end what stands before as well: `<end>calls<go>` and `<end>turn<go>`.
    return shared[1:] if shared and shared[0] in shared[1:] else shared


def without_end(turn: Located, probes: Probes) -> Atoms:
    if not turn.is_cut:
        end = end_of_turn(probes, turn.after)
        after = turn.after[: len(turn.after) - len(end)]
        return after if without_trailing_space(end) else _without_header(probes, after)
    _, tail = text_tail(probes)
    end = without_leading_space(tail)[:1]
    at = find(turn.after, end) if end else -1
    return turn.after[:at] if at >= 0 else turn.after


def _without_header(probes: Probes, after: Atoms) -> Atoms:
    """Drop the header of the next message, for templates that do not end a turn with calls."""
    header = {atom for atom in atoms(probes.generation_prompt) if is_mark(str(atom))}
    return tuple(takewhile(lambda atom: atom not in header, after))
