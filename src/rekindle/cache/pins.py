"""Pins keep entries for a while. Each session has a quota, and so has the sum of all sessions.

Without a quota, one session's pins could fill the store. Times are seconds since the epoch:
pins outlive the process.
"""

from collections.abc import Iterable, Iterator

from rekindle.cache.entry import Key
from rekindle.cache.index import Node
from rekindle.cache.key_heap import KeyHeap

# Shares of the budget of the tier that keeps pinned entries. Both are picked.
SESSION_SHARE = 1 / 8
TOTAL_SHARE = 1 / 2


class Pins:
    def __init__(self, budget_bytes: int) -> None:
        self._session_bytes = int(budget_bytes * SESSION_SHARE)
        self._total_bytes = int(budget_bytes * TOTAL_SHARE)
        self._ends = KeyHeap()
        self._held: dict[Key, tuple[str, int]] = {}  # the session it counts for, and its bytes
        self._used: dict[str, int] = {}  # bytes, by session

    @property
    def n_bytes(self) -> int:
        return sum(self._used.values())

    def grant(self, session: str, nodes: Iterable[Node], until: float) -> Iterator[Node]:
        """Pin nodes in order until the quota is used up. Yield those newly pinned or extended.

        Extending an entry's pin is free.
        """
        for node in nodes:
            if node.retention.pinned_until >= until:
                continue
            if node.key not in self._held and not self._count(session, node):
                return
            node.retention = node.retention._replace(pinned_until=until)
            self._ends.push(node.key, until)
            yield node

    def adopt(self, node: Node, now: float) -> None:
        """Count a pin that `grant` did not make, or whose end has changed since."""
        until = node.retention.pinned_until
        if until > now:
            if node.key not in self._held:
                self._count(node.retention.session, node, is_bounded=False)
            self._ends.push(node.key, until)

    def expired(self, now: float) -> Iterator[Key]:
        """Yield, once each, the keys whose pin has ended."""
        while (key := self._ends.pop_lowest(at_most=now)) is not None:
            yield key

    def release(self, key: Key) -> None:
        """Stop counting an entry that is no longer pinned or no longer stored."""
        self._ends.discard(key)
        held = self._held.pop(key, None)
        if held is not None:
            session, n_bytes = held
            self._used[session] -= n_bytes
            if not self._used[session]:
                del self._used[session]

    def _count(self, session: str, node: Node, *, is_bounded: bool = True) -> bool:
        used = self._used.get(session, 0) + node.payload_bytes
        if is_bounded and (
            used > self._session_bytes or self.n_bytes + node.payload_bytes > self._total_bytes
        ):
            return False
        self._used[session] = used
        self._held[node.key] = session, node.payload_bytes
        return True
