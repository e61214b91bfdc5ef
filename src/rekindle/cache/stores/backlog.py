"""The bytes that restores have yet to read, and whose turn it is. Owned by the engine thread."""

from collections import Counter
from dataclasses import dataclass
from itertools import count

from rekindle.cache.index import Where
from rekindle.cache.stores.read_queue import Turn


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One restore's part of the backlog."""

    turn: Turn
    n_bytes: Counter[Where]  # to read from each store


class Backlog:
    def __init__(self) -> None:
        self._n_bytes_read = 0
        self._shares: list[Share] = []
        self._arrivals = count()

    def __bool__(self) -> bool:
        return bool(self._shares)

    def join(self, n_bytes: Counter[Where]) -> Share:
        share = Share(Turn(self._due(n_bytes), next(self._arrivals)), n_bytes)
        self._shares.append(share)
        return share

    def leave(self, share: Share) -> None:
        """Remove a share. Safe to call twice."""
        if share in self._shares:
            self._shares.remove(share)

    def note_read(self, share: Share, place: Where, n_bytes: int) -> None:
        share.n_bytes[place] -= n_bytes
        self._n_bytes_read += n_bytes

    def n_bytes_ahead(self, place: Where, n_bytes: Counter[Where]) -> int:
        """Return what a store reads for others before a restore of `n_bytes` that joined now."""
        due = self._due(n_bytes)
        return sum(share.n_bytes[place] for share in self._shares if share.turn.due <= due)

    def _due(self, n_bytes: Counter[Where]) -> int:
        """Return when a restore that joins now is due, counted in bytes read.

        Equal restores keep their order, and a short one overtakes a long one. Once the bytes of
        the long one have been read for others, no newcomer overtakes it any more.
        """
        return self._n_bytes_read + n_bytes.total()
