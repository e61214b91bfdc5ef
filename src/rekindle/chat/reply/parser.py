"""Splits a streaming reply into text, reasoning and calls.

The parser holds back the possible beginning of a mark. Only marks and the white space around them
are dropped. Text that looks like a call but is none stays text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from rekindle.chat.conversation import ToolCall
from rekindle.chat.dialects.base import CallEnded, CallPart, Dialect, ParsedCall
from rekindle.chat.dialects.syntax.json_text import CutOff, NotACall
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.reply.call_stretch import CallStretch
from rekindle.chat.reply.stop_strings import overlap


@dataclass(frozen=True, slots=True)
class ParsedText:
    text: str


@dataclass(frozen=True, slots=True)
class ParsedReasoning:
    text: str


Part = ParsedText | ParsedReasoning | CallPart


@dataclass(frozen=True, slots=True)
class ParsedReply:
    reasoning: str
    text: str
    calls: tuple[ParsedCall, ...]

    def tool_calls(self, call_ids: Sequence[str]) -> Iterator[ToolCall]:
        """Yield the calls with the ids that the client knows them by."""
        for call_id, call in zip(call_ids, self.calls, strict=True):
            yield ToolCall(call_id, call.name, call.arguments_json)


def parse(
    dialect: Dialect, schemas: Schemas | None, text: str, *, begins_in_reasoning: bool
) -> ParsedReply:
    """Parse a whole reply. `schemas` as for `ReplyParser`."""
    parser = ReplyParser(dialect, schemas, begins_in_reasoning=begins_in_reasoning)
    parts = parser.feed(text) + parser.finish()
    return ParsedReply(
        reasoning="".join(part.text for part in parts if isinstance(part, ParsedReasoning)),
        text="".join(part.text for part in parts if isinstance(part, ParsedText)),
        calls=tuple(part.call for part in parts if isinstance(part, CallEnded)),
    )


class _Mode(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class _MarkKind(Enum):
    OPENING = auto()
    TRIGGER = auto()
    HIDDEN = auto()
    EDGE = auto()  # hidden where text or calls begin or end


class _Mark(NamedTuple):
    position: int
    text: str
    kind: _MarkKind


class ReplyParser:
    """Parses one reply, piece by piece. `schemas` None: calls are not looked for.

    `may_stream` is asked where a call of a tool begins: may it be passed on before it is whole?
    """

    def __init__(
        self,
        dialect: Dialect,
        schemas: Schemas | None,
        *,
        begins_in_reasoning: bool,
        may_stream: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        self.is_broken = False  # a call was passed on in part, and cannot be finished
        self.is_unclosed = False  # the reply ends in a list of calls behind a whole one
        self._dialect = dialect
        self._schemas = schemas
        self._may_stream = may_stream
        self._marks = _Marks(dialect, schemas)
        begins_in_reasoning = begins_in_reasoning and dialect.reasoning is not None
        self._mode = _Mode.REASONING if begins_in_reasoning else _Mode.TEXT
        self._may_reopen = begins_in_reasoning  # some models repeat the mark that ends the prompt
        self._parts: list[Part] = []
        self._held = ""
        self._trigger = ""
        self._stretch: CallStretch | None = None  # the calls that are being read
        # White space after the last part, and marks within it: emitted only if more text follows.
        self._waiting: list[str] = []
        self._drop_space = begins_in_reasoning  # drop white space before the next text
        self._at_start = True  # no text was emitted yet
        self._behind_call = False
        self._hides_edges = False  # one of the marks was hidden

    @property
    def is_in_reasoning(self) -> bool:
        return self._mode is _Mode.REASONING

    def feed(self, text: str) -> list[Part]:
        self._held += text
        self._advance(final=False)
        return self._take_parts()

    def finish(self) -> list[Part]:
        """Return the parts that were held back. The parser cannot be used afterwards."""
        self._advance(final=True)
        if self._mode is _Mode.REASONING:
            self._emit(ParsedReasoning, self._space())
        elif not self._behind_call:
            # A mark that closes what none has opened is text.
            waiting = self._space() if self._hides_edges else "".join(self._waiting)
            self._emit(ParsedText, waiting)
        return self._take_parts()

    def _advance(self, *, final: bool) -> None:
        steps = {
            _Mode.TEXT: self._text_step,
            _Mode.REASONING: self._reasoning_step,
            _Mode.CALL: self._call_step,
        }
        while self._held or (final and self._mode is _Mode.CALL):
            if not steps[self._mode](final=final):
                break

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Each step returns whether the held text may allow another step.

    def _text_step(self, *, final: bool) -> bool:
        mark = self._marks.first(self._held, at_start=self._at_start)
        if not final:
            n_decided = self._marks.n_decided(self._held, at_start=self._at_start)
            if n_decided < len(self._held) and (mark is None or n_decided <= mark.position):
                self._say(self._take(n_decided))
                return False
        if mark is None:
            self._say(self._take(len(self._held)))
            return False
        self._say(self._take(mark.position))
        match mark.kind:
            case _MarkKind.HIDDEN:
                self._take(len(mark.text))
            case _MarkKind.EDGE:
                self._take(len(mark.text))
                if self._at_start or self._behind_call:
                    self._hides_edges = True
                else:
                    self._waiting.append(mark.text)
            case _MarkKind.OPENING:
                self._pass_reasoning_mark(len(mark.text))
                self._mode = _Mode.REASONING
            case _MarkKind.TRIGGER:
                assert self._schemas is not None
                self._mode = _Mode.CALL
                self._trigger = mark.text
                reader = self._dialect.reader(self._schemas)
                self._stretch = CallStretch(reader, self._may_stream)
        return True

    def _reasoning_step(self, *, final: bool) -> bool:
        marks = self._dialect.reasoning
        assert marks is not None
        if self._may_reopen:
            rest = self._held.lstrip()
            if not final and len(rest) < len(marks.opening) and marks.opening.startswith(rest):
                return False
            self._may_reopen = False
            if rest.startswith(marks.opening):
                self._pass_reasoning_mark(len(self._held) - len(rest) + len(marks.opening))
        index = self._held.find(marks.closing)
        if index >= 0:
            self._think(self._take(index))
            self._pass_reasoning_mark(len(marks.closing))
            self._mode = _Mode.TEXT
            return True
        n_held = 0 if final else overlap(self._held, marks.closing)
        self._think(self._take(len(self._held) - n_held))
        return False

    def _call_step(self, *, final: bool) -> bool:
        stretch = self._stretch
        assert stretch is not None
        try:
            for part in stretch.feed(self._take(len(self._held))):
                self._parts.append(part)
            self.is_unclosed = final and stretch.has_calls and not stretch.is_done
            while final and not stretch.is_done:  # a reader returns parts before it fails
                for part in stretch.finish():
                    self._parts.append(part)
        except CutOff:
            self._leave_calls(stretch)
            self._say(self._take(len(self._held)))
        except NotACall:
            self._leave_calls(stretch)
            if not stretch.has_calls:
                self._say(self._take(len(self._trigger)))
        else:
            if not stretch.is_done:
                return False
            self._leave_calls(stretch)
        return True

    def _leave_calls(self, stretch: CallStretch) -> None:
        self._mode = _Mode.TEXT
        self._held = stretch.rest
        if stretch.has_calls:
            self._behind_call = True
            self._waiting = [piece for piece in self._waiting if piece.isspace()]
        self.is_broken |= stretch.is_open

    def _take(self, n_chars: int) -> str:
        taken, self._held = self._held[:n_chars], self._held[n_chars:]
        return taken

    def _pass_reasoning_mark(self, n_chars: int) -> None:
        self._take(n_chars)
        self._waiting = []
        self._drop_space = True

    def _think(self, text: str) -> None:
        self._emit(ParsedReasoning, self._without_space(text))

    def _say(self, text: str) -> None:
        shown = self._without_space(text)
        if shown:
            self._emit(ParsedText, shown)
            self._behind_call = False
            self._at_start = False
        holds_mark = bool(self._waiting) and not self._waiting[0].isspace()
        if self._schemas is None and not self._at_start and not holds_mark:
            self._emit(ParsedText, self._space())  # no call can follow, which would drop it
            self._waiting = []

    def _emit(self, kind: type[ParsedText] | type[ParsedReasoning], text: str) -> None:
        """Extend the last part if it is of the same kind, or add a part unless it is empty."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        elif text:
            self._parts.append(kind(text))

    def _without_space(self, text: str) -> str:
        """Return the text that can be emitted now. White space at its end is held back."""
        if self._drop_space:
            text = text.lstrip()
        if text:
            self._drop_space = False
        shown = text.rstrip()
        if not shown:
            self._waiting += [text] if text else []
            return ""
        waited, space = self._waiting, text[len(shown) :]
        self._waiting = [space] if space else []
        return "".join(waited) + shown

    def _space(self) -> str:
        """Return the white space that waits, without the marks."""
        return "".join(piece for piece in self._waiting if piece.isspace())


class _Marks:
    """The marks that end a stretch of text."""

    def __init__(self, dialect: Dialect, schemas: Schemas | None) -> None:
        self._anywhere = dict.fromkeys(dialect.hidden, _MarkKind.HIDDEN)
        self._anywhere |= dict.fromkeys(dialect.hidden_at_edges, _MarkKind.EDGE)
        self._at_start: dict[str, _MarkKind] = {}
        if dialect.reasoning is not None:
            marks = self._anywhere if dialect.reasoning.anywhere else self._at_start
            marks[dialect.reasoning.opening] = _MarkKind.OPENING
        for trigger in () if schemas is None else dialect.triggers_for(schemas):
            marks = self._at_start if trigger.at_start else self._anywhere
            marks[trigger.text] = _MarkKind.TRIGGER
        longest_first = sorted(self._anywhere, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def first(self, text: str, *, at_start: bool) -> _Mark | None:
        """Return the first mark; the longest one if several begin there."""
        match = self._pattern.search(text)
        found = _Mark(match.start(), match[0], self._anywhere[match[0]]) if match else None
        if at_start:
            start = len(text) - len(text.lstrip())
            longest = max(
                (m for m in self._at_start if text.startswith(m, start)), key=len, default=""
            )
            if longest and (
                found is None or (start, -len(longest)) < (found.position, -len(found.text))
            ):
                return _Mark(start, longest, self._at_start[longest])
        return found

    def n_decided(self, text: str, *, at_start: bool) -> int:
        """Return how many characters cannot belong to a mark that is still incomplete."""
        n_open = max((overlap(text, mark) for mark in self._anywhere), default=0)
        if at_start:
            rest = text.lstrip()
            if any(len(rest) < len(mark) and mark.startswith(rest) for mark in self._at_start):
                n_open = max(n_open, len(rest))
        return len(text) - n_open
