"""Whose entries a full disk loses first, what is pinned there, and names."""

from dataclasses import replace
from pathlib import Path

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.entry import Entry, Retention
from rekindle.cache.index import Node
from rekindle.cache.names import MAX_BYTES, MAX_NAMES, Named, Names
from rekindle.cache.pins import Pins
from rekindle.cache.tools.inventory import Inventory
from rekindle.config.declare import MIB
from rekindle.generation.request import Rank
from tests.cache.entries import MODEL, fill, make_entry, open_tier, stored_keys

ENTRY_BYTES = 100_000
NOW = 1_800_000_000.0


def entry(seed: int, retention: Retention) -> Entry:
    return replace(make_entry(seed, payload_bytes=ENTRY_BYTES), retention=retention)


def test_a_full_disk_evicts_sub_agents_first_then_side_requests(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, budget_bytes=4 * MIB)
    ranks = [Rank.MAIN, Rank.BACKGROUND, Rank.EPHEMERAL]
    entries = [entry(seed, Retention(ranks[seed % 3])) for seed in range(30)]
    by_key = {each.header.key: each.retention.rank for each in entries}
    assert fill(tier, entries) == []
    gone = fill(tier, (entry(seed, Retention()) for seed in range(100, 125)))
    went = [by_key[key] for key in gone if key in by_key]
    assert went == sorted(went, reverse=True)
    assert went.count(Rank.EPHEMERAL) == 10
    tier.close()


def test_a_full_disk_keeps_pinned_entries_until_the_pin_expires(tmp_path: Path) -> None:
    now = [NOW]
    tier = open_tier(tmp_path, budget_bytes=2 * MIB, now=lambda: now[0])
    pinned = entry(1, Retention(Rank.EPHEMERAL, "s", NOW + 300, asked_at=NOW - 1))
    fill(tier, [pinned])
    fill(tier, (entry(seed, Retention()) for seed in range(100, 130)))
    assert pinned.header.key in stored_keys(tier)
    [row] = [row for rows in tier.rows() for row in rows if row.header == pinned.header]
    assert row.retention == pinned.retention
    now[0] += 301
    fill(tier, (entry(seed, Retention()) for seed in range(200, 230)))
    assert pinned.header.key not in stored_keys(tier)
    tier.close()


def test_a_new_pin_applies_to_entries_already_stored(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    plain = entry(1, Retention())
    fill(tier, [plain])
    dearer = Retention(Rank.MAIN, "s", NOW + 300)
    tier.mark(plain.header.key, dearer)
    tier.close()
    again = open_tier(tmp_path)
    assert [row.retention for rows in again.rows() for row in rows] == [dearer]
    again.close()


def named(name: str, *, root: bytes = MODEL, tokens: bytes = bytes(8)) -> Named:
    return Named(root=root, name=name, tokens=tokens, session="s", named_at=NOW)


def test_names_are_stored_replaced_and_dropped(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    fill(tier, [entry(1, Retention())])
    tier.give_name(named("a"))
    tier.give_name(named("b"))
    tier.give_name(named("a", tokens=bytes(16)))
    tier.drop_names([named("b")])
    tier.close()
    again = open_tier(tmp_path)
    assert again.names() == [named("a", tokens=bytes(16))]
    again.close()
    stranger = open_tier(tmp_path, model=b"another model...")
    assert stranger.names() == []
    stranger.close()


def test_the_oldest_name_goes_when_there_are_too_many() -> None:
    names = Names()
    gone = [old for index in range(MAX_NAMES + 2) for old in names.give(named(str(index)))]
    assert [each.name for each in gone] == ["0", "1"]
    assert names.get(MODEL, "0") is None
    assert names.get(b"another root....", "5") is None


def node(key: int, payload_bytes: int = 100) -> Node:
    made = Node(key.to_bytes(16, "big"))
    made.payload_bytes = payload_bytes
    return made


def test_pins_are_bounded_per_session_and_in_total() -> None:
    pins = Pins(8000, lambda _: MODEL)
    granted = [
        len(list(pins.grant(f"s{session}", [node(100 * session + n) for n in range(20)], NOW)))
        for session in range(6)
    ]
    assert granted == [10, 10, 10, 10, 0, 0]


def test_sessions_of_one_name_in_two_namespaces_have_a_quota_each() -> None:
    pins = Pins(8000, lambda node: node.key[-1:])  # each node is a namespace of its own
    granted = [len(list(pins.grant("s", [node(n, 1000)], NOW))) for n in range(3)]
    assert granted == [1, 1, 1]
    assert list(pins.grant("s", [node(256, 100)], NOW)) == []  # in the first namespace again


def test_a_longer_pin_costs_nothing_more_and_a_released_one_gives_its_room_back() -> None:
    pins = Pins(800, lambda _: MODEL)
    one, two = node(1), node(2)
    assert list(pins.grant("s", [one], NOW)) == [one]
    assert list(pins.grant("s", [one], NOW - 1)) == []
    assert list(pins.grant("s", [one], NOW + 1)) == [one]
    assert list(pins.grant("s", [two], NOW)) == []
    assert list(pins.expired(NOW + 1)) == [one.key]
    pins.release(one.key)
    assert pins.n_bytes == 0
    assert list(pins.grant("s", [two], NOW)) == [two]


def test_names_are_bounded_by_their_tokens_too() -> None:
    names = Names()
    gone = [
        old.name
        for index in range(5)
        for old in names.give(named(str(index), tokens=bytes(MAX_BYTES // 4)))
    ]
    assert gone == ["0"]


def test_names_of_a_model_that_has_nothing_stored_are_forgotten(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.give_name(named("lost"))
    tier.close()
    again = open_tier(tmp_path)
    assert again.names() == []
    again.close()


def test_pruning_keeps_pinned_entries() -> None:
    header = make_entry(1, payload_bytes=10).header
    rows = [CatalogRow(header, NOW - 5000, 1, Retention(pinned_until=NOW + 60))]
    assert Inventory(rows).to_prune(to_bytes=0, used_before=NOW, now=NOW) == []
    assert len(Inventory(rows).to_prune(to_bytes=0, used_before=NOW, now=NOW + 61)) == 1
