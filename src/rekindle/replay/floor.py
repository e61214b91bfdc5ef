"""The floor: the least that a server could prefill, given all earlier prompts and replies."""

from bisect import bisect_left
from collections.abc import Sequence
from struct import pack

from rekindle.common_prefix import n_common

UNIT_BYTES = 4


def units_of_tokens(tokens: Sequence[int]) -> bytes:
    return pack(f">{len(tokens)}I", *tokens)


def units_of_text(text: str) -> bytes:
    """Return one unit for each character."""
    return text.encode("utf-32-be", "surrogatepass")


def n_shared_units(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    return n_common(one, other) // UNIT_BYTES


class Floor:
    """Every sequence of units in earlier prompts and replies.

    The list is sorted, so one of the two neighbours of a new sequence shares the longest prefix.
    """

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def n_new(self, prompt: bytes) -> int:
        """Return how many units are new; 0 for a prompt that was sent or said before."""
        return len(prompt) // UNIT_BYTES - n_shared_units(self.nearest(prompt), prompt)

    def nearest(self, prompt: bytes) -> bytes:
        """Return the known sequence that shares the longest prefix with the prompt."""
        place = bisect_left(self._known, prompt)
        neighbours = self._known[max(place - 1, 0) : place + 1]
        return max(neighbours, key=lambda known: n_common(known, prompt), default=b"")

    def learn(self, units: bytes) -> None:
        place = bisect_left(self._known, units)
        if place < len(self._known) and self._known[place].startswith(units):
            return
        # Only the previous sequence can be a prefix of `units`: none is a prefix of another.
        is_longer = place > 0 and units.startswith(self._known[place - 1])
        self._known[place - is_longer : place] = [units]
