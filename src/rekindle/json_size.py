"""Bounds on JSON, checked before Python objects are made of it.

Parsing holds the interpreter's lock, so a body with millions of values would stop the event loop
even from a worker thread; in a file, each byte may become 24 bytes of memory. Honest JSON is large
because of long strings.
"""

import re

from rekindle.errors import InvalidRequest

# Picked: 0.05 s of parsing on a free core. The requests of recorded agents have 1,500; a
# `logit_bias` may have 65,536.
MAX_MEMBERS = 100_000  # objects, arrays and keys
MAX_VALUES = 500_000  # items of arrays and members of objects; token ids of a long context
PIECE_BYTES = 2**18  # that are looked at without a chance for other threads: 0.04 s at most

_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
INSIDE_STRING = re.compile(_INSIDE, re.DOTALL)
STRING = re.compile(b'"' + _INSIDE + b'"', re.DOTALL)
WHOLE_STRINGS = re.compile(b'(?:[^"]*+"' + _INSIDE + b'")*+', re.DOTALL)


def check_size(data: bytes) -> None:
    """Raise InvalidRequest for more members or values than any client sends."""
    if is_too_large(data, MAX_MEMBERS, MAX_VALUES):
        raise InvalidRequest(
            f"The body has more than {MAX_MEMBERS:,} objects, arrays and keys, or more than"
            f" {MAX_VALUES:,} values."
        )


def is_too_large(data: bytes, max_members: int, max_values: int) -> bool:
    """Return whether the JSON has more members or values. Other text than JSON may be either."""
    if len(data) <= max_members:
        return False
    found = _Count(max_members, max_values)
    for start in range(0, len(data), PIECE_BYTES):
        found.add(data[start : start + PIECE_BYTES])
    # `found` includes the characters in strings.
    return found.is_too_large and _is_too_large_outside_strings(data, max_members, max_values)


class _Count:
    """Upper bounds for the members and values in a piece of JSON."""

    def __init__(self, max_members: int, max_values: int) -> None:
        self._max_members = max_members
        self._max_values = max_values
        self._n_members = 0
        self._n_values = 0

    def add(self, piece: bytes) -> None:
        self._n_members += sum(map(piece.count, (b"{", b"[", b":")))
        self._n_values += piece.count(b",")

    @property
    def is_too_large(self) -> bool:
        return self._n_members > self._max_members or self._n_values > self._max_values

    @property
    def max_strings(self) -> int:
        """In JSON, one of the characters that are counted precedes each string but the first."""
        return self._n_members + self._n_values + 1


def _is_too_large_outside_strings(data: bytes, max_members: int, max_values: int) -> bool:
    found = _Count(max_members, max_values)
    position = n_strings = 0
    # With more strings than `max_strings` it is no JSON, and the parser stops there.
    while position < len(data) and n_strings <= found.max_strings:
        match = WHOLE_STRINGS.match(data, position, position + PIECE_BYTES)
        assert match is not None
        if (end := match.end()) > position:
            rest, n_removed = STRING.subn(b"", data[position:end])
            n_strings += n_removed
            found.add(rest)
            position = end
        else:  # no quote, or a string that is longer than a piece
            quote = data.find(b'"', position, position + PIECE_BYTES)
            end = position + PIECE_BYTES if quote < 0 else quote
            found.add(data[position:end])
            position = end if quote < 0 else _string_end(data, quote + 1)
        if found.is_too_large:
            return True
    return False


def _string_end(data: bytes, position: int) -> int:
    """Return the position after the string's closing quote, or the end of incomplete JSON."""
    while position < len(data) - 1:
        match = INSIDE_STRING.match(data, position, position + PIECE_BYTES)
        assert match is not None
        position = match.end()
        if data.startswith(b'"', position):
            return position + 1
    return len(data)
