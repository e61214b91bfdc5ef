"""Reads and writes calls by a `CallFormat`."""

import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from rekindle.chat.dialects.arguments import ArgumentSyntax
from rekindle.chat.dialects.base import CallDraft, Dialect
from rekindle.chat.dialects.call_format import CallFormat, Slot
from rekindle.chat.dialects.grammar import write_calls
from rekindle.chat.dialects.object_calls import ObjectCall, ObjectShape, checked_id, json_object
from rekindle.chat.dialects.syntax.cursor import WORD_CHARACTER, Cursor, Mark, Steps
from rekindle.chat.dialects.syntax.json_text import NotACall
from rekindle.chat.dialects.syntax.lark import Rules, Schemas
from rekindle.chat.dialects.triggers import is_distinctive, opening_is_optional, triggers_of
from rekindle.generation.request import Trigger

_FIRST_WORD = re.compile(WORD_CHARACTER + "*")
_LAST_WORD = re.compile(WORD_CHARACTER + r"*\Z")
_TWO_TAGS = re.compile(r"(<[^<>\s]+>\s*)(<\S.*)", re.DOTALL)
_LAST_TAG = re.compile(r"(.*\S)(\s*<[^<>\s]+>)", re.DOTALL)


def formatted(name: str, call_format: CallFormat) -> Dialect:
    """Return a dialect whose calls have the format."""
    syntax = FormatSyntax(call_format)
    return Dialect(name=name, syntax=syntax, hidden_at_edges=syntax.stray_marks)


def with_section(call_format: CallFormat) -> CallFormat:
    """Return the same format; if two tags open a call, the outer one opens a section.

    Some models forget the outer tag.
    """
    first, last = call_format.call[0], call_format.call[-1]
    if call_format.opening or not isinstance(first, str) or not isinstance(last, str):
        return call_format
    opening, closing = _TWO_TAGS.fullmatch(first), _LAST_TAG.fullmatch(last)
    if not opening or not closing or not is_distinctive(closing[2]):
        return call_format
    return replace(
        call_format,
        opening=opening[1],
        call=(opening[2], *call_format.call[1:-1], closing[1]),
        separator=closing[2] + call_format.separator + opening[1],
        closing=closing[2] + call_format.closing,
    )


class FormatSyntax:
    """Calls by a format: a section of calls, or one call."""

    def __init__(self, call_format: CallFormat) -> None:
        self.format = own = with_section(call_format)
        self._opening = Mark(own.opening)
        self._needs_opening = bool(self._opening) and not opening_is_optional(own)
        self._closing = Mark(own.closing)
        closes_first = own.closing.strip() and own.separator.strip().startswith(own.closing.strip())
        self._separator = Mark("" if closes_first else own.separator)
        first = own.call[0]
        self._first = Mark(first if isinstance(first, str) else "")
        self._shape = ObjectShape.of(own)
        self._before = Mark(self._shape.before if self._shape else "")
        self._behind = Mark(self._shape.behind if self._shape else "")
        self._steps = tuple(_steps(own.call))
        self._has_id = Slot.ID in own.call
        self._arguments = ArgumentSyntax(own.members, _ends(own)) if own.members else None

    @property
    def stray_marks(self) -> tuple[str, ...]:
        """What follows a call whose opening the model forgot."""
        closing = self.format.closing.strip()
        return (closing,) if is_distinctive(closing) and not self._needs_opening else ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed strings of calls."""
        own, members = self.format, self.format.members
        texts = [own.opening, own.separator, own.closing, *own.call]
        if members is not None:
            texts += [members.opening, members.separator, members.closing]
            texts += [piece for piece in members.member if isinstance(piece, str)]
            texts += members.value.string_marks
        return tuple(text for text in texts if isinstance(text, str) and text)

    def triggers_for(self, names: Collection[str]) -> tuple[Trigger, ...]:
        """Return the strings that begin a call of these tools."""
        return triggers_of(self.format, names)

    def write(self, rules: Rules, schemas: Schemas) -> str:
        """Return Lark that matches calls from the trigger to the end of the turn."""
        return write_calls(rules, schemas, self.format)

    def walk(self, cursor: Cursor, draft: CallDraft) -> Steps[None]:
        """Read the calls at the cursor into the draft."""
        # A call behind another may begin with the separator.
        opening = yield from cursor.accept(self._opening, self._separator)
        is_open = opening is self._opening
        if self._needs_opening and not is_open:
            raise NotACall("no opening")
        while True:
            yield from self._call(cursor, draft)
            draft.end()
            if not self._closing or not is_open:
                return
            mark = yield from cursor.accept(self._closing, self._separator)
            if mark is self._closing:
                return
            if mark is None and not (yield from self._goes_on(cursor)):
                cursor.take_cut(self._closing)  # its last mark may end the turn
                return

    def _goes_on(self, cursor: Cursor) -> Steps[bool]:
        """Return whether another call follows without a separator."""
        if self._separator:
            return False
        return not self._first or (yield from cursor.sees(self._first)) is not None

    def _call(self, cursor: Cursor, draft: CallDraft) -> Steps[None]:
        if self._shape is None:
            yield from self._pieces(cursor, draft)
            return
        if self._before:
            yield from cursor.expect(self._before)
        yield from ObjectCall(self._shape, self.format.id_pattern, cursor, draft).read()
        if self._behind:
            yield from cursor.expect(self._behind)

    def _pieces(self, cursor: Cursor, draft: CallDraft) -> Steps[None]:
        found: dict[str, str] = {}
        held: list[str] = []  # arguments that came before the name or the id
        for step in self._steps:
            if isinstance(step, Mark):
                yield from cursor.expect(step)
            elif isinstance(step, Slot):
                if "name" in found and ("id" in found or not self._has_id):
                    self._begin(found, draft)
                sink = draft.write if draft.has_begun else held.append
                if self._arguments is None:
                    yield from json_object(cursor, sink)
                else:
                    schema = draft.schemas.get(found.get("name", ""), {})
                    yield from self._arguments.read(cursor, schema, sink)
            else:
                match = step.fullmatch((yield from cursor.word()))
                if match is None:
                    raise NotACall("no such word")
                found |= match.groupdict()
        if not draft.has_begun:
            self._begin(found, draft)
            draft.write("".join(held))

    def _begin(self, found: dict[str, str], draft: CallDraft) -> None:
        draft.begin(found["name"], checked_id(found.get("id", ""), self.format.id_pattern))


def _ends(call_format: CallFormat) -> tuple[str, ...]:
    """Return the texts that may follow the arguments."""
    for piece in call_format.call[call_format.call.index(Slot.ARGUMENTS) + 1 :]:
        if isinstance(piece, str) and piece.strip():
            return (piece,)
    return call_format.closing, call_format.separator


def _steps(call: tuple[str | Slot, ...]) -> Iterator[Mark | re.Pattern[str] | Slot]:
    """Yield what is read one after the other: marks, words with slots in them, arguments.

    Text that touches a name or a number belongs to its word, because no character separates them.
    """
    word: list[str | Slot] = []
    for i, piece in enumerate(call):
        if isinstance(piece, Slot):
            if piece is Slot.ARGUMENTS:
                yield piece
            else:
                word.append(piece)
                if i + 1 == len(call) or call[i + 1] is Slot.ARGUMENTS:
                    yield _word_pattern(word)
                    word = []
            continue
        behind = _matched(_FIRST_WORD.match(piece)) if word else ""
        if word:
            word.append(behind)
            if behind == piece and behind and i + 1 < len(call):
                continue
            yield _word_pattern(word)
            word = []
        text = piece[len(behind) :]
        if i + 1 < len(call) and call[i + 1] is not Slot.ARGUMENTS:
            before = _matched(_LAST_WORD.search(text))
            word = [before]
            text = text[: len(text) - len(before)]
        if text.strip():
            yield Mark(text)


def _matched(match: re.Match[str] | None) -> str:
    return match[0] if match else ""


def _word_pattern(word: list[str | Slot]) -> re.Pattern[str]:
    """Return a pattern of a word. Fixed text at its ends may be missing: models forget it."""
    slots = {Slot.NAME: "(?P<name>.+?)", Slot.ID: "(?P<id>.+?)", Slot.INDEX: r"\d+"}
    word = [piece for piece in word if piece]
    pattern = ""
    for i, piece in enumerate(word):
        if isinstance(piece, Slot):
            pattern += slots[piece]
        elif word[i + 1 :] == [Slot.INDEX]:
            return re.compile(rf"{pattern}(?:{re.escape(piece)}\d+)?")
        elif 0 < i < len(word) - 1:
            pattern += re.escape(piece)
        else:
            pattern += f"(?:{re.escape(piece)})?"
    return re.compile(pattern)
