"""Keeps the client's text from turning into control tokens.

Client strings are marked before the template sees them: a sentinel character breaks up every
special string they hold or could complete. After rendering, what still carries a sentinel is
tokenized as plain text, and everything else as the template wrote it.
"""

import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from rekindle.errors import InvalidRequest
from rekindle.generation.string_pattern import any_of

# Noncharacters first, since no text needs them; then the private use area.
SENTINEL_CLASS = "\ufdd0-\ufdef\ue000-\uf8ff"
_SENTINELS = tuple(map(chr, (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))))
_NEVER = "(?!)"


class PromptPiece(NamedTuple):
    """Text of a prompt that is tokenised in one call. A tuple, since it is hashed often."""

    text: str
    parse_special: bool


class Guard:
    def __init__(self, special_strings: tuple[str, ...]) -> None:
        specials = sorted({s for s in special_strings if s})
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
        """A character that occurs nowhere in these values, whatever their shape."""
        # repr spells these characters as \uXXXX, which is also how JSON inside them would.
        taken = repr(client).lower() + self._taken
        for sentinel in _SENTINELS:
            if f"\\u{ord(sentinel):x}" not in taken:
                return sentinel
        raise InvalidRequest("The conversation uses every private-use character of Unicode.")

    def mark(self, text: str, sentinel: str) -> str:
        cuts = {match.end() for match in self._start.finditer(text)}
        cuts.update(self._loose_ends(text))
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return sentinel.join(text[i:j] for i, j in pairwise(edges))

    def n_special(self, text: str) -> int:
        return sum(1 for _ in self._special.finditer(text))

    def pieces(self, rendered: str, sentinel: str) -> tuple[PromptPiece, ...]:
        """Cut in front of every control string that the template wrote: no token spans a cut."""
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
        """The one that the piece begins with, if any."""
        found = self._special.match(piece.text) if piece.parse_special else None
        return found[0] if found else ""

    def _sections(self, rendered: str) -> Iterator[tuple[int, int, int]]:
        """Each control string of the template's own, and what follows it: start, body, end."""
        start = body = 0
        for match in self._special.finditer(rendered):
            yield start, body, match.start()
            start, body = match.span()
        yield start, body, len(rendered)

    def _loose_ends(self, text: str) -> Iterator[int]:
        """Where to cut so that neither end completes a special string with its neighbours.

        Templates trim, so the ends that count are also those inside the white space.
        """
        for end in {len(text), len(text.rstrip())}:
            for match in self._first.finditer(text, max(0, end - self._longest_prefix), end):
                if text[match.start() : end] in self._prefixes:
                    yield match.end()
        start = len(text) - len(text.lstrip())
        if self._tail.match(text, start) or text.strip() in self._cores:
            yield start


def _wholes(specials: list[str]) -> str:
    # One character cannot be broken up: the client's is the one that a sentinel follows.
    return "|".join(
        any_of(group) + (f"(?![{SENTINEL_CLASS}])" if len(group[0]) == 1 else "")
        for group in ([s for s in specials if len(s) > 1], [s for s in specials if len(s) == 1])
        if group
    )


def _starts(specials: list[str]) -> str:
    """Matches the first character of each occurrence, so that overlapping ones are all found."""
    return "|".join(
        f"{re.escape(first)}(?={any_of([s[1:] for s in group])})"
        for first, group in groupby(specials, key=itemgetter(0))
    )


# Templates put names and keys between brackets (`'<' ~ key ~ '>'`), so `|im_end|` is dangerous
# too. Only brackets count: `object` must stay itself although `<|object_ref_start|>` exists.
# By the schema words templates look things up, and a marked one would not be found.
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
