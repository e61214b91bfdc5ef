"""The disk tier on a disk that works: what it keeps, what goes first, and how much it takes."""

import os
import random
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.cache.disk.catalogue import CatalogRow, Totals
from rekindle.cache.disk.reconcile import open_catalog
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import Entry, Key, Kind
from rekindle.cache.tools.directory import verify
from rekindle.errors import EntryMissing, TierFailed
from tests.cache.entries import (
    MIB,
    MODEL,
    OTHER_MODEL,
    assert_catalogue_is_true,
    bytes_by_du,
    file_of,
    fill,
    make_chain,
    make_entry,
    open_tier,
    stored_keys,
)


def rows_of(directory: Path) -> list[CatalogRow]:
    with closing(open_catalog(directory)) as catalog:
        return sorted(catalog.rows(), key=lambda row: row.header.key)


@pytest.mark.parametrize(
    "entry",
    [
        make_entry(1),
        make_entry(2, payload_bytes=0),
        make_entry(3, n_tokens=0, kind=Kind.CHECKPOINT),
        make_entry(4, n_tokens=1, payload_bytes=1),
        make_entry(5, payload_bytes=5 * MIB + 3),
    ],
    ids=["block", "no payload", "no tokens", "tiny", "large"],
)
def test_an_entry_is_the_same_after_a_restart(entry: Entry, directory: Path) -> None:
    for round in range(2):
        with closing(open_tier(directory)) as tier:
            if round == 0:
                assert tier.put(entry) == []
            assert tier.get(entry.header.key) == entry
            assert [row.header for batch in tier.rows() for row in batch] == [entry.header]


def test_of_two_servers_that_write_an_entry_at_once_one_file_and_its_own_row_stay(
    directory: Path, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_entry(1)
    header = replace(theirs.header, created_at=theirs.header.created_at + 1)
    ours = replace(theirs, header=header)
    alone = tier._alone

    @contextmanager
    def a_moment_later() -> Iterator[None]:
        with closing(open_tier(directory)) as other:
            other.put(theirs)
        with alone():
            yield

    monkeypatch.setattr(tier, "_alone", a_moment_later)
    tier.put(ours)
    assert verify(directory, lambda *_: None).problems == []


def test_an_entry_that_was_never_put_is_missing(tier: DiskTier) -> None:
    with pytest.raises(EntryMissing):
        tier.get(b"k" * 16)


def test_a_second_put_writes_nothing_and_counts_as_a_use(directory: Path, tier: DiskTier) -> None:
    entry = make_entry(1)
    tier.put(entry)
    written = file_of(directory, entry.header.key).stat()
    tier.put(entry)
    assert file_of(directory, entry.header.key).stat() == written
    assert [row.hits for row in rows_of(directory)] == [2]


def test_a_second_put_repairs_a_truncated_file(directory: Path, tier: DiskTier) -> None:
    entry = make_entry(1)
    tier.put(entry)
    os.truncate(file_of(directory, entry.header.key), 5000)
    tier.put(entry)
    assert tier.get(entry.header.key) == entry


def test_headers_come_in_batches_most_recently_used_first_without_opening_a_file(
    directory: Path, tier: DiskTier
) -> None:
    headers = [make_entry(seed, payload_bytes=0).header for seed in range(1200)]
    with closing(open_catalog(directory)) as catalog:
        for n, header in enumerate(headers):
            catalog.add([header], used_at=n)
        catalog.touch([headers[7].key], used_at=5000)
    batches = list(tier.rows())
    assert [len(batch) for batch in batches] == [1000, 200]
    expected = [headers[7], *(header for header in reversed(headers) if header is not headers[7])]
    assert [row.header for batch in batches for row in batch] == expected


def test_another_models_entries_are_counted_but_not_shown(directory: Path) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(closing(open_tier(directory)))
        theirs = stack.enter_context(closing(open_tier(directory, model=OTHER_MODEL)))
        ours.put(make_entry(1))
        theirs.put(make_entry(2, model=OTHER_MODEL))
        ours.put(make_entry(3, kind=Kind.CHECKPOINT, n_tokens=7))
        assert stored_keys(theirs) == [make_entry(2, model=OTHER_MODEL).header.key]
        totals = ours._catalog.totals()
        assert totals[MODEL] == Totals(2, 256, 24_576 + 20_480 + 2 * 128)
        assert totals[OTHER_MODEL].n_entries == 1
        assert ours.n_bytes > sum(each.n_bytes for each in totals.values())


def test_a_dropped_entry_is_gone_and_its_room_with_it(directory: Path, tier: DiskTier) -> None:
    chain = make_chain(1, 3, payload_bytes=MIB)
    for entry in chain:
        tier.put(entry)
    full = tier.n_bytes
    tier.drop([chain[2].header.key, chain[0].header.key, b"unknown, harmless"])
    assert stored_keys(tier) == [chain[1].header.key]
    assert full - tier.n_bytes >= 2 * MIB
    assert_catalogue_is_true(directory)


def test_everything_is_readable_by_the_owner_alone(directory: Path) -> None:
    before = os.umask(0)
    try:
        with closing(open_tier(directory)) as tier:
            entry = make_entry(1)
            tier.put(entry)
            tier.quarantine(entry.header.key, "for the test")
            tier.put(entry)
            modes = {
                path.name: (path.is_dir(), stat.S_IMODE(path.stat().st_mode))
                for path in [directory, *directory.rglob("*")]
            }
    finally:
        os.umask(before)
    assert {"catalog.sqlite3", "catalog.sqlite3-wal", "catalog.sqlite3-shm"} < modes.keys()
    assert all(mode == (0o700 if is_folder else 0o600) for is_folder, mode in modes.values())


# -- the budget ---------------------------------------------------------------------------------


def test_a_budget_of_ten_entries_holds_about_ten(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=10 * MIB)) as tier:
        for seed in range(40):
            tier.put(make_entry(seed, payload_bytes=MIB))
            if seed >= 10:
                assert 9 <= len(stored_keys(tier)) <= 10


def test_the_budget_holds_under_churn_measured_from_outside(directory: Path) -> None:
    budget_bytes = 6 * MIB
    noise = random.Random(1)
    parents: list[Key | None] = [None]
    with closing(open_tier(directory, budget_bytes=budget_bytes)) as tier:
        for seed in range(240):
            size = noise.choice([100, 5_000, 60_000, 300_000])
            entry = make_entry(
                seed,
                parent=noise.choice(parents[-20:]),
                payload_bytes=size,
                compute_seconds=noise.random(),
            )
            evicted = tier.put(entry)
            parents = [key for key in [*parents, entry.header.key] if key not in evicted]
            tier.touch([key for key in noise.choices(parents, k=3) if key])
            if seed % 2:
                assert bytes_by_du(directory) <= tier.n_bytes <= budget_bytes
        assert tier.n_bytes > budget_bytes - 700_000
        # Two folders of names, a log and a table of rows are most of what is not an entry.
        assert tier.n_bytes - bytes_by_du(directory) < 300_000
        assert_catalogue_is_true(directory)


def test_an_entry_beyond_the_budget_is_refused_and_evicts_nothing(
    directory: Path,
) -> None:
    with closing(open_tier(directory, budget_bytes=2 * MIB)) as tier:
        tier.put(make_entry(1))
        with pytest.raises(TierFailed, match="does not fit"):
            tier.put(make_entry(2, payload_bytes=2 * MIB))
        assert stored_keys(tier) == [make_entry(1).header.key]


def test_a_smaller_budget_is_kept_with_the_next_put(directory: Path) -> None:
    with closing(open_tier(directory)) as tier:
        for seed in range(150):
            tier.put(make_entry(seed, payload_bytes=100_000))
    with closing(open_tier(directory, budget_bytes=3 * MIB)) as tier:
        evicted = tier.put(make_entry(1000, payload_bytes=100_000))
        assert len(evicted) == 151 - len(stored_keys(tier)) > 100
        assert bytes_by_du(directory) <= 3 * MIB
    assert_catalogue_is_true(directory)


def test_the_catalogue_shrinks_when_its_rows_go(directory: Path, tier: DiskTier) -> None:
    keys = []
    for seed in range(200):
        entry = make_entry(seed, payload_bytes=1)
        keys.append(entry.header.key)
        tier.put(entry)
    tier.close()
    full = (directory / "catalog.sqlite3").stat().st_size
    tier.open()
    for key in keys[:-10]:
        tier.drop([key])
    tier.close()
    assert (directory / "catalog.sqlite3").stat().st_size < full / 3


# -- what goes first ----------------------------------------------------------------------------


def test_the_cheapest_to_compute_goes_first(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=5 * MIB)) as tier:
        seconds = [3.5, 1.0, 4.5, 2.5]
        entries = [
            make_entry(seed, payload_bytes=MIB, compute_seconds=each)
            for seed, each in enumerate(seconds)
        ]
        assert fill(tier, entries) == []
        evicted = fill(tier, [make_entry(n, payload_bytes=MIB) for n in (10, 11)])
        # What goes moves the clock, so the newcomer of 1 s stands between 1 and 2.5.
        assert evicted == [entries[1].header.key, make_entry(10).header.key]


def test_use_outweighs_cost_and_age_outweighs_use(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=4 * MIB)) as tier:
        used, idle = (make_entry(seed, payload_bytes=MIB) for seed in (1, 2))
        fill(tier, [used, idle])
        tier.touch([used.header.key])
        newcomers = [make_entry(seed, payload_bytes=MIB) for seed in range(10, 20)]
        evicted = fill(tier, newcomers)
        assert evicted[0] == idle.header.key
        assert used.header.key in evicted[1:]
        assert used.header.key not in evicted[:2]


def test_a_leaf_is_evicted_before_its_parent_even_if_it_costs_more(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=5 * MIB)) as tier:
        chain = make_chain(1, 3, payload_bytes=MIB)
        fill(tier, chain)
        for _ in range(5):
            tier.touch([chain[2].header.key])
        evicted = fill(tier, [make_entry(n, payload_bytes=MIB) for n in range(10, 40)])
        order = [evicted.index(entry.header.key) for entry in chain]
        assert order == sorted(order, reverse=True)


def test_storing_an_entry_never_evicts_its_parents(directory: Path) -> None:
    with closing(open_tier(directory, budget_bytes=4 * MIB)) as tier:
        chain = make_chain(1, 3, payload_bytes=MIB)
        fill(tier, chain[:2])
        for seed in (5, 6):
            tier.put(make_entry(seed, payload_bytes=MIB // 2, compute_seconds=99.0))
        tier.put(chain[2])
        assert {entry.header.key for entry in chain} <= set(stored_keys(tier))


def test_leased_entries_stay_and_a_new_one_is_refused_if_all_are_leased(
    directory: Path,
) -> None:
    leased: set[Key] = set()
    with closing(open_tier(directory, budget_bytes=4 * MIB, is_leased=leased.__contains__)) as tier:
        first, second, third = (make_entry(seed, payload_bytes=MIB) for seed in (1, 2, 3))
        fill(tier, [first, second, third])
        leased |= {first.header.key, third.header.key}
        assert tier.put(make_entry(4, payload_bytes=MIB)) == [second.header.key]
        leased |= {make_entry(4, payload_bytes=MIB).header.key}
        with pytest.raises(TierFailed, match="in use"):
            tier.put(second)
        assert len(stored_keys(tier)) == 3
        leased.clear()
        assert len(tier.put(second)) == 1


def test_models_share_one_budget(directory: Path) -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(closing(open_tier(directory, budget_bytes=4 * MIB)))
        theirs = stack.enter_context(
            closing(open_tier(directory, budget_bytes=4 * MIB, model=OTHER_MODEL))
        )
        fill(ours, [make_entry(seed, payload_bytes=MIB) for seed in range(3)])
        evicted = fill(
            theirs,
            [make_entry(9 + n, model=OTHER_MODEL, payload_bytes=MIB) for n in range(2)],
        )
        assert set(evicted) <= {make_entry(seed).header.key for seed in range(3)}
        assert bytes_by_du(directory) <= 4 * MIB
        with pytest.raises(EntryMissing):
            ours.get(evicted[0])


# -- the catalogue ------------------------------------------------------------------------------


def test_a_catalogue_made_from_the_files_equals_the_one_that_was_lost(directory: Path) -> None:
    with closing(open_tier(directory, now=lambda: 0.0)) as tier:
        chain = make_chain(1, 5)
        tips = [make_entry(90 + n, parent=chain[3].header.key, n_tokens=n) for n in range(1, 4)]
        for entry in [*chain, *tips, make_entry(80, kind=Kind.CHECKPOINT, n_tokens=3)]:
            tier.put(entry)
        totals = tier._catalog.totals()
    before = rows_of(directory)
    for file in directory.glob("catalog*"):
        file.unlink()
    seen: list[tuple[int, int]] = []
    tier = DiskTier(directory, fingerprint=MODEL, budget_bytes=MIB, is_leased=lambda key: False)
    tier.open_as_it_is()
    tier.reconcile(on_progress=lambda done, total: seen.append((done, total)))
    with closing(tier):
        assert tier._catalog.totals() == totals
    assert seen == [(9, 9)]
    assert_catalogue_is_true(directory)
    after = rows_of(directory)
    assert [row.header for row in after] == [row.header for row in before]
    assert all(row.last_used_at == row.header.created_at and row.hits == 1 for row in after)


def test_files_without_a_row_are_adopted_and_rows_without_a_file_forgotten(
    directory: Path,
) -> None:
    orphan, ghost, sound = (make_entry(seed) for seed in (1, 2, 3))
    with closing(open_tier(directory)) as tier:
        fill(tier, [orphan, ghost, sound])
    with closing(open_catalog(directory)) as catalog:
        catalog.remove([orphan.header.key])
    file_of(directory, ghost.header.key).unlink()
    with closing(open_tier(directory)) as tier:
        assert set(stored_keys(tier)) == {orphan.header.key, sound.header.key}
        assert tier.get(orphan.header.key) == orphan
    assert_catalogue_is_true(directory)


def test_a_tool_finds_entries_of_every_model_and_sums_them_up(directory: Path) -> None:
    ours, theirs = make_entry(1), make_entry(2, model=OTHER_MODEL, n_tokens=5)
    for entry in (ours, theirs):
        with closing(open_tier(directory, model=entry.header.fingerprint)) as tier:
            tier.put(entry)
    with closing(open_catalog(directory)) as catalog:
        assert {row.header for row in catalog.rows()} == {ours.header, theirs.header}
        [(row,)] = catalog.batches(fingerprint=MODEL)
        assert (row.header, row.hits, row.last_used_at) == (ours.header, 1, 1_800_000_000.0)
        assert row.header.file_bytes == file_of(directory, ours.header.key).stat().st_size
        assert catalog.totals() == {
            MODEL: Totals(1, 256, 24_576 + 128),
            OTHER_MODEL: Totals(1, 5, 20_480 + 128),
        }


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "drop", "touch"]), st.integers(0, 11)),
        max_size=40,
    )
)
def test_rows_children_and_totals_stay_true(steps: list[tuple[str, int]]) -> None:
    # A tree of 12: entry n follows entry (n - 1) // 2. Parents may come after their children.
    tree: list[Entry] = []
    for n in range(12):
        parent = tree[(n - 1) // 2].header.key if n else None
        tree.append(make_entry(n, parent=parent, payload_bytes=n * 1000))
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        with closing(open_tier(directory)) as tier:
            held: set[Key] = set()
            for verb, n in steps:
                key = tree[n].header.key
                if verb == "put":
                    held |= {key}
                    tier.put(tree[n])
                elif verb == "drop":
                    held -= {key}
                    tier.drop([key])
                else:
                    tier.touch([key])
            assert set(stored_keys(tier)) == held
            assert_catalogue_is_true(directory)


def test_readers_on_other_threads_see_whole_entries_or_none(directory: Path) -> None:
    entries = {entry.header.key: entry for entry in (make_entry(n) for n in range(60))}

    def read(tier: DiskTier, seed: int) -> int:
        noise = random.Random(seed)
        n_found = 0
        for _ in range(300):
            key = noise.choice(list(entries))
            try:
                assert tier.get(key) == entries[key]
                n_found += 1
            except EntryMissing:
                pass
        return n_found

    with (
        closing(open_tier(directory, budget_bytes=MIB)) as tier,
        ThreadPoolExecutor(max_workers=3) as pool,
    ):
        readers = [pool.submit(read, tier, seed) for seed in range(3)]
        while not all(reader.done() for reader in readers):
            for entry in entries.values():
                tier.put(entry)
        assert all(reader.result() > 0 for reader in readers)
        assert_catalogue_is_true(directory)
