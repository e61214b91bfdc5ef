"""The restore of a stored prefix into a slot, piece by piece, with reads ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.cache.entry import Kind
from rekindle.cache.index import Node
from rekindle.cache.residency import Residency
from rekindle.cache.stores.back_store import BackStore, fetch
from rekindle.generation.events import CacheSource
from rekindle.generation.model_state import Payload

# Entries read while earlier ones are put into the slot; picked. With 4, readers ran out of jobs
# while the engine thread waited for a core.
READ_AHEAD = 8


@dataclass(frozen=True, slots=True)
class RestorePiece:
    node: Node
    start: int  # positions to take from it
    stop: int
    payload: Payload
    source: CacheSource

    @property
    def is_checkpoint(self) -> bool:
        return self.node.kind is Kind.CHECKPOINT


class Restore:
    """Leases every entry until its piece is done or the restore is abandoned.

    `n_live` rows are in place. Pieces come in position order, the checkpoint last.
    """

    def __init__(
        self,
        holdings: Residency,
        back_stores: Sequence[BackStore],
        blocks: Sequence[Node],
        checkpoint: Node | None,
        *,
        n_live: int,
        n_tokens: int,
    ) -> None:
        self._holdings = holdings
        self._back_stores = back_stores
        self._nodes = [*blocks, *([checkpoint] if checkpoint else [])]
        self._n_done = 0
        self._n_live = n_live
        self.n_tokens = n_tokens
        self._sources = [node.where.cheapest for node in self._nodes]
        for node in self._nodes:
            holdings.lease(node)
        self._read_ahead()

    @property
    def is_complete(self) -> bool:
        return self._n_done == len(self._nodes)

    @property
    def has_failed(self) -> bool:
        """Whether an entry was corrupt or missing: the prefix must be looked up again."""
        return any(not node.where for node in self._nodes[self._n_done :])

    @property
    def awaited_source(self) -> CacheSource:
        """The tier of the next piece. Only while the restore is not complete."""
        return self._sources[self._n_done]

    def next_piece(self) -> RestorePiece | None:
        """Return the next piece; None while it is still being read."""
        node = self._nodes[self._n_done]
        payload = self._holdings.payload(node)
        if payload is None:
            self._read_ahead()
            return None
        return RestorePiece(
            node,
            max(node.start, self._n_live),
            min(node.stop, self.n_tokens),
            payload,
            self._sources[self._n_done],
        )

    def piece_done(self) -> None:
        node = self._nodes[self._n_done]
        self._n_done += 1
        self._release(node)
        self._read_ahead()

    def give_up(self) -> None:
        """Release the remaining leases. Safe to call after the last piece."""
        for node in self._nodes[self._n_done :]:
            self._release(node)
        self._n_done = len(self._nodes)

    def _release(self, node: Node) -> None:
        self._holdings.release(node)
        self._holdings.shrink()

    def _read_ahead(self) -> None:
        for offset, node in enumerate(self._nodes[self._n_done : self._n_done + READ_AHEAD]):
            if not node.where:
                return
            fetch(self._back_stores, node, must=offset == 0)
