"""What stands around calls: the opening, each call, the separator, the closing."""

from dataclasses import dataclass, replace
from itertools import pairwise

from rekindle.chat.conversation import Reasoning, Text
from rekindle.chat.dialects.call_format import CallFormat, Members, Slot
from rekindle.chat.dialects.derive.arguments import (
    CannotDerive,
    DerivedMembers,
    derive_members,
    json_region,
    n_indent,
)
from rekindle.chat.dialects.derive.locate import (
    Located,
    before_call,
    behind,
    end_of_turn,
    located,
    text_tail,
    without_end,
)
from rekindle.chat.dialects.derive.pieces import (
    Atom,
    Atoms,
    FoundSlot,
    atoms,
    common_end,
    joined,
    literal,
    n_common_start,
    split_between,
    without_leading_space,
    without_trailing_space,
)
from rekindle.chat.dialects.derive.probes import OTHER_PAIR, PAIR, TEXT, THOUGHT, Probes, call

_SHORT_ID = "[a-zA-Z0-9]{9}"


@dataclass(frozen=True, slots=True)
class Calls:
    format: CallFormat
    lead: Atoms  # what stands before the name of the first call
    end: Atoms  # what ends the turn behind them
    members: DerivedMembers | None
    is_parallel: bool  # the template writes several calls in one turn


@dataclass(frozen=True, slots=True)
class _Frame:
    """The atoms of a turn with calls."""

    opening: Atoms
    call: Atoms
    separator: Atoms = ()
    closing: Atoms = ()
    first_index: int = 0


def derive_calls(probes: Probes) -> Calls:
    """Return how the template writes calls. Raises CannotDerive."""
    one = probes.turn(call(PAIR))
    if one is None:
        raise CannotDerive("it does not write the name of a call, or refuses the call")
    region = json_region(one.text, PAIR)
    members = None if region else derive_members(probes)
    single = located(one, (PAIR,), members)
    lead = _lead(probes, members, single)
    two = probes.turn(call(PAIR), call(OTHER_PAIR, 1))
    if two is None:
        frame = _Frame((), (*lead, *single.cores[0], *without_end(single, probes)))
    else:
        frame = _frame(probes, lead, located(two, (PAIR, OTHER_PAIR), members))
    parts = tuple(part for part in joined(frame.call) if isinstance(part, str | Slot))
    written = members.members if members else None
    if written is not None:
        parts, written = _with_brackets(parts, written)
        parts, written = _with_space_inside(probes, parts, written)
    _check_slots(parts)
    form = CallFormat(
        opening=literal(frame.opening),
        call=parts,
        separator=literal(frame.separator),
        closing=literal(without_trailing_space(frame.closing)),
        members=written,
        first_index=frame.first_index,
        indent=n_indent(one.text[slice(*region)]) if region else 0,
        at_start=bool(lead) and _is_json(lead),
    )
    if probes.needs_short_ids:
        form = replace(form, id_pattern=_SHORT_ID)
    end = () if single.is_cut else without_leading_space(end_of_turn(probes, single.after))
    return Calls(form, lead, end, members, is_parallel=two is not None)


def _frame(probes: Probes, lead: Atoms, turn: Located) -> _Frame:
    """Tell apart what stands once and what stands at each of two calls."""
    between, after = turn.between[0], without_end(turn, probes)
    suffix = between[: split_between(lead, between, after, (*between, None)[0])]
    rest = between[len(suffix) :]
    core, index_in_core = _counted(*turn.cores)
    prefix, index_before = _counted_end(lead, rest)
    n_space = len(prefix) - len(without_leading_space(prefix))
    prefix = prefix[n_space:]
    opening = lead[: len(lead) - len(prefix)]
    return _Frame(
        opening=opening,
        call=(*prefix, *core, *suffix),
        separator=rest[: len(rest) - len(prefix)],
        # Without an opening, what follows the last call ends the turn.
        closing=after[len(suffix) :] if without_trailing_space(opening) else (),
        first_index=index_in_core or index_before or 0,
    )


def _check_slots(parts: tuple[str | Slot, ...]) -> None:
    """Raise CannotDerive unless the name and the arguments can be told from their neighbours."""
    if parts.count(Slot.ARGUMENTS) != 1 or Slot.NAME not in parts:
        raise CannotDerive("it does not write the name and the arguments of a call once")
    for a, b in pairwise(parts):
        if isinstance(a, Slot) and isinstance(b, Slot) and Slot.ARGUMENTS not in (a, b):
            raise CannotDerive("nothing stands between the name of a call and its number or id")


def _with_brackets(
    parts: tuple[str | Slot, ...], members: Members
) -> tuple[tuple[str | Slot, ...], Members]:
    """Move brackets around the members to the members."""
    at = parts.index(Slot.ARGUMENTS)
    before, after = (*parts, "")[at - 1], (*parts, "")[at + 1]
    if isinstance(before, str) and isinstance(after, str):
        for pair in ("()", "{}", "[]"):
            if before.endswith(pair[0]) and after.startswith(pair[1]):
                members = replace(members, opening=pair[0], closing=pair[1])
                moved = (*parts[: at - 1], before[:-1], Slot.ARGUMENTS, after[1:], *parts[at + 2 :])
                return tuple(part for part in moved if part), members
    return parts, members


def _with_space_inside(
    probes: Probes, parts: tuple[str | Slot, ...], members: Members
) -> tuple[tuple[str | Slot, ...], Members]:
    """Move white space behind the members to each member, where a call without any lacks it."""
    at = parts.index(Slot.ARGUMENTS)
    after, last = (*parts, "")[at + 1], members.member[-1]
    space = members.separator
    empty = probes.turn(call({}))
    if empty is None or not space.isspace() or not isinstance(last, str):
        return parts, members
    if not isinstance(after, str) or not after.startswith(space):
        return parts, members
    before = parts[at - 1]
    if isinstance(before, str) and before + after in empty.text:
        return parts, members
    moved = (*parts[: at + 1], after[len(space) :], *parts[at + 2 :])
    inside = replace(members, member=(*members.member[:-1], last + space), separator="")
    return tuple(part for part in moved if part), inside


def _is_json(lead: Atoms) -> bool:
    """Return whether any JSON could begin like this."""
    text = "".join(atom for atom in lead if isinstance(atom, str))
    outside = text.split('"')[::2]
    return all(character in "[]{}:, \n\t" for piece in outside for character in piece)


def _lead(probes: Probes, members: DerivedMembers | None, single: Located) -> Atoms:
    """Return the literal text before the first name that is the same in every turn."""
    candidates = []
    header = atoms(probes.generation_prompt)
    n_header = n_common_start(header, single.before)
    text_turn = probes.turn(Text(TEXT))
    n_text = n_common_start(header, atoms(text_turn.text)) if text_turn else 0
    if n_header >= n_text:
        candidates.append(single.before[n_header:])
    for part in (Text(TEXT), Reasoning(THOUGHT)):
        found = behind(before_call(probes, part, members), part.text)
        if found is not None:
            candidates.append(found)
    if not candidates:
        candidates.append(single.before[n_header:])
    lead = candidates[0]
    for other in candidates[1:]:
        lead = common_end(lead, other)
    return without_leading_space(_without_text_end(probes, lead))


def _without_text_end(probes: Probes, lead: Atoms) -> Atoms:
    """Drop what ends a text, where the template writes an empty text before calls."""
    own, _ = text_tail(probes)
    text_end = own[: len(own) - len(end_of_turn(probes, own))]
    return lead[len(text_end) :] if text_end and lead[: len(text_end)] == text_end else lead


def _counted(first: Atoms, second: Atoms) -> tuple[Atoms, int | None]:
    """Return the call with a slot for the number that differs by one."""
    if len(first) != len(second):
        raise CannotDerive("it writes two calls of a turn in different ways")
    index = None
    found: list[Atom] = []
    for a, b in zip(first, second, strict=True):
        if a == b:
            found.append(a)
        elif _follows(a, b):
            index = int(str(a))
            found.append(FoundSlot(Slot.INDEX))
        else:
            raise CannotDerive("it writes two calls of a turn in different ways")
    return tuple(found), index


def _counted_end(lead: Atoms, rest: Atoms) -> tuple[Atoms, int | None]:
    """Return the common end, with a slot for a number that differs by one."""
    index = None
    found: list[Atom] = []
    for a, b in zip(lead[::-1], rest[::-1], strict=False):
        if a == b:
            found.append(a)
        elif _follows(a, b):
            index = int(str(a))
            found.append(FoundSlot(Slot.INDEX))
        else:
            break
    return tuple(found[::-1]), index


def _follows(a: Atom, b: Atom) -> bool:
    if not (isinstance(a, str) and isinstance(b, str)):
        return False
    return a.isdecimal() and b.isdecimal() and int(b) == int(a) + 1
