"""The restore of a stored prefix into a slot, piece by piece, with reads ahead."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.cache.entry import Kind
from rekindle.cache.index import Node, Where
from rekindle.cache.residency import Residency
from rekindle.cache.stores.back_store import BackStore, fetch
from rekindle.cache.stores.backlog import Backlog
from rekindle.cache.stores.read_queue import ReadOrder
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
        backlog: Backlog,
        blocks: Sequence[Node],
        checkpoint: Node | None,
        *,
        n_live: int,
        n_tokens: int,
    ) -> None:
        self._holdings = holdings
        self._back_stores = back_stores
        self._backlog = backlog
        self._nodes = [*blocks, *([checkpoint] if checkpoint else [])]
        self._n_done = 0
        self._n_in_memory = 0  # leading nodes that need not be read any more
        self._n_live = n_live
        self.n_tokens = n_tokens
        self._sources = [node.where.cheapest for node in self._nodes]
        self._places = [node.where.to_read_from for node in self._nodes]
        n_bytes: Counter[Where] = Counter()
        for node, place in zip(self._nodes, self._places, strict=True):
            n_bytes[place] += node.payload_bytes if place else 0
            holdings.lease(node)
        self._share = backlog.join(n_bytes)
        self._first_read = next((n for n, place in enumerate(self._places) if place), 0)
        self._read_ahead()

    @property
    def is_complete(self) -> bool:
        return self._n_done == len(self._nodes)

    @property
    def has_failed(self) -> bool:
        """Whether an entry was corrupt or missing: the prefix must be looked up again."""
        return any(not node.where for node in self.nodes_left)

    @property
    def awaited_source(self) -> CacheSource:
        """The tier of the next piece. Only while the restore is not complete."""
        return self._sources[self._n_done]

    @property
    def stalled_seconds(self) -> float:
        """How long the read of the next piece takes already, or no read from its store moved."""
        key = self._nodes[self._n_done].key
        return max(
            (store.transfers.reads.stalled_seconds(key) for store in self._back_stores),
            default=0.0,
        )

    @property
    def nodes_left(self) -> Sequence[Node]:
        return self._nodes[self._n_done :]

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
        for node in self.nodes_left:
            self._release(node)
            for store in self._back_stores:
                store.withdraw(node)
        self._n_done = len(self._nodes)
        self._backlog.leave(self._share)

    def _release(self, node: Node) -> None:
        self._holdings.release(node)
        self._holdings.shrink()

    def _read_ahead(self) -> None:
        self._note_arrivals()
        for number in range(self._n_done, min(self._n_done + READ_AHEAD, len(self._nodes))):
            node = self._nodes[number]
            if not node.where:
                return
            order = ReadOrder(number != self._first_read, self._share.turn, number)
            fetch(self._back_stores, node, order, must=number == self._n_done)

    def _note_arrivals(self) -> None:
        while self._n_in_memory < len(self._nodes):
            node, place = self._nodes[self._n_in_memory], self._places[self._n_in_memory]
            if self._n_in_memory >= self._n_done and Where.MEMORY not in node.where:
                return
            if place:
                self._backlog.note_read(self._share, place, node.payload_bytes)
            self._n_in_memory += 1
        self._backlog.leave(self._share)
