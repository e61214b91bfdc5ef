"""Pins keep entries for a while. Each session of a namespace has a quota, and so have all together.

Without a quota, one session's pins could fill the store. Times are seconds since the epoch:
pins outlive the process.
"""

from collections.abc import Callable, Iterable, Iterator

from rekindle.cache.entry import Key
from rekindle.cache.index import Node
from rekindle.cache.key_heap import KeyHeap

# Shares of the budget of the tier that keeps pinned entries. Both are picked.
SESSION_SHARE = 1 / 8
TOTAL_SHARE = 1 / 2

_Account = tuple[Key, str]  # the root of a namespace, and a session


class Pins:
    def __init__(self, budget_bytes: int, root_of: Callable[[Node], Key]) -> None:
        """`root_of`: the root of a node's namespace."""
        self._session_bytes = int(budget_bytes * SESSION_SHARE)
        self._total_bytes = int(budget_bytes * TOTAL_SHARE)
        self._ends = KeyHeap()
        self._root_of = root_of
        self._held: dict[Key, tuple[_Account, int]] = {}  # whom it counts for, and its bytes
        self._used: dict[_Account, int] = {}  # bytes

    @property
    def n_bytes(self) -> int:
        return sum(self._used.values())

    def grant(self, session: str, nodes: Iterable[Node], until: float) -> Iterator[Node]:
        """Pin nodes in order until the quota is used up. Yield those newly pinned or extended.

        Extending an entry's pin is free.
        """
        account: _Account | None = None
        for node in nodes:
            if node.retention.pinned_until >= until:
                continue
            account = account or (self._root_of(node), session)
            if node.key not in self._held and not self._count(account, node):
                return
            node.retention = node.retention._replace(pinned_until=until)
            self._ends.push(node.key, until)
            yield node

    def adopt(self, node: Node, now: float) -> None:
        """Count a pin that `grant` did not make, or whose end has changed since."""
        until = node.retention.pinned_until
        if until > now:
            if node.key not in self._held:
                account = self._root_of(node), node.retention.session
                self._count(account, node, is_bounded=False)
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
            account, n_bytes = held
            self._used[account] -= n_bytes
            if not self._used[account]:
                del self._used[account]

    def _count(self, account: _Account, node: Node, *, is_bounded: bool = True) -> bool:
        used = self._used.get(account, 0) + node.payload_bytes
        if is_bounded and (
            used > self._session_bytes or self.n_bytes + node.payload_bytes > self._total_bytes
        ):
            return False
        self._used[account] = used
        self._held[node.key] = account, node.payload_bytes
        return True
