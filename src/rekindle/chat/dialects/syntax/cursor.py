"""Reads a call from left to right while its end may still be missing."""

import re
from collections.abc import Iterator
from typing import Self

from rekindle.chat.dialects.syntax.json_text import NotACall, value_end

NAME_LIMIT = 256  # no tool has a longer name, so longer text is not a call; picked

_WORD = re.compile(r"[^\s<>\[\]{}()|\"'`,;=\uff5c]{1,257}")


class NeedMore(Exception):
    """The text ends too early to decide."""


class Cursor:
    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def sees(self, *marks: str) -> str | None:
        """Return the mark at the cursor, or None. Raises NeedMore while that is undecided."""
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
        """Yield before each item of a comma-separated list; the caller reads the item.

        The caller has read the opening bracket. This method reads the closing one.
        """
        self.skip_space()
        while not self.accept(closing):
            yield
            if not self.skip_space().sees(closing):
                self.expect(",")
                self.skip_space()

    def until(self, mark: str) -> str:
        """Return the text before the mark, and move past the mark."""
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
        """Return the match at the cursor. Raises NeedMore if it may continue."""
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
        """Return the object or array at the cursor, as written."""
        if self.peek() != opening:
            raise NotACall(f"no {opening}")
        end = value_end(self._text, self.position)
        if end is None:
            raise NeedMore
        return self.take(end - self.position)
