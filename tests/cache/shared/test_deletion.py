"""Deletions in a shared store: nothing that they cover is found, kept or written again."""

import base64
import threading
import time
from collections.abc import Callable, Iterator
from time import monotonic

import msgspec
import pytest

from rekindle.cache.entry import Kind, namespace_root
from rekindle.cache.shared import tombstones as store_tombstones
from rekindle.cache.shared.connection import SharedStore, open_shared_store
from rekindle.cache.shared.tombstones import DEAR_SETTLE_SECONDS, KEEP_SECONDS
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.cache.turns.shared import SharedTurns
from rekindle.errors import EntryForgotten, EntryMissing, TierFull
from rekindle.generation.forgetting import Owner, Place, Scope, Tombstone, Tombstones
from rekindle.generation.model_state import Payload
from tests.cache.entries import MODEL
from tests.cache.turns.writer import make_turn
from tests.support.memory_objects import SEALS, MemoryObjects, memory_store
from tests.support.redis_server import redis_server
from tests.support.s3_server import S3Server, s3_server
from tests.support.shared_entries import Prompt, looked_up, prompt, put_all, tier_of

WAIT_SECONDS = 30.0
OURS, THEIRS = "ours", "theirs"
NOW = time.time()  # of the deletion; entries were asked for long before
EVERYTHING = Scope()
KEY = "07" * 32

all_seals = pytest.mark.parametrize("seal", list(SEALS))


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["memory", "redis", "s3"])
def new_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], SharedStore]]:
    """Another server of the same store, which is empty at first."""
    opened: list[SharedStore] = []
    objects = MemoryObjects()
    prefix = request.node.originalname
    url = ""
    if request.param == "redis":
        url = f"{request.getfixturevalue('redis_url')}?prefix={prefix}"
    elif request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"{server.url}/{prefix}"

    def open_one() -> SharedStore:
        store = open_shared_store(url, KEY) if url else memory_store(objects, seal="sealed")
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def deletion(scope: Scope, at: float = NOW) -> Tombstone:
    return Tombstone(scope=scope, at=at)


def of_namespace(
    namespace: str, *, seed: int = 1, session: str = "one", asked_at: float = 1000.0
) -> Prompt:
    root = namespace_root(MODEL, namespace)
    return Prompt(prompt(600, seed=seed), root=root, session=session, asked_at=asked_at)


def store_prompt(store: SharedStore, namespace: str, known: Prompt) -> None:
    tier = tier_of(store, namespace=namespace)
    put_all(tier, [*known.blocks(2), known.entry(Kind.BLOCK, 600)])


def n_found(store: SharedStore, namespace: str, known: Prompt) -> int:
    tier, root = tier_of(store, namespace=namespace), namespace_root(MODEL, namespace)
    return len(looked_up(tier, known.tokens, parent=root, namespace=namespace))


def turns_of(store: SharedStore) -> SharedTurns:
    return SharedTurns(MemoryTurns(Tombstones()), store, fingerprint=MODEL, forgotten=Tombstones())


# -- what a deletion removes -----------------------------------------------------------------------


def test_a_namespace_is_deleted_from_the_store_and_no_other(
    new_store: Callable[[], SharedStore],
) -> None:
    one, other = new_store(), new_store()
    mine, yours = of_namespace(OURS), of_namespace(THEIRS)
    store_prompt(one, OURS, mine)
    store_prompt(one, THEIRS, yours)
    seen: list[int] = []
    deleted = one.forget(deletion(Scope(namespace=OURS)), on_progress=seen.append)
    assert deleted.counts == {Place.SHARED: 3}
    assert deleted.unreached == ()
    assert seen[-1] == 3
    assert n_found(other, OURS, mine) == 0
    assert n_found(other, THEIRS, yours) == 3
    assert one.forget(deletion(Scope(namespace=OURS), NOW + 1)).counts == {}
    assert one.forget(deletion(EVERYTHING)).counts == {Place.SHARED: 3}
    assert n_found(other, THEIRS, yours) == 0


def test_a_session_is_deleted_with_all_that_follows_it(
    new_store: Callable[[], SharedStore],
) -> None:
    store = new_store()
    shared = of_namespace(OURS, session="first")
    tier = tier_of(store, namespace=OURS)
    put_all(tier, shared.blocks(1))  # both sessions begin alike
    mine = of_namespace(OURS, session="mine")
    put_all(tier, mine.blocks(2)[1:])
    by_my_agent = of_namespace(OURS, session="mine/agent")
    put_all(tier, [by_my_agent.entry(Kind.BLOCK, 600)])
    elsewhere = of_namespace(OURS, seed=2, session="minerva")
    store_prompt(store, OURS, elsewhere)
    other_namespace = of_namespace(THEIRS, session="mine")
    store_prompt(store, THEIRS, other_namespace)
    deleted = store.forget(deletion(Scope(namespace=OURS, session="mine")))
    assert deleted.counts == {Place.SHARED: 2}
    assert n_found(store, OURS, shared) == 1
    assert n_found(store, OURS, elsewhere) == 3
    assert n_found(store, THEIRS, other_namespace) == 3


def test_what_another_session_follows_stays_and_becomes_its_own(
    new_store: Callable[[], SharedStore],
) -> None:
    """The first session stored the system prompt of all others."""
    store, other = new_store(), new_store()
    tier = tier_of(store, namespace=OURS)
    first = of_namespace(OURS, session="first")
    put_all(tier, first.blocks(2))
    second = of_namespace(OURS, session="second")
    put_all(tier, [second.entry(Kind.BLOCK, 600)])
    orphan = of_namespace(OURS, seed=2, session="second")
    put_all(tier, orphan.blocks(2)[1:])
    assert store.forget(deletion(Scope(namespace=OURS, session="first"))).counts == {}
    other.deletions.refresh()
    assert n_found(other, OURS, first) == 3
    for entry in (*first.blocks(2), orphan.blocks(2)[1]):
        found = tier_of(other, namespace=OURS).get(entry.header.key)
        assert found.payload == entry.payload
        assert found.retention.session == "second"
    assert store.forget(deletion(Scope(namespace=OURS, session="second"))).counts == {
        Place.SHARED: 4
    }
    assert n_found(other, OURS, first) == 0


def test_what_cannot_be_given_to_another_session_is_removed(objects: MemoryObjects) -> None:
    store = memory_store(objects)
    tier = tier_of(store, namespace=OURS)
    put_all(tier, of_namespace(OURS, session="first").blocks(2))
    put_all(tier, [of_namespace(OURS, session="second").entry(Kind.BLOCK, 600)])

    def fail(name: str, start: Payload) -> None:
        raise TierFull("there is no room")

    objects.overwrite = fail  # type: ignore[method-assign]
    deleted = store.forget(deletion(Scope(namespace=OURS, session="first")))
    assert (deleted.counts, deleted.unreached) == ({Place.SHARED: 2}, ())


def test_turns_are_deleted_by_namespace_and_by_session(
    new_store: Callable[[], SharedStore],
) -> None:
    store = new_store()
    owners = {
        number: Owner(namespace=namespace, session=session, asked_at=1000.0)
        for number, (namespace, session) in enumerate(
            [(OURS, "one"), (OURS, "two"), (THEIRS, "one")]
        )
    }
    writer = turns_of(store)
    kept = {number: make_turn(number, owner=owner) for number, owner in owners.items()}
    for turn in kept.values():
        writer.keep(turn)
    assert writer._writer.flush(WAIT_SECONDS)
    writer.close()

    def found() -> list[int]:
        reader = turns_of(store)
        numbers = [
            number
            for number, turn in kept.items()
            if reader._objects.read(turn.keys, owners[number].namespace or "") == [turn, turn]
        ]
        reader.close()
        return numbers

    assert found() == [0, 1, 2]
    deleted = store.forget(deletion(Scope(namespace=OURS, session="one")))
    assert deleted.counts == {Place.SHARED: 2}  # one object for each key
    assert found() == [1, 2]
    store.forget(deletion(Scope(namespace=OURS)))
    assert found() == [2]
    store.forget(deletion(EVERYTHING))
    assert found() == []


@all_seals
def test_nothing_of_a_deleted_namespace_stays_in_the_store(
    objects: MemoryObjects, seal: str
) -> None:
    store = memory_store(objects, seal=seal)
    store_prompt(store, OURS, of_namespace(OURS))
    store.forget(deletion(Scope(namespace=OURS)))
    assert not objects.objects
    assert [name[:2] for name, members in objects.groups.items() if members] == ["d/"]


# -- nothing comes back ----------------------------------------------------------------------------


@all_seals
def test_a_write_that_comes_after_the_deletion_is_refused(
    objects: MemoryObjects, seal: str
) -> None:
    one, other = memory_store(objects, seal=seal), memory_store(objects, seal=seal)
    one.forget(deletion(Scope(namespace=OURS)))
    other.deletions.refresh()
    for store in (one, other):
        with pytest.raises(EntryForgotten):
            store_prompt(store, OURS, of_namespace(OURS))
        later = of_namespace(OURS, seed=2, asked_at=NOW + 1)
        store_prompt(store, OURS, later)
        assert n_found(store, OURS, later) == 3
        store_prompt(store, THEIRS, of_namespace(THEIRS))


@pytest.mark.parametrize(
    "scope", [EVERYTHING, Scope(namespace=OURS), Scope(namespace=OURS, session="one")]
)
def test_what_a_server_wrote_before_it_knew_is_removed_even_if_it_is_killed(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch, scope: Scope
) -> None:
    one, killed, other = (memory_store(objects) for _ in range(3))
    one.forget(deletion(scope, NOW - 60))
    store_prompt(killed, OURS, of_namespace(OURS))
    later = of_namespace(OURS, seed=2, asked_at=NOW)
    store_prompt(killed, OURS, later)
    one.deletions._resume()
    assert len(objects.objects) == 6
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + DEAR_SETTLE_SECONDS)
    one.deletions._resume()
    assert len(objects.objects) == 3
    assert n_found(other, OURS, later) == 3
    other.deletions.refresh()
    assert [known.is_done for known in other.deletions._known.values()] == [True]


def test_a_deletion_during_a_write_removes_what_was_written(objects: MemoryObjects) -> None:
    store = memory_store(objects)
    write = objects.write

    def write_and_delete(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        store.deletions.forgotten.add(deletion(EVERYTHING))

    objects.write = write_and_delete  # type: ignore[assignment, method-assign]
    with pytest.raises(EntryForgotten):
        store_prompt(store, "", of_namespace(""))
    assert not objects.objects


def test_what_a_deletion_covers_is_a_miss(objects: MemoryObjects) -> None:
    """It stays for the deletion, which may give it to another session."""
    known = of_namespace(OURS)
    store_prompt(memory_store(objects), OURS, known)
    reader = memory_store(objects)
    reader.deletions.forgotten.add(deletion(Scope(namespace=OURS)))
    with pytest.raises(EntryMissing):
        tier_of(reader, namespace=OURS).get(known.blocks(1)[0].header.key)
    assert n_found(reader, OURS, known) == 0
    assert len(objects.objects) == 3


def test_what_a_server_with_a_clock_ahead_wrote_was_asked_for_by_now(
    objects: MemoryObjects,
) -> None:
    """Else a deletion would not cover the copy of a server that found it."""
    ahead = of_namespace(OURS, asked_at=time.time() + 300)
    store_prompt(memory_store(objects), OURS, ahead)
    root = namespace_root(MODEL, OURS)
    tier = tier_of(memory_store(objects), namespace=OURS)
    found = tier.look_up(OURS, root, 0, ahead.tokens, has_rows=True, has_checkpoints=False)
    assert len(found.heads) == 3
    assert all(head.retention.asked_at <= time.time() for head in found.heads)


def test_the_same_text_sent_again_is_stored_anew(objects: MemoryObjects) -> None:
    """An older object under its name does not count as the new one."""
    store_prompt(memory_store(objects), OURS, of_namespace(OURS))
    server = memory_store(objects)
    server.deletions.forgotten.add(deletion(Scope(namespace=OURS)))
    again = of_namespace(OURS, asked_at=NOW + 1)
    store_prompt(server, OURS, again)
    assert n_found(server, OURS, again) == 3


# -- other servers ---------------------------------------------------------------------------------


@all_seals
def test_other_servers_are_told_once(objects: MemoryObjects, seal: str) -> None:
    one, other = memory_store(objects, seal=seal), memory_store(objects, seal=seal)
    told: list[Tombstone] = []
    other.on_tombstone(told.append)
    at = time.time()
    scope = Scope(namespace=OURS, session="\u00e4" * 128)
    one.forget(deletion(scope, at))
    for server in (one, other, one, other):
        server.deletions.refresh()
    assert told == [deletion(scope, at)]
    assert other.tombstones() == told
    one.forget(deletion(scope, at + 1))
    other.deletions.refresh()
    assert [each.scope for each in told] == [scope, scope]
    assert told[1].at > at
    [(_, members)] = [each for each in objects.groups.items() if each[0].startswith("d/")]
    one.deletions.refresh()
    assert len(members) == 1  # the newest


def test_a_server_that_was_off_is_told_when_it_starts(
    new_store: Callable[[], SharedStore],
) -> None:
    new_store().forget(deletion(Scope(namespace=OURS), time.time()))
    late = new_store()
    late.deletions.refresh()
    assert [each.scope for each in late.tombstones()] == [Scope(namespace=OURS)]


def test_servers_of_another_key_or_setting_are_not_told(objects: MemoryObjects) -> None:
    stores = {seal: memory_store(objects, seal=seal) for seal in SEALS}
    for store in stores.values():
        store_prompt(store, OURS, of_namespace(OURS))
    assert len(objects.objects) == 9
    stores["mac"].forget(deletion(Scope(namespace=OURS)))
    for seal, store in stores.items():
        store.deletions.refresh()
        assert n_found(store, OURS, of_namespace(OURS)) == (0 if seal == "mac" else 3)
    assert len(objects.objects) == 6


@pytest.mark.parametrize("ahead_seconds", [-300.0, 0.0, 300.0])
def test_servers_whose_clocks_differ_delete_the_same_requests(
    objects: MemoryObjects, ahead_seconds: float
) -> None:
    clock = time.time()
    one, other = memory_store(objects), memory_store(objects)
    one.deletions._now = lambda: clock
    other.deletions._now = lambda: clock + ahead_seconds
    told: list[Tombstone] = []
    other.on_tombstone(told.append)
    other.deletions.refresh()
    clock += 1
    one.forget(deletion(EVERYTHING, clock))
    clock += 1
    other.deletions.refresh()
    [tombstone] = told
    assert -1 <= tombstone.at - ahead_seconds - (clock - 1) <= 1


def test_a_deletion_that_the_store_has_lost_is_added_again(objects: MemoryObjects) -> None:
    one, late = memory_store(objects), memory_store(objects)
    one.forget(deletion(EVERYTHING, time.time()))
    objects.groups.clear()
    late.deletions.refresh()
    assert late.tombstones() == []
    one.deletions.refresh()
    late.deletions.refresh()
    assert len(late.tombstones()) == 1


def test_a_deletion_that_is_too_old_is_removed(objects: MemoryObjects) -> None:
    one, other = memory_store(objects), memory_store(objects)
    one.forget(deletion(EVERYTHING, time.time() - KEEP_SECONDS - 1))
    for server in (other, one, other):
        server.deletions.refresh()
    assert other.tombstones() == []
    assert not any(objects.groups.values())


def test_more_deletions_than_the_store_keeps_cost_no_more_calls(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers agree which they drop: first those of sessions."""
    monkeypatch.setattr(store_tombstones, "MAX_TOMBSTONES", 60)
    one, other = memory_store(objects), memory_store(objects)
    at = time.time() - 3600
    namespaces = [Scope(namespace=f"n{n}") for n in range(5)]
    sessions = [Scope(namespace=OURS, session=f"s{n}") for n in range(70)]
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 1000.0)
    for n, scope in enumerate([*namespaces, *sessions]):
        one.forget(deletion(scope, at + n))
        other.deletions.refresh()
    done_at = monotonic() + 1000.0 + DEAR_SETTLE_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: done_at)
    one.deletions._resume()
    for server in (one, other, one, other):
        server.deletions.refresh()
    objects.calls.clear()
    for server in (one, other, one, other):
        server.deletions.refresh()
    assert objects.calls == {"members": 4}
    [members] = [each for name, each in objects.groups.items() if name.startswith("d/")]
    assert len(members) < 60
    assert set(one.deletions._known) == set(other.deletions._known) >= set(namespaces)
    assert sessions[-1] in one.deletions._known
    objects.groups.clear()
    for server in (one, other, one, other):
        server.deletions.refresh()
    [members] = objects.groups.values()
    assert len(members) <= 60


def test_a_deletion_that_its_server_left_is_ended_by_another(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = memory_store(objects), memory_store(objects)
    store_prompt(memory_store(objects), OURS, of_namespace(OURS))
    assert one.forget(deletion(EVERYTHING, time.time()), seconds=0.0).counts == {}
    assert objects.objects
    monkeypatch.setattr(store_tombstones, "TAKE_OVER_SECONDS", -1.0)
    other.deletions.refresh()
    other.deletions._resume()
    assert not objects.objects
    other.deletions.refresh()
    assert not other.deletions._pending


# -- a store that is down or hostile ---------------------------------------------------------------


def test_a_deletion_while_the_store_is_down_is_run_when_it_is_back(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.shared.health.MIN_WAIT_SECONDS", 0.01)
    store = memory_store(objects)
    store.start()
    known = of_namespace(OURS)
    store_prompt(store, OURS, known)
    objects.die()
    deleted = store.forget(deletion(Scope(namespace=OURS), time.time()))
    assert deleted.counts == {}
    [sentence] = deleted.unreached
    assert sentence.startswith("The shared store does not answer: ")
    assert objects.objects
    objects.recover()
    eventually(lambda: not objects.objects)
    store.close()


def test_deletions_from_before_a_start_are_run_if_the_store_does_not_know_them(
    objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = of_namespace(OURS)
    store_prompt(memory_store(objects), OURS, known)
    store = memory_store(objects)
    store.start()
    store.adopt([deletion(Scope(namespace=OURS), time.time())])
    eventually(lambda: not objects.objects)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + DEAR_SETTLE_SECONDS)
    eventually(lambda: not store.deletions._pending)
    store.adopt(store.tombstones())
    assert not store.deletions._due()
    store.close()


@pytest.mark.parametrize(
    "scope", [EVERYTHING, Scope(namespace=OURS), Scope(namespace=OURS, session="one")]
)
def test_a_deletion_of_long_ago_leaves_what_was_stored_since(
    objects: MemoryObjects, scope: Scope
) -> None:
    """It is in the directory of a server that uses the store for the first time."""
    at = time.time() - 20 * 24 * 3600
    before = of_namespace(OURS, asked_at=at - 60)
    since = of_namespace(OURS, seed=2, asked_at=at + 60)
    turns = turns_of(memory_store(objects))
    for number, asked_at in enumerate((at - 60, at + 60)):
        owner = Owner(namespace=OURS, session="one", asked_at=asked_at)
        turns.keep(make_turn(number, owner=owner))
    assert turns._writer.flush(WAIT_SECONDS)
    turns.close()
    for known in (before, since):
        store_prompt(memory_store(objects), OURS, known)
    store = memory_store(objects)
    store.adopt([deletion(scope, at)])
    store.deletions._resume()
    other = memory_store(objects)
    assert n_found(other, OURS, before) == 0
    assert n_found(other, OURS, since) == 3
    assert len(objects.objects) == 3 + 2  # and the two keys of a turn
    assert other.deletions.forgotten.all() == []
    other.deletions.refresh()
    [tombstone] = other.tombstones()
    assert tombstone.scope == scope
    assert abs(tombstone.at - at) < 1


def test_a_deletion_of_long_ago_leaves_the_objects_of_another_key(objects: MemoryObjects) -> None:
    for seal in SEALS:
        store_prompt(memory_store(objects, seal=seal), OURS, of_namespace(OURS))
    objects.objects["e/0102"] = b"of an earlier version"
    store = memory_store(objects, seal="mac")
    store.adopt([deletion(EVERYTHING, time.time() - 24 * 3600)])
    store.deletions._resume()
    for seal in SEALS:
        n_left = n_found(memory_store(objects, seal=seal), OURS, of_namespace(OURS))
        assert n_left == (0 if seal == "mac" else 3)
    assert "e/0102" not in objects.objects


def test_many_adopted_deletions_read_the_heads_of_a_namespace_once(objects: MemoryObjects) -> None:
    store_prompt(memory_store(objects), OURS, of_namespace(OURS, session="5"))
    store = memory_store(objects)
    at = time.time() - 24 * 3600
    store.adopt(deletion(Scope(namespace=OURS, session=str(n)), at) for n in range(50))
    store.deletions._resume()
    assert objects.calls["read"] == 1
    assert not objects.objects


def test_after_an_outage_deletions_are_read_before_anything_else(objects: MemoryObjects) -> None:
    one, other = memory_store(objects), memory_store(objects)
    known = of_namespace(OURS)
    other.deletions._on_health()
    one.forget(deletion(Scope(namespace=OURS)))
    with pytest.raises(EntryForgotten):
        store_prompt(other, OURS, known)
    assert not objects.objects


def test_a_lookup_takes_no_more_calls_for_deletions(objects: MemoryObjects) -> None:
    store = memory_store(objects)
    store.start()
    store.forget(deletion(Scope(namespace=THEIRS)))
    known = of_namespace(OURS)
    store_prompt(store, OURS, known)
    store.deletions.close()
    objects.calls.clear()
    assert n_found(store, OURS, known) == 3
    assert objects.calls == {"read": 2, "members": 1}
    store.close()


def test_a_list_without_end_ends_at_the_deadline(objects: MemoryObjects) -> None:
    store = memory_store(objects)

    def pages(kinds: str, folder: str) -> Iterator[list[str]]:
        while True:
            yield [f"e/{folder}never"]

    objects.pages = pages  # type: ignore[method-assign]
    deleted = store.forget(deletion(EVERYTHING), seconds=0.2)
    assert deleted.unreached


def test_a_hostile_list_removes_nothing_else(objects: MemoryObjects) -> None:
    store = memory_store(objects)
    objects.pages = lambda kinds, folder: iter([["x/other", "e/elsewhere/1", "", "d/1"]])  # type: ignore[method-assign]
    removed: list[str] = []
    objects.remove = lambda names: removed.extend(names)  # type: ignore[method-assign]
    assert store.forget(deletion(Scope(namespace=OURS))).counts == {}
    assert removed == []


@all_seals
def test_members_that_are_no_tombstones_are_removed(objects: MemoryObjects, seal: str) -> None:
    store = memory_store(objects, seal=seal)
    told: list[Tombstone] = []
    store.on_tombstone(told.append)
    store.forget(deletion(EVERYTHING, time.time()))
    [group] = objects.groups
    forged = [
        ["x"],
        {"namespace": None},
        [None, "a session of all", time.time(), 0.0, True],
        [OURS, None, 1e300, 0.0, True],
        [OURS, None, -1e300, 0.0, True],
        [OURS, None, "now", 0.0, True],
    ]
    junk = [base64.urlsafe_b64encode(msgspec.json.encode(each)).decode() for each in forged]
    objects.groups[group] |= {*junk, "", "%", "\u00e4", "A" * 5000}
    store.deletions.refresh()
    assert told == []
    assert len(objects.groups[group]) == 1


def test_a_forged_tombstone_is_believed_without_a_key_only(objects: MemoryObjects) -> None:
    """Without a key, everyone who can write to the store can have the servers delete."""
    for seal in SEALS:
        store = memory_store(objects, seal=seal)
        told: list[Tombstone] = []
        store.on_tombstone(told.append)
        forged = msgspec.json.encode([OURS, None, time.time(), 0.0, True])
        member = base64.urlsafe_b64encode(forged).decode()
        objects.groups = {store.deletions._group: {member}}
        store.deletions.refresh()
        assert len(told) == (seal == "plain")


def test_a_listener_that_fails_does_not_keep_the_deletion_from_others(
    objects: MemoryObjects,
) -> None:
    one, other = memory_store(objects), memory_store(objects)
    told = threading.Event()

    def fail(tombstone: Tombstone) -> None:
        raise ValueError

    other.on_tombstone(fail)
    stop = other.on_tombstone(lambda tombstone: told.set())
    one.forget(deletion(EVERYTHING, time.time()))
    other.deletions.refresh()
    assert told.is_set()
    stop()
