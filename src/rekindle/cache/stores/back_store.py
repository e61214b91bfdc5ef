"""A store behind memory: what is on its way there, and on its way back.

`disk_store` and `shared_stock` decide what is worth writing and what reports mean for the
holdings. Owned by the engine thread.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rekindle.cache.entry import Entry, Key
from rekindle.cache.index import Node, Where
from rekindle.cache.policy import Speed
from rekindle.cache.residency import Holdings
from rekindle.config import WritePolicy

_log = logging.getLogger("rekindle.cache")

HANG_SECONDS = 10.0  # without one write that ended, well or not; picked


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRules:
    bytes_per_hour: int  # 0: no limit
    policy: WritePolicy
    min_tokens: int


class TransferQueue(Protocol):
    """Threads that move bytes; what becomes of a job is an event."""

    def write(self, entry: Entry) -> None: ...

    def read(self, key: Key) -> None: ...


class BackStore(ABC):
    """`where` is its mark on nodes; `count` takes names of counters and adds to them."""

    def __init__(
        self,
        where: Where,
        carrier: TransferQueue,
        holdings: Holdings,
        count: Callable[[str, int], None],
        read_speed: Speed,
    ) -> None:
        self._where = where
        self._carrier = carrier
        self._holdings = holdings
        self._count = count
        self._read_speed = read_speed
        self._writing: dict[Key, Node] = {}  # each leased until it is written
        self._write_ended_at = 0.0  # or the first of them began
        self._reading: dict[Key, int] = {}  # bytes reserved for each

    @property
    def n_writing(self) -> int:
        return len(self._writing)

    @property
    def is_writing(self) -> bool:
        """A store that hangs is none to wait for."""
        return bool(self._writing) and time.monotonic() < self._write_ended_at + HANG_SECONDS

    def is_writing_it(self, node: Node) -> bool:
        return node.key in self._writing

    @abstractmethod
    def offer(self, node: Node, *, was_reused: bool) -> None:
        """Writes the entry, and what leads to it, if it is worth that."""

    @abstractmethod
    def drop(self, keys: Sequence[Key]) -> None: ...

    def fetch(self, node: Node, *, must: bool) -> None:
        """Starts reading a leased node. Unless it `must`, only where there is room."""
        if node.key in self._reading or Where.MEMORY in node.where:
            return
        if not self._holdings.make_room(node.payload_bytes) and not must:
            return
        self._holdings.memory.reserve(node.payload_bytes)
        self._reading[node.key] = node.payload_bytes
        self._carrier.read(node.key)

    def _may_be_offered(self, node: Node) -> bool:
        is_orphan = node.parent is None and node.start > 0  # it is offered with its block again
        return self._where not in node.where and node.key not in self._writing and not is_orphan

    def _unwritten_path(self, node: Node) -> list[Node]:
        """The end of the path to `node` that is neither there nor on its way; first block first.

        Empty where a part of it is not in memory either: what nothing leads to is never found.
        """
        path: list[Node] = []
        step: Node | None = node
        while step and self._where not in step.where and step.key not in self._writing:
            if Where.MEMORY not in step.where:
                return []
            path.append(step)
            step = step.parent
        return path[::-1]

    def _begin_write(self, node: Node) -> None:
        if not self._writing:
            self._write_ended_at = time.monotonic()
        self._writing[node.key] = node
        self._holdings.lease(node)
        entry = self._holdings.memory.get(node.key)
        self._carrier.write(replace(entry, retention=node.retention))

    def _on_written(self, key: Key) -> None:
        node = self._writing[key]
        self._count("writes", 1)
        self._count("written_bytes", node.payload_bytes)
        # One after another: since the one before it ended, or the first of them began.
        self._count("write_microseconds", int((time.monotonic() - self._write_ended_at) * 1e6))
        if self._holdings.index.get(key) is node:
            self._holdings.note_stored(node, self._where)
        else:
            self.drop([key])  # it was dropped while it was being written
        self._end_write(key)
        again = self._holdings.index.get(key)
        if again is not None and again is not node:
            self._offer_again([again])  # and then computed once more

    def _on_vanished(self, keys: Sequence[Key]) -> None:
        # What is being read right now has a word of its own to come.
        nodes = [self._holdings.index.get(key) for key in keys if key not in self._reading]
        gone = [node for node in nodes if node is not None and self._where in node.where]
        if gone:
            _log.info("cache: %d entries are gone (%s)", len(gone), str(self._where.name).lower())
        self._count("vanished", len(gone))
        for node in gone:
            self._holdings.remove(node, self._where)
        self._offer_again(gone)

    def _offer_again(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if Where.MEMORY in node.where:
                self.offer(node, was_reused=True)

    def _end_write(self, key: Key) -> None:
        self._write_ended_at = time.monotonic()
        self._holdings.release(self._writing.pop(key))
        self._holdings.shrink()

    def _on_arrived(self, entry: Entry, seconds: float) -> None:
        key, n_bytes = entry.header.key, entry.header.payload_bytes
        self._holdings.memory.give_back(self._reading.pop(key))
        self._read_speed.observe(n_bytes, seconds)
        self._count("read_bytes", n_bytes)
        self._count("read_microseconds", int(seconds * 1e6))
        if self._holdings.index.get(key) is not None and key not in self._holdings.memory:
            self._holdings.hold(entry)
        self._holdings.shrink()

    def _on_read_failed(self, key: Key) -> None:
        self._holdings.memory.give_back(self._reading.pop(key))
        if (missed := self._holdings.index.get(key)) is not None:
            self._holdings.remove(missed, self._where)
