"""Keeps the client's text from turning into control tokens.

Client strings are marked before the template sees them: a sentinel character breaks up every
special string that they hold or could complete. After rendering, text with a sentinel is
tokenised as plain text, and all other text as the template wrote it.
"""

import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from rekindle.errors import InvalidRequest
from rekindle.string_pattern import any_of

# Noncharacters first, since no text needs them; then the private use area.
SENTINEL_CLASS = "\ufdd0-\ufdef\ue000-\uf8ff"
_SENTINELS = tuple(map(chr, (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))))
_NEVER = "(?!)"


class PromptPiece(NamedTuple):
    """Text of a prompt that is tokenised in one call. A tuple, since it is hashed often."""

    text: str
    parse_special: bool


class Guard:
    """Marks client text, and cuts rendered text into pieces."""

    def __init__(self, special_strings: tuple[str, ...]) -> None:
        specials = sorted({s for s in special_strings if s})
        self.special_strings = frozenset(specials)
        self._taken = repr(specials).lower()
        self._special = re.compile(_wholes(specials) or _NEVER)
        self._start = re.compile(_starts(specials) or _NEVER)
        self._first = re.compile("|".join(sorted({re.escape(s[0]) for s in specials})) or _NEVER)
        self._prefixes = frozenset(s[:end] for s in specials for end in range(1, len(s)))
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        tails = sorted({tail for s in specials for tail in _tails(s)})
        self._tail = re.compile(any_of(tails) if tails else _NEVER)
        self._cores = frozenset(core for tail in tails for core in _cores(tail)).difference(
            _SCHEMA_WORDS
        )

    def sentinel(self, *client: object) -> str:
        """Return a character that occurs nowhere in these values."""
        # repr writes these characters as \uXXXX, and so does JSON inside the values.
        taken = repr(client).lower() + self._taken
        for sentinel in _SENTINELS:
            if f"\\u{ord(sentinel):x}" not in taken:
                return sentinel
        raise InvalidRequest("The conversation uses every private-use character of Unicode.")

    def mark(self, text: str, sentinel: str) -> str:
        """Return the text with a sentinel inside every special string that it could form."""
        cuts = {match.end() for match in self._start.finditer(text)}
        cuts.update(self._loose_ends(text))
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return sentinel.join(text[i:j] for i, j in pairwise(edges))

    def n_special(self, text: str) -> int:
        return sum(1 for _ in self._special.finditer(text))

    def pieces(self, rendered: str, sentinel: str) -> tuple[PromptPiece, ...]:
        """Cut the text before every control string of the template. No token spans a cut."""
        pieces = []
        for start, body, end in self._sections(rendered):
            if rendered.find(sentinel, body, end) < 0:
                if start < end:
                    pieces.append(PromptPiece(rendered[start:end], parse_special=True))
                continue
            if start < body:
                pieces.append(PromptPiece(rendered[start:body], parse_special=True))
            if plain := rendered[body:end].replace(sentinel, ""):
                pieces.append(PromptPiece(plain, parse_special=False))
        return tuple(pieces)

    def control_string(self, piece: PromptPiece) -> str:
        """Return the control string that the piece begins with, or an empty string."""
        found = self._special.match(piece.text) if piece.parse_special else None
        return found[0] if found else ""

    def _sections(self, rendered: str) -> Iterator[tuple[int, int, int]]:
        """Yield start, body and end: a control string of the template, and the text after it."""
        start = body = 0
        for match in self._special.finditer(rendered):
            yield start, body, match.start()
            start, body = match.span()
        yield start, body, len(rendered)

    def _loose_ends(self, text: str) -> Iterator[int]:
        """Yield cuts so that neither end of the text completes a special string.

        Templates trim, so the ends inside the white space count as well.
        """
        for end in {len(text), len(text.rstrip())}:
            for match in self._first.finditer(text, max(0, end - self._longest_prefix), end):
                if text[match.start() : end] in self._prefixes:
                    yield match.end()
        start = len(text) - len(text.lstrip())
        if self._tail.match(text, start) or text.strip() in self._cores:
            yield start


def _wholes(specials: list[str]) -> str:
    # A single character cannot be broken up: in client text a sentinel follows it.
    return "|".join(
        any_of(group) + (f"(?![{SENTINEL_CLASS}])" if len(group[0]) == 1 else "")
        for group in ([s for s in specials if len(s) > 1], [s for s in specials if len(s) == 1])
        if group
    )


def _starts(specials: list[str]) -> str:
    """Return a pattern of the first character of each occurrence, so that overlaps are found."""
    return "|".join(
        f"{re.escape(first)}(?={any_of([s[1:] for s in group])})"
        for first, group in groupby(specials, key=itemgetter(0))
    )


# Templates put names and keys between brackets (`'<' ~ key ~ '>'`), so `|im_end|` is dangerous
# too. Only brackets count: `object` stays unmarked although `<|object_ref_start|>` exists.
# Templates look up schema words, and would not find marked ones.
_SCHEMA_WORDS = (
    *("type", "function", "name", "description", "parameters", "properties", "required"),
    *("items", "enum", "default", "title", "object", "array", "string", "number"),
    *("integer", "boolean", "null"),
)


def _tails(special: str) -> Iterator[str]:
    for i, character in enumerate(special[:-1], start=1):
        if _is_word(character):
            return
        yield special[i:]


def _cores(tail: str) -> Iterator[str]:
    for i in range(len(tail) - 1, 0, -1):
        if _is_word(tail[i]):
            return
        yield tail[:i]


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
