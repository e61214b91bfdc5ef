"""The queue gives back in order of the last priority pushed, and does not grow by itself."""

import random

from rekindle.cache.entry import Key
from rekindle.cache.key_heap import KeyHeap

A, B, C = b"a", b"b", b"c"


def filled(**priorities: float) -> KeyHeap:
    queue = KeyHeap()
    for name, priority in priorities.items():
        queue.push(name.encode(), priority)
    return queue


def test_the_lowest_priority_is_popped_first() -> None:
    queue = filled(a=2.0, b=1.0)
    assert [queue.pop_lowest() for _ in range(3)] == [B, A, None]


def test_equal_priorities_are_popped_in_order_of_insertion() -> None:
    queue = filled(b=1.0, a=1.0)
    assert queue.pop_lowest() == B


def test_only_the_last_priority_of_a_key_counts() -> None:
    queue = filled(a=1.0, b=2.0)
    queue.push(A, 3.0)
    assert [queue.pop_lowest() for _ in range(3)] == [B, A, None]


def test_a_discarded_key_does_not_come_back() -> None:
    queue = filled(a=1.0, b=2.0)
    queue.discard(A)
    queue.discard(C)
    assert [queue.pop_lowest() for _ in range(2)] == [B, None]


def test_the_clock_is_the_highest_priority_popped() -> None:
    queue = filled(b=5.0, c=7.0)
    assert queue.pop_lowest() == B
    assert queue.clock == 5.0
    queue.push(A, 1.0)
    assert queue.pop_lowest() == A
    assert queue.clock == 5.0


def test_pushing_the_same_keys_for_ever_takes_no_more_memory() -> None:
    queue = filled(a=1.0, b=2.0)
    for turn in range(10_000):
        queue.push(A, 3.0 + turn)
    assert len(queue._heap) < 100
    assert [queue.pop_lowest() for _ in range(3)] == [B, A, None]


def test_discarding_gives_memory_back() -> None:
    queue = KeyHeap()
    keys = [bytes([i // 256, i % 256]) for i in range(10_000)]
    for key in keys:
        queue.push(key, 1.0)
    for key in keys:
        queue.discard(key)
    assert len(queue._heap) < 100


def test_many_changes_leave_the_order_of_a_sorted_list() -> None:
    rng = random.Random(1)
    queue = KeyHeap()
    last: dict[Key, tuple[float, int]] = {}
    for turn in range(5000):
        key = rng.randbytes(1)
        if rng.random() < 0.3:
            queue.discard(key)
            last.pop(key, None)
        else:
            last[key] = (rng.random(), turn)
            queue.push(key, last[key][0])
    assert [queue.pop_lowest() for _ in last] == sorted(last, key=lambda key: last[key])
    assert len(queue) == 0
