"""A stored prefix on its way into a slot: which piece is next, and which are being read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rekindle.cache.entry import Kind
from rekindle.cache.index import Node
from rekindle.generation.events import CacheSource
from rekindle.generation.model_state import Payload

# Entries that are read while earlier ones are put; picked. With 4, readers were seen to run out
# of jobs while the engine thread waited for a core.
READ_AHEAD = 8


class EntrySource(Protocol):
    """What a restore needs of the cache."""

    def lease(self, node: Node) -> None: ...

    def release(self, node: Node) -> None: ...

    def payload(self, node: Node) -> Payload | None: ...

    def fetch(self, node: Node, *, must: bool) -> None: ...


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
    """Holds a lease on every entry until its piece is done, or all are given up.

    n_live rows are in place. Pieces come in position order, the checkpoint last.
    """

    def __init__(
        self,
        shelf: EntrySource,
        blocks: Sequence[Node],
        checkpoint: Node | None,
        *,
        n_live: int,
        n_tokens: int,
    ) -> None:
        self._shelf = shelf
        self._nodes = [*blocks, *([checkpoint] if checkpoint else [])]
        self._n_done = 0
        self._n_live = n_live
        self.n_tokens = n_tokens
        self._sources = [node.where.cheapest for node in self._nodes]
        for node in self._nodes:
            shelf.lease(node)
        self._read_ahead()

    @property
    def is_complete(self) -> bool:
        return self._n_done == len(self._nodes)

    @property
    def has_failed(self) -> bool:
        """An entry turned out to be bad or gone: the prefix has to be looked up again."""
        return any(not node.where for node in self._nodes[self._n_done :])

    @property
    def awaited_source(self) -> CacheSource:
        """Where the next piece comes from, while there is one."""
        return self._sources[self._n_done]

    def next_piece(self) -> RestorePiece | None:
        """None: it is still being read."""
        node = self._nodes[self._n_done]
        payload = self._shelf.payload(node)
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
        self._shelf.release(node)
        self._read_ahead()

    def give_up(self) -> None:
        """Releases what is left; harmless when nothing is."""
        for node in self._nodes[self._n_done :]:
            self._shelf.release(node)
        self._n_done = len(self._nodes)

    def _read_ahead(self) -> None:
        for offset, node in enumerate(self._nodes[self._n_done : self._n_done + READ_AHEAD]):
            if not node.where:
                return
            self._shelf.fetch(node, must=offset == 0)
