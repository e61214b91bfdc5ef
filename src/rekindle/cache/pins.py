"""Promises to keep entries for a while, and how much one session may be promised.

Whoever could pin without a limit would turn the store into theirs. Times are seconds since the
epoch, as promises outlive the process.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from rekindle.cache.entry import Key
from rekindle.cache.index import Node

# Of the budget of the tier that keeps what is pinned. Both are picked.
SESSION_SHARE = 1 / 8
TOTAL_SHARE = 1 / 2

_SMALL = 64  # below this a heap is not worth compacting; picked


class Pins:
    def __init__(self, budget_bytes: int) -> None:
        self._session_bytes = int(budget_bytes * SESSION_SHARE)
        self._total_bytes = int(budget_bytes * TOTAL_SHARE)
        self._ends: list[tuple[float, Key]] = []  # a heap; of a pin that was extended, the first
        self._held: dict[Key, tuple[str, int]] = {}  # whom it is counted to, and its bytes
        self._used: dict[str, int] = {}  # bytes, by session

    @property
    def n_bytes(self) -> int:
        return sum(self._used.values())

    def grant(self, session: str, nodes: Iterable[Node], until: float) -> Iterator[Node]:
        """Pins as many of the nodes as may be, from the first on; those that are new or extended.

        An entry that is pinned already is extended at nobody's cost.
        """
        for node in nodes:
            if node.retention.pinned_until >= until:
                continue
            is_new = node.key not in self._held
            if is_new and not self._count(session, node):
                return
            node.retention = node.retention._replace(pinned_until=until)
            if is_new:
                self.wait_for(node)
            yield node

    def wait_for(self, node: Node) -> None:
        """For its end, as it is now."""
        heappush(self._ends, (node.retention.pinned_until, node.key))
        if len(self._ends) > _SMALL + 2 * len(self._held):
            self._compact()

    def adopt(self, node: Node, now: float) -> None:
        """One that was pinned when it was found."""
        until = node.retention.pinned_until
        if until > now and node.key not in self._held:
            self._count(node.retention.session, node, is_bounded=False)
            self.wait_for(node)

    def expired(self, now: float) -> Iterator[Key]:
        """Those whose first promise has ended; each is told once, unless it is waited for anew."""
        while self._ends and self._ends[0][0] <= now:
            _, key = heappop(self._ends)
            yield key

    def release(self, key: Key) -> None:
        """Nothing is promised for it any more, or it is gone."""
        held = self._held.pop(key, None)
        if held is not None:
            session, n_bytes = held
            self._used[session] -= n_bytes
            if not self._used[session]:
                del self._used[session]

    def _compact(self) -> None:
        """What was released waits here until its promise would have ended, which may take a day."""
        first: dict[Key, float] = {}
        for until, key in self._ends:
            if key in self._held:
                first[key] = min(until, first.get(key, until))
        self._ends = [(until, key) for key, until in first.items()]
        heapify(self._ends)

    def _count(self, session: str, node: Node, *, is_bounded: bool = True) -> bool:
        used = self._used.get(session, 0) + node.payload_bytes
        if is_bounded and (
            used > self._session_bytes or self.n_bytes + node.payload_bytes > self._total_bytes
        ):
            return False
        self._used[session] = used
        self._held[node.key] = session, node.payload_bytes
        return True
