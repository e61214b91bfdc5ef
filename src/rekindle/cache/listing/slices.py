"""Long work on the engine thread, cut into slices so that no stream waits for all of it.

Such work is a generator that yields between two slices and returns its result. The index may
change at each yield: entries are stored and evicted meanwhile.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from heapq import heappush, heappushpop
from typing import TypeVar

from rekindle.cache.index import Node

T = TypeVar("T")
Sliced = Generator[None, None, T]

SLICE_NODES = 256  # a slice takes under 5 ms, also when it drops its nodes; picked


def slices(items: Iterable[T], n_nodes: Callable[[T], int] = lambda _: 1) -> Iterator[list[T]]:
    """Cut items into lists that stand for about `SLICE_NODES` nodes each."""
    piece: list[T] = []
    n_in_piece = 0
    for item in items:
        piece.append(item)
        n_in_piece += n_nodes(item)
        if n_in_piece >= SLICE_NODES:
            yield piece
            piece, n_in_piece = [], 0
    if piece:
        yield piece


def walk(tops: Iterable[Node]) -> Sliced[list[Node]]:
    """Return these nodes and all below them, parents first.

    The list has every node that is there from the start of the walk to its end. Callers skip
    nodes that were removed since: their `where` is empty.
    """
    found = list(tops)
    for number, node in enumerate(found):  # the list grows meanwhile
        # A node that was just removed still leads to its children.
        found += node.children or ()
        found += node.checkpoints or ()
        if number % SLICE_NODES == 0:
            yield
    return found


def last_used(nodes: Iterable[Node], limit: int) -> Sliced[list[Node]]:
    """Return the nodes that were used last, the latest first."""
    heap: list[tuple[float, int, Node]] = []
    number = 0
    for piece in slices(nodes):
        for node in piece:
            number -= 1  # among equals, the first one wins
            item = (node.used_at, number, node)
            if len(heap) < limit:
                heappush(heap, item)
            else:
                heappushpop(heap, item)
        yield
    return [node for _, _, node in sorted(heap, reverse=True)]
