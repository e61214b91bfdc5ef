"""How arguments are written: as one JSON object, or one by one.

The text of single members is found by comparing calls with strings and calls with numbers.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rekindle.chat.dialects.call_format import (
    Members,
    MemberSlot,
    Nested,
    Slot,
    Strings,
    ValueForm,
)
from rekindle.chat.dialects.derive.pieces import (
    Atoms,
    FoundSlot,
    atoms,
    common_end,
    joined,
    literal,
    n_common_start,
    split_between,
    unnumbered,
    without_leading_space,
)
from rekindle.chat.dialects.derive.probes import (
    AWKWARD,
    GALLERY,
    KINDS,
    NAMES,
    NUMBERS,
    PAIR,
    Probes,
    Turn,
    call,
)


class CannotDerive(Exception):
    """The template's calls cannot be described. The message is for the operator."""


@dataclass(frozen=True, slots=True)
class DerivedMembers:
    members: Members
    n_before: int  # atoms of a member before its first slot
    n_after: int  # and behind its last one, for strings


@dataclass(frozen=True, slots=True)
class Frame:
    """The atoms around each member."""

    before: Atoms  # the key
    between: Atoms  # key and value
    after: Atoms  # the last slot of a member
    separator: Atoms
    core: Atoms  # from the key to the last slot


def json_region(text: str, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return where the arguments stand as a JSON object."""
    end = text.find(next(iter(arguments), ""))
    decoder = json.JSONDecoder()
    start = text.rfind("{", 0, end) if arguments else text.find("{")
    while start >= 0:
        try:
            value, stop = decoder.raw_decode(text, start)
        except ValueError:
            value, stop = None, 0
        if value == arguments:
            return start, stop
        start = text.rfind("{", 0, start) if arguments else text.find("{", start + 1)
    return None


def n_indent(text: str) -> int:
    """Return by how much JSON is indented per level; 0 if it is on one line."""
    lines = text.splitlines()
    if len(lines) < 3:
        return 0
    first, last = (len(line) - len(line.lstrip()) for line in (lines[1], lines[-1]))
    return max(0, first - last)


def derive_members(probes: Probes) -> DerivedMembers:
    """Return how members are written, where the arguments are no JSON."""
    if '\\"Zqkeya\\"' in _turn_of(probes, PAIR).text:
        raise CannotDerive("it writes the arguments as JSON inside a string")
    strings = _frame(_turn_of(probes, PAIR), PAIR)
    numbers = _frame(_turn_of(probes, NUMBERS), NUMBERS)
    shared = n_common_start(strings.between, numbers.between)
    rest_s, rest_n = strings.between[shared:], numbers.between[shared:]
    behind = common_end(rest_s, rest_n)
    type_s, type_n = (rest[: len(rest) - len(behind)] for rest in (rest_s, rest_n))
    closing = numbers.after
    if strings.after[len(strings.after) - len(closing) :] != closing:
        raise CannotDerive("it ends strings and numbers in different ways")
    marks = ("", literal(strings.after[: len(strings.after) - len(closing)]))
    key, value = FoundSlot(MemberSlot.KEY), FoundSlot(MemberSlot.VALUE)
    tail = tuple(
        key if isinstance(atom, FoundSlot) else atom
        for atom in numbers.core[_value_at(numbers) + 1 :]
    )
    if type_s and type_n:
        between: Atoms = (*strings.between[:shared], FoundSlot(MemberSlot.TYPE), *behind)
    elif type_n or (type_s and behind):
        raise CannotDerive("what it writes between key and value depends on the value")
    else:
        between = numbers.between
        marks = (literal(type_s), marks[1])
    member = joined((*numbers.before, key, *between, value, *tail, *closing))
    members = Members(
        member=tuple(part for part in member if not isinstance(part, Slot)),
        separator=literal(numbers.separator),
        sorted_keys=_comes_first(_turn_of(probes, PAIR).text, "Zqkeya", "Zqkeyb"),
    )
    members = _with_values(members, _turn_of(probes, GALLERY).text, marks)
    return DerivedMembers(members, len(strings.before), len(strings.after))


def members_span(found: Atoms, derived: DerivedMembers, items: Iterable[int]) -> tuple[int, int]:
    """Return where these members begin and end."""
    wanted = set(items)
    at = [
        i
        for i, atom in enumerate(found)
        if isinstance(atom, FoundSlot) and isinstance(atom.slot, MemberSlot) and atom.n in wanted
    ]
    if not at:
        raise CannotDerive("it does not write the arguments of every call")
    return at[0] - derived.n_before, at[-1] + 1 + derived.n_after


def places(arguments: Mapping[str, Any], first: int = 0) -> dict[str, FoundSlot]:
    """Return the places of the marker words, the members numbered from `first`."""
    found = {}
    for n, (key, value) in enumerate(arguments.items(), start=first):
        found[key] = FoundSlot(MemberSlot.KEY, n)
        found[str(value)] = FoundSlot(MemberSlot.VALUE, n)
    return found


def _turn_of(probes: Probes, arguments: Mapping[str, Any]) -> Turn:
    turn = probes.turn(call(arguments))
    if turn is None:
        raise CannotDerive("it refuses a call with several arguments")
    return turn


def _comes_first(text: str, a: str, b: str) -> bool:
    return text.find(a) < text.find(b)


def _frame(turn: Turn, arguments: Mapping[str, Any]) -> Frame:
    """Find the literal text around two members."""
    found = atoms(turn.text, {**places(arguments), NAMES[0]: FoundSlot(Slot.NAME)})
    at = [i for i, atom in enumerate(found) if isinstance(atom, FoundSlot)]
    members = [i for i in at if isinstance(_place(found, i).slot, MemberSlot)]
    if not any(_is_value(found, i) for i in members):
        raise CannotDerive("it does not write the arguments of a call")
    order = list(dict.fromkeys(_place(found, i).n for i in members))
    spans = [[i for i in members if _place(found, i).n == n] for n in order]
    if len(order) != 2 or spans[0][-1] > spans[1][0]:
        raise CannotDerive("it mixes the arguments of a call")
    cores = [found[span[0] : span[-1] + 1] for span in spans]
    if unnumbered(cores[0]) != unnumbered(cores[1]):
        raise CannotDerive("it writes two arguments in different ways")
    start = max((i + 1 for i in at if i < members[0]), default=0)
    before, between = found[start : members[0]], found[spans[0][-1] + 1 : spans[1][0]]
    behind_value = found[next(i for i in spans[0][::-1] if _is_value(found, i)) + 1]
    after = between[: split_between(before, between, found[members[-1] + 1 :], behind_value)]
    rest = between[len(after) :]
    prefix = without_leading_space(common_end(before, rest))
    core = unnumbered(cores[0])
    frame = Frame(prefix, (), after, rest[: len(rest) - len(prefix)], core)
    if core[0] != FoundSlot(MemberSlot.KEY):
        raise CannotDerive("it writes values before their keys")
    return replace(frame, between=core[1 : _value_at(frame)])


def _is_value(found: Atoms, i: int) -> bool:
    return _place(found, i).slot is MemberSlot.VALUE


def _value_at(frame: Frame) -> int:
    try:
        return frame.core.index(FoundSlot(MemberSlot.VALUE))
    except ValueError:
        raise CannotDerive("it does not write the values of arguments") from None


def _place(found: Atoms, i: int) -> FoundSlot:
    place = found[i]
    assert isinstance(place, FoundSlot)
    return place


# How each type is written.


def _with_values(members: Members, text: str, marks: tuple[str, str]) -> Members:
    written = _written(members, text)
    by_kind = {kind: written.get(key) for kind, key in zip(KINDS, GALLERY, strict=True)}
    texts = {kind: each[1] for kind, each in by_kind.items() if each is not None}
    form = ValueForm(string_marks=marks, strings=_strings(texts, marks))
    if form.strings is Strings.RAW and marks == ("", ""):
        form = replace(form, string_marks=_optional_marks(texts))
    if form.strings in (Strings.JSON, Strings.PYTHON):
        form = replace(form, string_marks=("", ""))
    constants: dict[object, str] = {
        value: texts[kind]
        for kind, value in (("true", True), ("false", False), ("null", None))
        if kind in texts
    }
    form = replace(form, constants=constants, nested=_nested(texts))
    if form.nested is Nested.TAGS:
        form = replace(form, element_key=_element_key(members, texts["an array"]))
    names = {_json_type(KINDS[kind]): each[0] for kind, each in by_kind.items() if each is not None}
    has_types = MemberSlot.TYPE in members.member
    _check_ends(members.member, form)
    return replace(members, value=form, type_names=names if has_types else {})


def _check_ends(member: tuple[str | MemberSlot, ...], form: ValueForm) -> None:
    """Raise CannotDerive unless text ends each key, and each value that has no end of its own."""
    behind = [(*member, "")[member.index(slot) + 1] for slot in (MemberSlot.KEY, MemberSlot.VALUE)]
    is_open = form.strings is Strings.RAW or form.nested is Nested.TAGS
    for i, text in enumerate(behind):
        if (i == 0 or is_open) and not (isinstance(text, str) and text.strip()):
            raise CannotDerive("nothing tells where a key or a value ends")
    if form.strings is Strings.MARKED and not all(form.string_marks):
        raise CannotDerive("nothing tells where a string ends")


def _written(members: Members, text: str) -> dict[str, tuple[str, str]]:
    """Return the type and the text of each value in the gallery."""
    keys = [key for key in GALLERY if key in text]
    found = {}
    position = 0
    for key, next_key in zip(keys, [*keys[1:], ""], strict=True):
        pattern = _pattern(members.member, key)
        if next_key:
            pattern += re.escape(members.separator) + _pattern(members.member, next_key, until=1)
        if match := re.compile(pattern, re.DOTALL).search(text, position):
            kind = match.groupdict().get("type", "")
            found[key] = (kind, match["value"])
            position = match.end("value")
    return found


def _pattern(member: tuple[str | MemberSlot, ...], key: str, until: int | None = None) -> str:
    """Return a pattern of the member, or of its beginning up to the key."""
    if until is not None:
        until = member.index(MemberSlot.KEY) + 1
    parts = {
        MemberSlot.KEY: re.escape(key),
        MemberSlot.VALUE: "(?P<value>.*?)",
        MemberSlot.TYPE: r"(?P<type>\w*)",
    }
    return "".join(
        re.escape(part) if isinstance(part, str) else parts[part] for part in member[:until]
    )


def _strings(texts: Mapping[str, str], marks: tuple[str, str]) -> Strings:
    text = texts.get("a string with quotes, line breaks and markup", "")
    if _reads(json.loads, text, AWKWARD):
        return Strings.JSON
    if _reads(ast.literal_eval, text, AWKWARD):
        return Strings.PYTHON
    if marks in (("'", "'"), ('"', '"')):
        return Strings.PYTHON if marks[0] == "'" else Strings.JSON
    if marks != ("", ""):
        return Strings.MARKED
    if AWKWARD.strip() in text:
        return Strings.RAW
    raise CannotDerive("its strings cannot be told from how they are written")


def _optional_marks(texts: Mapping[str, str]) -> tuple[str, str]:
    """Return what stands around awkward strings only."""
    text = texts["a string with quotes, line breaks and markup"]
    before, _, after = text.partition(AWKWARD)
    return before.strip(), after.strip()


def _nested(texts: Mapping[str, str]) -> Nested:
    kinds = ("an array of several types", "an object", "an array in an object")
    pairs = [(texts.get(kind, ""), KINDS[kind]) for kind in kinds]
    if all(_reads(json.loads, text, value) for text, value in pairs):
        return Nested.JSON
    if all(
        _reads(ast.literal_eval, text, value) or _reads(json.loads, text, value)
        for text, value in pairs
    ):
        return Nested.PYTHON
    if all(text[:1] in ("[", "{") for text, _ in pairs):
        return Nested.BARE
    return Nested.TAGS


def _element_key(members: Members, text: str) -> str:
    pattern = "".join(
        {MemberSlot.KEY: r"(?P<key>[\w.-]+?)", MemberSlot.VALUE: "70141"}.get(part, r"\w*")
        if isinstance(part, MemberSlot)
        else re.escape(part)
        for part in members.member[: members.member.index(MemberSlot.VALUE) + 1]
    )
    if match := re.match(pattern, text):
        return match["key"]
    raise CannotDerive("arrays cannot be told from how they are written")


def _reads(read: Callable[[str], Any], text: str, value: Any) -> bool:
    try:
        return bool(read(text) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _json_type(value: Any) -> str:
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return "null" if value is None else names.get(type(value), "object")
