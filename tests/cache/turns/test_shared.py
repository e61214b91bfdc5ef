"""Turns that another server finds through a shared store that is damaged, slow or dead."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from rekindle.cache.entry import Key
from rekindle.cache.turns import shared as shared_turns
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.cache.turns.shared import ABSENT_SECONDS, TOUCH_SECONDS, SharedTurns
from rekindle.chat.prompt.turn_memory import Turn, TurnMemory
from rekindle.chat.reply.parser import ParsedReply
from rekindle.generation.forgetting import Owner, Tombstones
from rekindle.generation.stored_turns import StoredTurn
from tests.cache.entries import MODEL, OTHER_MODEL
from tests.cache.turns.writer import OWNER, make_turn
from tests.support.memory_objects import HANG_SECONDS, MemoryObjects, memory_store

Server = Callable[..., SharedTurns]
FLUSH_SECONDS = 30.0
both_seals = pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0
        self.n_looks = 0

    def __call__(self) -> float:
        self.n_looks += 1
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def start(objects: MemoryObjects, clock: Clock) -> Iterator[Server]:
    """Another server that uses the objects."""
    running = []

    def start(*, is_sealed: bool = False, fingerprint: Key = MODEL) -> SharedTurns:
        store = memory_store(objects, seal="sealed" if is_sealed else "plain")
        turns = SharedTurns(
            MemoryTurns(Tombstones()),
            store,
            fingerprint=fingerprint,
            forgotten=Tombstones(),
            now=clock,
        )
        running.append((turns, store))
        return turns

    yield start
    for turns, store in running:
        turns.close()
        store.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy must not make an answer late."""
    monkeypatch.setattr(shared_turns, "WAIT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(shared_turns, "DEAR_WAIT_SECONDS", HANG_SECONDS)


def keep(turns: SharedTurns, *kept: StoredTurn) -> None:
    for turn in kept:
        turns.keep(turn)
    assert turns._writer.flush(FLUSH_SECONDS)


def is_asking(turns: SharedTurns) -> bool:
    """Whether it takes the store for well."""
    return turns._health.is_well


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- what it is for -----------------------------------------------------------------------------


@both_seals
@pytest.mark.parametrize("n_bytes", [0, 1, 100_000])
def test_a_turn_is_found_by_another_server_by_each_of_its_keys(
    start: Server, n_bytes: int, *, is_sealed: bool
) -> None:
    turn = make_turn(1, n_keys=3, n_bytes=n_bytes)
    keep(start(is_sealed=is_sealed), turn)
    for key in turn.keys:
        assert start(is_sealed=is_sealed).find([key]) == [turn]
    assert start(is_sealed=is_sealed).find(turn.keys) == [turn]


def test_all_turns_of_a_history_are_read_at_once_and_once(
    start: Server, objects: MemoryObjects
) -> None:
    history = [make_turn(number) for number in range(50)]
    keep(start(), *history)
    other = start()
    keys = [key for turn in history for key in turn.keys]
    for _ in range(3):
        assert {turn.id for turn in other.find(keys)} == {turn.id for turn in history}
    assert objects.names_read == [100]


def test_local_turns_are_not_looked_up_in_the_store(start: Server, objects: MemoryObjects) -> None:
    turns = start()
    keep(turns, make_turn(1))
    assert turns.find(make_turn(1).keys) == [make_turn(1)]
    assert turns.find([]) == []
    assert objects.calls["read"] == 0


def test_an_absent_turn_is_asked_for_again_after_a_while(
    start: Server, objects: MemoryObjects, clock: Clock
) -> None:
    turn = make_turn(1)
    one, other = start(), start()
    assert other.find(turn.keys) == other.find(turn.keys) == []
    assert objects.calls["read"] == 1
    keep(one, turn)
    clock.seconds += ABSENT_SECONDS - 1
    assert other.find(turn.keys) == []
    clock.seconds += 1
    assert other.find(turn.keys) == [turn]
    assert objects.calls["read"] == 2


def test_two_lookups_of_one_key_share_one_read(
    start: Server, objects: MemoryObjects, clock: Clock
) -> None:
    turn = make_turn(1)
    keep(start(), turn)
    other = start()
    clock.n_looks = 0
    answers: list[list[StoredTurn]] = []
    askers = [
        threading.Thread(target=lambda: answers.append(other.find(turn.keys))) for _ in range(2)
    ]
    with objects.hanging():
        for asker in askers:
            asker.start()
        eventually(lambda: clock.n_looks == 2)  # each looks at it when it asks
    for asker in askers:
        asker.join()
    assert answers == [[turn], [turn]]
    assert objects.calls["read"] == 1


def test_namespaces_are_isolated_in_the_shared_store(start: Server, objects: MemoryObjects) -> None:
    said = ParsedReply("", "Yes.", ())
    turn = Turn(prompt_key=bytes(16), gap_chars=0, tokens=(1, 2), said=said)
    [key] = make_turn(1, n_keys=1).keys
    one, other = start(), start()
    owner = Owner(namespace="ours", session="somebody", asked_at=1.0)
    TurnMemory(one, "ours").remember(turn, [key], owner)
    assert one._writer.flush(FLUSH_SECONDS)
    assert TurnMemory(other, "theirs").find([key]) == {key: []}
    assert other.find([key]) == []
    assert TurnMemory(other, "ours").find([key]) == {key: [turn]}
    assert b"ours" not in objects.everything()


@both_seals
def test_turns_of_another_model_are_not_found(
    start: Server, objects: MemoryObjects, *, is_sealed: bool
) -> None:
    turn = make_turn(1)
    keep(start(is_sealed=is_sealed), turn)
    assert start(is_sealed=is_sealed, fingerprint=OTHER_MODEL).find(turn.keys) == []
    assert start(is_sealed=not is_sealed).find(turn.keys) == []


def test_a_sealed_store_shows_no_text_and_no_key(start: Server, objects: MemoryObjects) -> None:
    turn = StoredTurn(b"i" * 16, (b"k" * 16,), b"a secret that was told", OWNER)
    keep(start(is_sealed=True), turn)
    seen = objects.everything()
    assert objects.objects
    for secret in (b"secret", turn.id, turn.keys[0], turn.keys[0].hex().encode(), MODEL):
        assert secret not in seen


# -- what cannot be trusted ---------------------------------------------------------------------


@both_seals
@pytest.mark.parametrize("place", [0, 5, 10, 30, 45, 60, -9, -1])
def test_a_flipped_bit_is_a_miss(
    start: Server, objects: MemoryObjects, place: int, *, is_sealed: bool
) -> None:
    turn = make_turn(1, n_keys=1)
    keep(start(is_sealed=is_sealed), turn)
    (name,) = objects.objects
    objects.flip_bit(name, place)
    assert start(is_sealed=is_sealed).find(turn.keys) == []


@both_seals
@pytest.mark.parametrize("data", [b"", b"x", b"x" * 300])
def test_something_else_under_the_name_is_a_miss(
    start: Server, objects: MemoryObjects, data: bytes, *, is_sealed: bool
) -> None:
    turn = make_turn(1, n_keys=1)
    keep(start(is_sealed=is_sealed), turn)
    objects.objects = dict.fromkeys(objects.objects, data)
    assert start(is_sealed=is_sealed).find(turn.keys) == []


@both_seals
def test_another_turn_under_the_name_is_a_miss(
    start: Server, objects: MemoryObjects, *, is_sealed: bool
) -> None:
    one, other = make_turn(1, n_keys=1), make_turn(2, n_keys=1)
    keep(start(is_sealed=is_sealed), one, other)
    name, other_name = objects.objects
    objects.objects[name] = objects.objects[other_name]
    assert start(is_sealed=is_sealed).find([*one.keys, *other.keys]) == [other]


# -- a store that is dead or slow ---------------------------------------------------------------


def test_a_dead_store_is_not_asked_and_gets_missed_turns_when_it_returns(
    start: Server, objects: MemoryObjects
) -> None:
    turns = start()
    objects.die()
    assert turns.find([b"x" * 16]) == []
    assert not is_asking(turns)
    n_calls = objects.calls["read"], objects.calls["write"]
    turns.keep(make_turn(1))
    assert turns.find([b"y" * 16]) == []
    assert turns.find(make_turn(1).keys) == [make_turn(1)]
    assert not turns._writer.flush(HANG_SECONDS)  # at once
    assert (objects.calls["read"], objects.calls["write"]) == n_calls
    objects.recover()
    eventually(lambda: is_asking(turns))
    assert turns._writer.flush(FLUSH_SECONDS)
    assert start().find(make_turn(1).keys) == [make_turn(1)]


def test_a_write_that_fails_is_repeated_when_the_turn_is_used(
    start: Server, objects: MemoryObjects
) -> None:
    turns = start()
    objects.is_full = True
    turns.keep(make_turn(1))
    assert turns._writer.flush(FLUSH_SECONDS)
    assert not objects.objects
    objects.is_full = False
    (turn,) = turns.find(make_turn(1).keys)
    turns.touch([turn.id])
    assert turns._writer.flush(FLUSH_SECONDS)
    assert start().find(turn.keys) == [turn]


@pytest.mark.parametrize("is_dear", [False, True])
def test_find_does_not_wait_for_a_slow_store_and_uses_its_answer_later(
    start: Server, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch, *, is_dear: bool
) -> None:
    one, two = make_turn(1), make_turn(2)
    keep(start(), one, two)
    objects.reads_are_dear = is_dear
    monkeypatch.setattr(shared_turns, "DEAR_WAIT_SECONDS" if is_dear else "WAIT_SECONDS", 0.01)
    slow = start()
    with objects.hanging():
        assert slow.find(one.keys) == []
        assert is_asking(slow)
        assert slow.find(one.keys) == []  # which is under way, and not asked for again
        assert objects.calls["read"] == 1
        assert slow.find(two.keys) == []
        assert not is_asking(slow)  # twice in a row is enough
        assert slow.find([b"x" * 16]) == []
        assert objects.calls["read"] == 2
    eventually(lambda: slow.find(one.keys) == [one])
    eventually(lambda: slow.find(two.keys) == [two])
    assert objects.calls["read"] == 2


def test_a_read_that_fails_is_a_miss_that_is_tried_again(
    start: Server, objects: MemoryObjects
) -> None:
    keep(start(), make_turn(1))
    turns = start()
    objects.fail()
    assert turns.find(make_turn(1).keys) == []
    objects.recover()
    assert turns.find(make_turn(1).keys) == [make_turn(1)]


def test_unwritten_turns_are_bounded_and_the_oldest_is_dropped(
    start: Server, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_turns, "MAX_WAITING", 10)
    monkeypatch.setattr(shared_turns, "MAX_WAITING_BYTES", 5 * 400)
    turns = start()
    with objects.hanging():
        turns.keep(make_turn(0))
        eventually(lambda: objects.calls["write"])  # that one is on its way
        for number in range(1, 9):
            turns.keep(make_turn(number))
        for number in range(20, 40):
            turns.keep(make_turn(number, n_bytes=0))
    assert turns._writer.flush(FLUSH_SECONDS)
    numbers = [0, *range(30, 40)]
    written = [make_turn(number, n_bytes=0 if number else 400) for number in numbers]
    keys = [turn.keys[0] for turn in written] + [make_turn(5).keys[0]]
    assert {turn.id for turn in start().find(keys)} == {turn.id for turn in written}
    assert len(objects.objects) == sum(len(turn.keys) for turn in written)


# -- use, and the end ---------------------------------------------------------------------------


def test_uses_are_reported_to_the_store_once_an_hour(
    start: Server, objects: MemoryObjects, clock: Clock
) -> None:
    turn = make_turn(1)
    one, other = start(), start()
    keep(one, turn)
    one.touch([turn.id])  # it was just written
    assert one._writer.flush(FLUSH_SECONDS)
    assert objects.touched == []
    other.find(turn.keys)
    for _ in range(5):
        other.touch([turn.id, b"unknown".ljust(16)])
    assert other._writer.flush(FLUSH_SECONDS)
    assert sorted(objects.touched) == sorted(objects.objects)
    clock.seconds += TOUCH_SECONDS
    one.touch([turn.id])
    assert one._writer.flush(FLUSH_SECONDS)
    assert objects.calls["touch"] == 2


def test_a_turn_that_the_store_forgot_is_written_again_when_it_is_used(
    start: Server, objects: MemoryObjects, clock: Clock
) -> None:
    turn = make_turn(1)
    turns = start()
    keep(turns, turn)
    objects.lose(*list(objects.objects)[:1])
    clock.seconds += TOUCH_SECONDS
    turns.touch([turn.id])
    assert turns._writer.flush(FLUSH_SECONDS)
    assert start().find(turn.keys[:1]) == start().find(turn.keys[1:]) == [turn]


def test_closing_writes_waiting_turns(start: Server, objects: MemoryObjects) -> None:
    turns = start()
    for number in range(100):
        turns.keep(make_turn(number, n_keys=1))
    turns.close()
    assert len(objects.objects) == 100
    assert turns.find([b"x" * 16]) == []


def test_closing_does_not_wait_for_a_store_that_hangs(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_turns, "CLOSE_SECONDS", 0.02)
    with closing(memory_store(objects)) as store, objects.hanging():
        turns = SharedTurns(
            MemoryTurns(Tombstones()), store, fingerprint=MODEL, forgotten=Tombstones()
        )
        turns.keep(make_turn(1))
        eventually(lambda: objects.calls["write"])
        turns.keep(make_turn(2))
        turns.close()
        assert not objects.objects
