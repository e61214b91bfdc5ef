"""Whose entry is read next, when a queue of reads stands still, and what a wait in it costs."""

from collections import Counter
from collections.abc import Iterator

import pytest

from rekindle.cache.index import Match, Node, Where
from rekindle.cache.stores.backlog import Backlog
from rekindle.cache.stores.load_gate import LoadGate
from rekindle.cache.stores.read_queue import NOBODY_WAITS, ReadOrder, ReadQueue, Turn
from tests.support.stepped_transfers import Clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.installed():
        yield clock


def order(number: int, *, turn: int = 0, is_later: bool = True) -> ReadOrder:
    return ReadOrder(is_later, Turn(turn, 0), number)


def taken(queue: ReadQueue) -> list[bytes]:
    keys = []
    while (key := queue.take()) is not None:
        keys.append(key)
        queue.end(key)
    return keys


def disk(n_bytes: int) -> Counter[Where]:
    return Counter({Where.DISK: n_bytes})


def test_first_pieces_are_read_first_then_the_restore_whose_turn_it_is() -> None:
    queue = ReadQueue()
    queue.put(b"prefetched", NOBODY_WAITS)
    for turn in (2, 1):
        for number in (0, 1, 2):
            queue.put(b"%d %d" % (turn, number), order(number, turn=turn, is_later=number > 0))
    expected = [b"1 0", b"2 0", b"1 1", b"1 2", b"2 1", b"2 2", b"prefetched"]
    assert taken(queue) == expected


def test_an_entry_that_two_restores_need_is_read_once_at_the_earlier_place() -> None:
    queue = ReadQueue()
    queue.put(b"other", order(0, turn=2))
    queue.put(b"shared", order(0, turn=3))
    queue.hasten(b"shared", order(0, turn=1))
    queue.hasten(b"shared", order(0, turn=4))
    assert taken(queue) == [b"shared", b"other"]


def test_a_read_is_withdrawn_unless_it_has_begun() -> None:
    queue = ReadQueue()
    queue.put(b"begun", order(0))
    queue.put(b"waiting", order(1))
    assert queue.take() == b"begun"
    assert not queue.withdraw(b"begun")
    assert queue.withdraw(b"waiting")
    assert queue.take() is None


def test_a_wait_in_a_queue_that_moves_is_no_stall(clock: Clock) -> None:
    queue = ReadQueue()
    for number in range(9):
        queue.put(b"%d" % number, order(number))
    for number in range(8):
        assert queue.take() == b"%d" % number
        clock.now += 5
        queue.end(b"%d" % number)
    assert queue.stalled_seconds(b"8") < 1
    clock.now += 5
    assert queue.stalled_seconds(b"8") > 4


def test_a_read_that_hangs_has_stalled_although_others_end(clock: Clock) -> None:
    queue = ReadQueue()
    for key in (b"hangs", b"ends", b"waits"):
        queue.put(key, order(0))
    assert queue.take() == b"hangs"
    assert queue.take() == b"ends"
    clock.now += 5
    queue.end(b"ends")
    assert queue.stalled_seconds(b"hangs") > 4
    assert queue.stalled_seconds(b"waits") < 1
    assert queue.stalled_seconds(b"ends") == 0


def test_a_read_put_after_a_long_pause_has_not_stalled(clock: Clock) -> None:
    queue = ReadQueue()
    queue.put(b"hangs", order(0))
    assert queue.take() == b"hangs"
    clock.now += 100
    queue.put(b"new", order(0))
    assert queue.stalled_seconds(b"new") < 1


def test_equal_restores_keep_their_order_and_a_short_one_overtakes_a_long_one() -> None:
    backlog = Backlog()
    turns = [backlog.join(disk(n_bytes)).turn for n_bytes in (100, 900, 100, 50)]
    first, long, second, short = turns
    assert short < first < second < long


def test_newcomers_do_not_overtake_a_restore_for_ever() -> None:
    backlog = Backlog()
    long = backlog.join(disk(1000))
    short = backlog.join(disk(900))
    assert short.turn < long.turn
    backlog.note_read(short, Where.DISK, 900)
    assert backlog.join(disk(200)).turn > long.turn


def test_the_backlog_counts_what_is_read_before_a_newcomer() -> None:
    backlog = Backlog()
    long, short = backlog.join(disk(1000)), backlog.join(disk(100))
    assert backlog.n_bytes_ahead(Where.DISK, disk(500)) == 100
    assert backlog.n_bytes_ahead(Where.DISK, disk(2000)) == 1100
    assert backlog.n_bytes_ahead(Where.SHARED, disk(2000)) == 0
    backlog.note_read(long, Where.DISK, 300)
    assert backlog.n_bytes_ahead(Where.DISK, disk(2000)) == 800
    backlog.leave(long)
    backlog.leave(short)
    assert backlog.n_bytes_ahead(Where.DISK, disk(2000)) == 0
    assert not backlog


@pytest.mark.parametrize(
    ("n_restores_ahead", "n_tokens_ahead", "n_loaded"),
    [(0, 0, 256), (8, 0, 256), (16, 0, 0), (16, 256, 256), (32, 256, 0)],
)
def test_a_long_wait_for_the_reads_of_others_makes_computing_faster(
    n_restores_ahead: int, n_tokens_ahead: int, n_loaded: int
) -> None:
    backlog = Backlog()
    gate = LoadGate(backlog, may_recompute=True)
    gate.put_speed.observe(1e9, 0.0)
    gate.read_speed.observe(1e6, 0.032)
    block = Node(b"k")
    block.tokens, block.payload_bytes, block.where = bytes(1024), 1_000_000, Where.DISK
    for _ in range(n_restores_ahead):
        backlog.join(disk(1_000_000))
    n_worth = gate.n_worth_loading(
        Match(256, (block,), None),
        n_live=0,
        n_gained=256,
        n_tokens_ahead=n_tokens_ahead,
        prefill_seconds_per_token=0.001,
    )
    assert n_worth == n_loaded


def test_rows_in_memory_do_not_wait_for_the_disk() -> None:
    backlog = Backlog()
    gate = LoadGate(backlog, may_recompute=True)
    gate.put_speed.observe(1e9, 0.0)
    gate.read_speed.observe(1e6, 0.1)
    first, second = Node(b"1"), Node(b"2")
    for node, where in ((first, Where.MEMORY | Where.DISK), (second, Where.DISK)):
        node.tokens, node.payload_bytes, node.where = bytes(1024), 1_000_000, where
    second.start = 256
    for _ in range(100):
        backlog.join(disk(1_000_000))
    n_worth = gate.n_worth_loading(
        Match(512, (first, second), None),
        n_live=0,
        n_gained=512,
        prefill_seconds_per_token=0.001,
    )
    assert n_worth == 256


def test_a_wait_in_the_queue_does_not_make_the_disk_look_faster() -> None:
    backlog = Backlog()
    gate = LoadGate(backlog, may_recompute=True)
    gate.read_speed.observe(1.0, 1.0)
    share = backlog.join(disk(1))
    gate.note_refusal()
    assert gate.read_speed.seconds(1.0) == 1.0
    backlog.leave(share)
    gate.note_refusal()
    assert gate.read_speed.seconds(1.0) != 1.0
