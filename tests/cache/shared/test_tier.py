"""Entries that other servers stored: found by their names, in few round trips, or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.cache.entry import TOKEN_BYTES, Kind, namespace_root, token_bytes
from rekindle.cache.index import PrefixIndex, Where
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.heads import HEAD_BYTES
from rekindle.cache.shared.sealing import Encrypted
from rekindle.cache.shared.tier import DEAR_NAMES, MAX_CHECKPOINTS, MAX_MEMBERS
from rekindle.errors import EntryCorrupt, EntryForgotten, EntryMissing, TierFailed, TierFull
from tests.cache.entries import MODEL, OTHER_MODEL
from tests.support.memory_objects import SEALS, SECRET, MemoryObjects
from tests.support.shared_entries import (
    B,
    Prompt,
    looked_up,
    make_tier,
    name_in,
    prompt,
    put_all,
    tier_of,
)

all_seals = pytest.mark.parametrize("seal", list(SEALS))


# -- one entry ----------------------------------------------------------------------------------


@all_seals
@pytest.mark.parametrize("payload_bytes", [0, 1, 100_000])
def test_an_entry_comes_back_as_another_server_stored_it(payload_bytes: int, *, seal: str) -> None:
    objects = MemoryObjects()
    entry = Prompt(prompt(B), payload_bytes=payload_bytes).entry(Kind.BLOCK, B)
    tier = make_tier(objects, seal=seal)
    assert tier.put(entry) == []
    got = make_tier(objects, seal=seal, payload_bytes=payload_bytes).get(entry.header.key)
    assert (got.header, bytes(got.payload)) == (entry.header, entry.payload)
    assert got.retention == entry.retention


def test_an_entry_that_is_there_is_not_sent_again() -> None:
    objects = MemoryObjects()
    short = Prompt(prompt(300)).entry(Kind.BLOCK, 300)
    for tier in (make_tier(objects), make_tier(objects)):
        tier.put(short)
    assert objects.calls["write"] == 1
    objects.groups.clear()
    make_tier(objects).put(short)
    assert objects.groups  # the store may forget a group and keep what is in it


@pytest.mark.parametrize("session", ["", "\u00e4" * 65, "x" * 129])
def test_an_entry_that_no_deletion_would_find_is_not_stored(session: str) -> None:
    objects = MemoryObjects()
    with pytest.raises(EntryForgotten):
        make_tier(objects).put(Prompt(prompt(B), session=session).entry(Kind.BLOCK, B))
    assert not objects.objects


def test_touch_reports_missing_entries() -> None:
    tier = make_tier(MemoryObjects())
    blocks = Prompt(prompt(2 * B)).blocks(2)
    keys = [block.header.key for block in blocks]
    put_all(tier, blocks)
    assert tier.touch(keys) == []
    tier.drop(keys[:1])
    assert tier.touch(keys) == keys[:1]
    tier.quarantine(keys[1], "it was refused")
    for key in keys:
        with pytest.raises(EntryMissing):
            tier.get(key)


def test_a_store_that_fails_or_is_full_says_so() -> None:
    objects = MemoryObjects()
    tier = make_tier(objects)
    entry = Prompt(prompt(B)).entry(Kind.BLOCK, B)
    objects.is_full = True
    with pytest.raises(TierFull):
        tier.put(entry)
    objects.fail()
    with pytest.raises(TierFailed):
        tier.get(entry.header.key)
    with pytest.raises(TierFailed):
        looked_up(tier, prompt(B))
    tier.quarantine(entry.header.key, "it was refused")  # which cannot be done, and is no matter


@all_seals
@pytest.mark.parametrize("place", [0, 9, 200, HEAD_BYTES - 1, -20, -1])
def test_a_flipped_bit_is_found_and_the_entry_removed(place: int, *, seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    entry = Prompt(prompt(200)).entry(Kind.BLOCK, 200)
    objects.flip_bit(name_in(objects, tier, entry), place)
    with pytest.raises(EntryCorrupt):
        tier.get(entry.header.key)
    assert not objects.objects
    tier.put(entry)
    assert tier.get(entry.header.key).header == entry.header


@all_seals
@pytest.mark.parametrize("n_bytes", [0, 100, HEAD_BYTES, -1])
def test_an_object_that_was_cut_off_is_a_miss(n_bytes: int, *, seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    entry = Prompt(prompt(B)).entry(Kind.BLOCK, B)
    name = name_in(objects, tier, entry)
    objects.objects[name] = objects.objects[name][:n_bytes]
    with pytest.raises(EntryCorrupt):
        tier.get(entry.header.key)


@all_seals
def test_an_entry_under_the_name_of_another_is_a_miss(*, seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    one, other = Prompt(prompt(2 * B)).blocks(2)
    name, other_name = name_in(objects, tier, one), name_in(objects, tier, other)
    objects.objects[name] = objects.objects[other_name]
    assert looked_up(tier, prompt(2 * B)) == []
    objects.objects[name] = objects.objects[other_name]
    with pytest.raises(EntryCorrupt):
        tier.get(one.header.key)


@all_seals
def test_what_another_model_stored_is_a_miss(*, seal: str) -> None:
    objects = MemoryObjects()
    tokens = prompt(B)
    entry = Prompt(tokens).entry(Kind.BLOCK, B)
    make_tier(objects, seal=seal).put(entry)
    stranger = make_tier(objects, seal=seal, fingerprint=OTHER_MODEL)
    assert looked_up(stranger, tokens, parent=OTHER_MODEL) == []
    assert objects.objects
    assert looked_up(stranger, tokens) == []
    make_tier(objects, seal=seal).put(entry)
    with pytest.raises(EntryCorrupt):
        stranger.get(entry.header.key)


def test_a_server_with_another_key_finds_nothing() -> None:
    objects = MemoryObjects()
    tokens = prompt(300)
    put_all(make_tier(objects, seal="sealed"), [Prompt(tokens).entry(Kind.BLOCK, B)])
    stranger = tier_of(SharedStore(objects, Encrypted(bytes(32))))
    assert looked_up(stranger, tokens) == []
    assert looked_up(make_tier(objects), tokens) == []
    assert looked_up(make_tier(objects, seal="sealed"), tokens) == [(Kind.BLOCK, B)]


# -- what a lookup finds -------------------------------------------------------------------------


def test_a_conversation_is_found_from_where_the_caller_knows_it() -> None:
    objects = MemoryObjects()
    known = Prompt(prompt(900))
    put_all(make_tier(objects), [*known.blocks(3), known.entry(Kind.BLOCK, 800)])
    tier = make_tier(objects)
    blocks = [(Kind.BLOCK, stop) for stop in (256, 512, 768, 800)]
    assert looked_up(tier, known.tokens) == blocks
    for depth in range(4):
        rest = known.tokens[depth * B * TOKEN_BYTES :]
        parent = known.parents[depth]
        assert looked_up(tier, rest, parent=parent, start=depth * B) == blocks[depth:]


def test_a_block_that_stands_elsewhere_is_not_taken() -> None:
    """The start is not part of a key."""
    tier = make_tier(MemoryObjects())
    known = Prompt(prompt(B))
    put_all(tier, known.blocks(1))
    assert looked_up(tier, known.tokens, start=B) == []


def test_of_short_blocks_the_longest_that_fits_is_found() -> None:
    objects = MemoryObjects()
    known = Prompt(prompt(500))
    put_all(make_tier(objects), known.blocks(1))
    put_all(make_tier(objects), [known.entry(Kind.BLOCK, stop) for stop in (300, 400, 450)])
    tier = make_tier(objects)
    assert looked_up(tier, known.tokens)[1:] == [(Kind.BLOCK, 450)]
    assert looked_up(tier, known.tokens[: 420 * TOKEN_BYTES])[1:] == [(Kind.BLOCK, 400)]
    other_end = known.tokens[: 350 * TOKEN_BYTES] + prompt(200, seed=2)
    assert looked_up(tier, other_end)[1:] == [(Kind.BLOCK, 300)]


def test_a_short_block_that_the_store_forgot_does_not_hide_a_shorter_one() -> None:
    objects = MemoryObjects()
    tier = make_tier(objects)
    known = Prompt(prompt(200))
    tier.put(known.entry(Kind.BLOCK, 100))
    objects.lose(name_in(objects, tier, known.entry(Kind.BLOCK, 150)))
    assert looked_up(tier, known.tokens) == [(Kind.BLOCK, 100)]


def test_models_get_what_they_can_use() -> None:
    tier = make_tier(MemoryObjects())
    known = Prompt(prompt(600))
    put_all(tier, [*known.blocks(2), known.entry(Kind.BLOCK, 600)])
    put_all(tier, [known.entry(Kind.CHECKPOINT, stop) for stop in (0, 100, 256, 512, 590)])
    rows = [(Kind.BLOCK, 256), (Kind.BLOCK, 512)]
    short = [(Kind.BLOCK, 600)]
    states = [(Kind.CHECKPOINT, stop) for stop in (100, 256, 512, 590)]
    assert looked_up(tier, known.tokens) == rows + short
    assert looked_up(tier, known.tokens, has_checkpoints=True) == rows + short + states
    assert looked_up(tier, known.tokens, has_rows=False, has_checkpoints=True) == rows + states


def test_a_checkpoint_that_no_rows_lead_to_hides_none_that_can_be_used() -> None:
    tier = make_tier(MemoryObjects())
    known = Prompt(prompt(600))
    put_all(tier, [*known.blocks(2), known.entry(Kind.CHECKPOINT, 400)])
    put_all(tier, [known.entry(Kind.CHECKPOINT, stop) for stop in range(520, 600, 8)])
    found = looked_up(tier, known.tokens, has_checkpoints=True)
    assert found[2:] == [(Kind.CHECKPOINT, 400)]


@pytest.mark.parametrize("is_dear", [False, True])
def test_of_many_checkpoints_the_deepest_are_found(*, is_dear: bool) -> None:
    tier = make_tier(MemoryObjects(reads_are_dear=is_dear))
    known = Prompt(prompt(40 * B))
    positions = range(100, 20 * B, 100)
    put_all(tier, known.blocks(40))
    put_all(tier, [known.entry(Kind.CHECKPOINT, position) for position in positions])
    found = looked_up(tier, known.tokens, has_checkpoints=True)[40:]
    deepest = [(Kind.CHECKPOINT, position) for position in positions[-MAX_CHECKPOINTS:]]
    assert found == deepest


@all_seals
@pytest.mark.parametrize("damage", ["", "1", "1.x.y", "9.4.a", "1.-4.a", "1.200", "\u00b2.1.a"])
def test_a_damaged_member_is_a_miss(damage: str, *, seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    known = Prompt(prompt(300))
    put_all(tier, [known.entry(Kind.BLOCK, B), known.entry(Kind.BLOCK, 300)])
    (group,) = objects.groups
    assert looked_up(tier, known.tokens) == [(Kind.BLOCK, B), (Kind.BLOCK, 300)]
    objects.groups[group] = {damage}
    assert looked_up(tier, known.tokens) == [(Kind.BLOCK, B)]


@all_seals
def test_a_damaged_head_is_a_gap_that_the_next_put_fills(*, seal: str) -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal=seal)
    known = Prompt(prompt(3 * B))
    names = [name_in(objects, tier, block) for block in known.blocks(3)]
    objects.flip_bit(names[1], 300)
    assert looked_up(tier, known.tokens) == [(Kind.BLOCK, B)]
    put_all(tier, known.blocks(3))
    assert len(looked_up(tier, known.tokens)) == 3


def test_namespaces_share_nothing() -> None:
    objects = MemoryObjects()
    tokens = prompt(300)
    ours, theirs = namespace_root(MODEL, "ours"), namespace_root(MODEL, "theirs")
    mine = Prompt(tokens, root=ours)
    tier = make_tier(objects, namespace="ours")
    put_all(tier, [*mine.blocks(1), mine.entry(Kind.BLOCK, 300)])
    assert len(looked_up(tier, tokens, parent=ours, namespace="ours")) == 2
    assert looked_up(tier, tokens, parent=theirs, namespace="theirs") == []
    assert looked_up(tier, tokens, parent=ours, namespace="theirs") == []
    assert looked_up(tier, tokens) == []
    assert b"ours" not in objects.everything()


positions = st.sets(st.integers(1, 5 * B), max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    whole=st.sets(st.integers(1, 5)),
    short=positions,
    states=positions,
    n_shared=st.integers(0, 5 * B),
    n_tokens=st.integers(1, 5 * B),
    has_rows=st.booleans(),
    has_checkpoints=st.booleans(),
    is_dear=st.booleans(),
    seal=st.sampled_from(list(SEALS)),
)
def test_a_lookup_finds_what_an_index_of_all_entries_would_match(
    *,
    whole: set[int],
    short: set[int],
    states: set[int],
    n_shared: int,
    n_tokens: int,
    has_rows: bool,
    has_checkpoints: bool,
    is_dear: bool,
    seal: str,
) -> None:
    """A prompt that leaves the stored one somewhere, and a store that lost any part of it."""
    has_rows = has_rows or not has_checkpoints
    stored = Prompt(prompt(5 * B))
    entries = [stored.entry(Kind.BLOCK, n * B) for n in whole]
    entries += [stored.entry(Kind.BLOCK, stop) for stop in short if stop % B and has_rows]
    entries += [stored.entry(Kind.CHECKPOINT, at) for at in states if has_checkpoints]
    tier = make_tier(MemoryObjects(reads_are_dear=is_dear), seal=seal)
    put_all(tier, entries)
    tokens = (stored.tokens[: n_shared * TOKEN_BYTES] + prompt(5 * B, seed=2))[
        : n_tokens * TOKEN_BYTES
    ]

    answer = tier.look_up("", MODEL, 0, tokens, has_rows=has_rows, has_checkpoints=has_checkpoints)
    found = [head.header for head in answer.heads]

    by_key = {entry.header.key: entry.header for entry in entries}
    assert all(by_key[header.key] == header for header in found)
    assert len(set(found)) == len(found)
    # Only entries that are a prefix of the prompt can be found by name.
    fitting = [
        header
        for header in by_key.values()
        if tokens.startswith(stored.tokens[: header.stop * TOKEN_BYTES])
    ]
    assert all(header in fitting for header in found)
    matches = []
    for headers in (fitting, found):
        index = PrefixIndex(has_rows=has_rows, has_checkpoints=has_checkpoints)
        for header in headers:
            index.add(header, Where.DISK)
        matches.append(index.match(MODEL, tokens).n_tokens)
    assert matches[0] == matches[1]


# -- what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_lookup_takes_at_most_two_reads_and_one_read_of_groups(*, has_checkpoints: bool) -> None:
    objects = MemoryObjects()
    known = Prompt(prompt(128 * B + 50), payload_bytes=10)
    put_all(make_tier(objects), known.blocks(120))
    put_all(make_tier(objects), [known.entry(Kind.BLOCK, 120 * B + 9)])
    put_all(make_tier(objects), [known.entry(Kind.CHECKPOINT, at) for at in (700, 120 * B + 3)])
    objects.calls.clear()
    found = looked_up(make_tier(objects), known.tokens, has_checkpoints=has_checkpoints)
    assert len(found) == 121 + 2 * has_checkpoints
    assert objects.calls == {"read": 2, "members": 1}


def test_a_lookup_that_finds_nothing_takes_one_read() -> None:
    objects = MemoryObjects()
    assert looked_up(make_tier(objects), prompt(128 * B)) == []
    assert objects.calls == {"read": 1, "members": 1}


@pytest.mark.parametrize("n_stored", [0, 1, 7, 8, 9, 50, 127, 128])
def test_where_reads_are_dear_a_miss_reads_few_heads(n_stored: int) -> None:
    objects = MemoryObjects(reads_are_dear=True)
    tier = make_tier(objects)
    known = Prompt(prompt(128 * B), payload_bytes=10)
    put_all(tier, known.blocks(n_stored))
    assert len(looked_up(tier, known.tokens)) == n_stored
    assert len(objects.names_read) <= 2
    assert sum(objects.names_read) <= n_stored + DEAR_NAMES + 128 // DEAR_NAMES


def test_where_reads_are_dear_a_gap_ends_what_is_found() -> None:
    objects = MemoryObjects(reads_are_dear=True)
    tier = make_tier(objects)
    known = Prompt(prompt(64 * B), payload_bytes=10)
    names = [name_in(objects, tier, block) for block in known.blocks(64)]
    objects.lose(names[5])
    assert len(looked_up(tier, known.tokens)) == 5


def test_a_group_stays_small_however_much_was_stored_behind_it() -> None:
    objects = MemoryObjects()
    tier = make_tier(objects)
    for seed in range(400):
        tier.put(Prompt(prompt(100, seed=seed), payload_bytes=1).entry(Kind.BLOCK, 100))
    (members,) = objects.groups.values()
    assert len(members) <= 16
    assert MAX_MEMBERS >= 2 * B * 16
    objects.names_read.clear()
    assert looked_up(tier, prompt(120, seed=7)) == [(Kind.BLOCK, 100)]
    assert objects.names_read == [1]


def test_a_reader_of_a_sealed_store_learns_lengths_only() -> None:
    objects = MemoryObjects()
    tier = make_tier(objects, seal="sealed")
    known = Prompt(token_bytes([1_234_567_890] * 300))
    entries = [known.entry(Kind.BLOCK, stop) for stop in (256, 300)]
    entries.append(known.entry(Kind.CHECKPOINT, 300))
    put_all(tier, entries)
    seen = objects.everything()
    secrets = [token_bytes([1_234_567_890]), MODEL, SECRET]
    for entry in entries:
        key = entry.header.key
        secrets += [key, key.hex().encode(), key.hex()[:8].encode(), bytes(entry.payload)[:8]]
    assert not [secret for secret in secrets if secret in seen]
    members = [member for group in objects.groups.values() for member in group]
    assert sorted(member.rpartition(".")[0] for member in members) == ["1.44", "2.44"]
    assert len(looked_up(tier, known.tokens, has_checkpoints=True)) == 3
