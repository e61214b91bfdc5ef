"""Reading a call from left to right while its end may still be missing."""

import re
from collections.abc import Iterator
from typing import Protocol, Self

from rekindle.chat.dialects.base import (
    CallReader,
    Dialect,
    GrammarWriter,
    NotACall,
    ParsedCall,
    ParsedCalls,
    Schemas,
)
from rekindle.chat.dialects.syntax.json_text import value_end
from rekindle.generation.request import Trigger

NAME_LIMIT = 256  # picked: no tool has a longer name, and prose should not wait for its end

_WORD = re.compile(r"[^\s<>\[\]{}()|\"'`,;=\uff5c]{1,257}")


class NeedMore(Exception):
    """The text ends before anything can be said."""


class Cursor:
    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def sees(self, *marks: str) -> str | None:
        """The mark that stands here, if any. Raises NeedMore while that is open."""
        longest = max(map(len, marks))
        rest = self._text[self.position : self.position + longest]
        if len(rest) < longest and any(len(rest) < len(m) and m.startswith(rest) for m in marks):
            raise NeedMore
        return max((mark for mark in marks if rest.startswith(mark)), key=len, default=None)

    def accept(self, *marks: str) -> str | None:
        if mark := self.sees(*marks):
            self.position += len(mark)
        return mark

    def expect(self, *marks: str) -> str:
        mark = self.accept(*marks)
        if mark is None:
            raise NotACall(f"neither of {marks}")
        return mark

    def skip_space(self) -> Self:
        while self.position < len(self._text) and self._text[self.position].isspace():
            self.position += 1
        return self

    def items(self, closing: str) -> Iterator[None]:
        """Yield in front of each item of a list with commas; the caller reads the item.

        The opening bracket has been read; the closing one is read here.
        """
        self.skip_space()
        while not self.accept(closing):
            yield
            if not self.skip_space().sees(closing):
                self.expect(",")
                self.skip_space()

    def until(self, mark: str) -> str:
        """What stands in front of the mark, which is passed over."""
        index = self._text.find(mark, self.position)
        if index < 0:
            raise NeedMore
        found = self.take(index - self.position)
        self.position += len(mark)
        return found

    def name(self) -> str:
        word = self.scan(_WORD)
        if len(word) > NAME_LIMIT:
            raise NotACall("too long a name")
        return word

    def scan(self, pattern: re.Pattern[str]) -> str:
        """What matches here; something that does not must follow."""
        match = pattern.match(self._text, self.position)
        if match is None or not match[0]:
            self.peek()
            raise NotACall(f"no {pattern.pattern}")
        if match.end() == len(self._text):
            raise NeedMore
        return self.take(len(match[0]))

    def peek(self) -> str:
        if self.position == len(self._text):
            raise NeedMore
        return self._text[self.position]

    def take(self, n_chars: int) -> str:
        taken = self._text[self.position : self.position + n_chars]
        self.position += n_chars
        return taken

    def json_value(self, opening: str) -> str:
        """The object or array that begins here, as it is written."""
        if self.peek() != opening:
            raise NotACall(f"no {opening}")
        end = value_end(self._text, self.position)
        if end is None:
            raise NeedMore
        return self.take(end - self.position)


class Walk(Protocol):
    def __call__(self, cursor: Cursor, schemas: Schemas, /) -> list[ParsedCall]: ...


def reader(walk: Walk) -> CallReader:
    """A reader from a function that takes calls off a cursor, and need not care for the end."""

    def read(text: str, schemas: Schemas) -> ParsedCalls | None:
        cursor = Cursor(text)
        try:
            calls = walk(cursor, schemas)
        except NeedMore:
            return None
        except RecursionError:
            raise NotACall("too deep") from None
        if not calls:
            raise NotACall("no call in it")
        return ParsedCalls(tuple(calls), cursor.position)

    return read


def dialect_between(
    name: str, opening: str, closing: str, walk: Walk, grammar: GrammarWriter
) -> Dialect:
    """Return a dialect whose calls begin with one mark and end with another."""
    return Dialect(
        name=name,
        triggers=(Trigger(opening),),
        endings=(closing,),
        read=reader(walk),
        grammar=grammar,
    )
