"""Reads calls from left to right while their text arrives in pieces.

A method that may have to wait for more text is a generator: it yields until the text is there.
"""

import re
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from rekindle.chat.dialects.syntax.json_text import CutOff, NotACall

T = TypeVar("T")
Steps = Generator[None, None, T]

NAME_LIMIT = 256  # no tool has a longer name, so longer text is not a call; picked
MAX_SPACE = 1024  # characters between two tokens of a mark; picked

WORD_CHARACTER = r"[^\s<>\[\]{}()|\"'`,;=\uff5c]"
_WORD = re.compile(WORD_CHARACTER + "{1,257}")
_SPACE = re.compile(r"\s*")
_MARK_SPACE = re.compile(rf"\s{{0,{MAX_SPACE}}}")  # more would be looked at for each piece
# Space may stand around the punctuation of JSON, and wherever a literal has some.
_TOKEN = re.compile(
    r'"[^"\s]*"|[{}\[\]:,](?=[\s{}\[\]:,"]|\Z)|[}\]](?=<[\w/|\uff5c])|\S[^\s{}\[\]",:]*'
)


def tokens_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each token with the white space before it; "": the text ends there."""
    end = 0
    for token in _TOKEN.finditer(text):
        yield text[end : token.start()], token[0]
        end = token.end()
    if end < len(text):
        yield text[end:], ""


class Mark:
    """Fixed text. White space between its tokens is optional, and more of it may stand there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tokens = tuple(_TOKEN.findall(text))

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def end_in(self, text: str, position: int) -> int | None:
        """Return where the mark ends if it stands here; -1: the text ends before that is clear."""
        for token in self._tokens:
            position = space_end(text, position, _MARK_SPACE)
            if not text.startswith(token, position):
                return -1 if token.startswith(text[position : position + len(token)]) else None
            position += len(token)
        return position


class Cursor:
    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self._text = text
        self._position = 0
        self._ended = ended
        self._n_dropped = 0

    @property
    def n_read(self) -> int:
        """The number of characters before the cursor."""
        return self._n_dropped + self._position

    @property
    def rest(self) -> str:
        return self._text[self._position :]

    def feed(self, text: str) -> None:
        self._n_dropped += self._position
        self._text = self.rest + text
        self._position = 0

    def end(self) -> None:
        """Say that no more text comes."""
        self._ended = True

    def wait(self) -> Steps[None]:
        if self._ended:
            raise CutOff("the text ends here")
        yield

    def peek(self) -> Steps[str]:
        while self._position == len(self._text):
            yield from self.wait()
        return self._text[self._position]

    def peek_behind_space(self) -> Steps[str]:
        """Skip white space and return the character behind it."""
        while (yield from self.peek()).isspace():
            self._position = space_end(self._text, self._position)
        return self._text[self._position]

    def sees(self, *marks: Mark) -> Steps[Mark | None]:
        """Return the longest mark that stands here, or None."""
        while True:
            ends = [(mark.end_in(self._text, self._position), mark) for mark in marks if mark]
            if self._ended or all(end != -1 for end, _ in ends):
                found = [(end, mark) for end, mark in ends if end is not None and end >= 0]
                return max(found, key=lambda each: each[0])[1] if found else None
            yield

    def accept(self, *marks: Mark) -> Steps[Mark | None]:
        mark = yield from self.sees(*marks)
        if mark is not None:
            end = mark.end_in(self._text, self._position)
            assert end is not None
            self._position = end
        return mark

    def take_cut(self, mark: Mark) -> None:
        """Take the rest of the text if it ends within the mark."""
        if self._ended and mark.end_in(self._text, self._position) == -1:
            self._position = len(self._text)

    def expect(self, *marks: Mark) -> Steps[Mark]:
        mark = yield from self.accept(*marks)
        if mark is None:
            if self._ended:
                raise CutOff("the text ends within a mark")
            raise NotACall(f"none of {[mark.text for mark in marks]}")
        return mark

    def sees_text(self, text: str) -> Steps[bool]:
        """Return whether exactly this text stands here."""
        while True:
            found = self._text[self._position : self._position + len(text)]
            if found == text or not text.startswith(found) or self._ended:
                return found == text
            yield

    def pass_until(
        self, closing: str, sink: Callable[[str], object], space: str = ""
    ) -> Steps[str]:
        """Pass on the text before `closing`, but not `space` at its end. Return that space."""
        marks = (closing, space + closing)
        while True:
            index = self._text.find(closing, self._position)
            if index >= 0:
                taken = self.take(index - self._position)
                left = space if taken.endswith(space) else ""
                sink(taken[: len(taken) - len(left)])
                return left
            start = max(self._position, len(self._text) - len(space + closing))
            n_open = max(_overlap(self._text[start:], mark) for mark in marks)
            sink(self.take(len(self._text) - n_open - self._position))
            yield from self.wait()

    def word(self) -> Steps[str]:
        """Return the word here: a name, an id or a number, with the literal text around it."""
        yield from self.peek_behind_space()
        word = yield from self.scan(_WORD)
        if len(word) > NAME_LIMIT:
            raise NotACall("too long a name")
        return word

    def scan(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Return the match here, once it cannot become longer. The pattern bounds its length."""
        while True:
            yield from self.peek()
            match = pattern.match(self._text, self._position)
            if match is None or not match[0]:
                raise NotACall(f"no {pattern.pattern}")
            if match.end() < len(self._text) or self._ended:
                return self.take(len(match[0]))
            yield from self.wait()

    def run(self, pattern: re.Pattern[str]) -> str:
        """Return what has arrived of the text that matches, perhaps nothing."""
        match = pattern.match(self._text, self._position)
        return self.take(len(match[0])) if match else ""

    def at_least(self, n_chars: int) -> Steps[str]:
        """Return the next characters without moving past them."""
        while len(self._text) - self._position < n_chars:
            yield from self.wait()
        return self._text[self._position : self._position + n_chars]

    def take(self, n_chars: int) -> str:
        taken = self._text[self._position : self._position + n_chars]
        self._position += n_chars
        return taken


def space_end(text: str, position: int, space: re.Pattern[str] = _SPACE) -> int:
    match = space.match(text, position)
    assert match is not None
    return match.end()


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of the text may begin the mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
