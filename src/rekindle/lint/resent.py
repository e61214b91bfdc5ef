"""Count the tokens that a client sends again behind a change.

Tokens are compared as in `replay.floor`: four bytes each.
"""

from collections import deque

from rekindle.common_prefix import n_common
from rekindle.replay.floor import UNIT_BYTES

RUN_TOKENS = 16  # the shortest run that counts: shorter ones are common words; picked
_RUN_BYTES = RUN_TOKENS * UNIT_BYTES


def n_resent(earlier: bytes, later: bytes) -> int:
    """Return how many tokens of `later` are in runs that `earlier` has, in any order.

    Each token of `earlier` is counted once at most.
    """
    places = _places_of_runs(earlier)
    is_used = bytearray(len(earlier) // UNIT_BYTES)
    n_found = position = 0
    while (position + RUN_TOKENS) * UNIT_BYTES <= len(later):
        start = position * UNIT_BYTES
        place = _first_unused(places.get(later[start : start + _RUN_BYTES]), is_used)
        if place is None:
            position += 1
            continue
        end = is_used.find(1, place)
        limit = len(earlier) if end < 0 else end * UNIT_BYTES
        n_same = n_common(earlier[place * UNIT_BYTES : limit], later[start:]) // UNIT_BYTES
        is_used[place : place + n_same] = b"\1" * n_same
        n_found += n_same
        position += n_same
    return n_found


def _places_of_runs(tokens: bytes) -> dict[bytes, deque[int]]:
    places: dict[bytes, deque[int]] = {}
    for start in range(0, len(tokens) - _RUN_BYTES + 1, UNIT_BYTES):
        places.setdefault(tokens[start : start + _RUN_BYTES], deque()).append(start // UNIT_BYTES)
    return places


def _first_unused(places: deque[int] | None, is_used: bytearray) -> int | None:
    while places:
        if is_used.find(1, places[0], places[0] + RUN_TOKENS) < 0:
            return places[0]
        places.popleft()  # a used token is never free again
    return None
