from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.entry import (
    BLOCK_TOKENS,
    Header,
    Key,
    Kind,
    Reason,
    entry_key,
    token_bytes,
)
from rekindle.cache.tools.inventory import Inventory, Listed

ROOT = b"m" * 16
WHOLE = list(range(BLOCK_TOKENS))


@dataclass
class Rows:
    rows: list[CatalogRow] = field(default_factory=list)

    def add(
        self,
        tokens: list[int],
        *,
        parent: Key = ROOT,
        kind: Kind = Kind.BLOCK,
        start: int = 0,
        used_at: float = 0.0,
        payload_bytes: int = 1000,
    ) -> Key:
        packed = token_bytes(tokens)
        key = entry_key(parent, kind, packed)
        header = Header(
            key=key,
            parent=parent,
            fingerprint=ROOT,
            kind=kind,
            start=start,
            tokens=packed,
            payload_bytes=payload_bytes,
            compute_seconds=1.0,
            reason=Reason.PREFILL,
            created_at=0.0,
        )
        self.rows.append(CatalogRow(header, used_at, 1))
        return key

    @property
    def tips(self) -> set[Key]:
        return {entry.key for entry in Inventory(self.rows).tips()}


def test_a_conversation_is_listed_where_it_ends() -> None:
    rows = Rows()
    shared = rows.add(WHOLE)
    one = rows.add([1, 2], parent=shared, start=BLOCK_TOKENS)
    two = rows.add([3], parent=shared, start=BLOCK_TOKENS)
    assert rows.tips == {one, two}


def test_a_prefix_of_a_longer_conversation_is_not_listed() -> None:
    rows = Rows()
    shared = rows.add(WHOLE)
    rows.add([1, 2], parent=shared, start=BLOCK_TOKENS)
    longer = rows.add([1, 2, 3], parent=shared, start=BLOCK_TOKENS)
    another = rows.add([1, 4], parent=shared, start=BLOCK_TOKENS)
    assert rows.tips == {longer, another}


def test_checkpoints_on_the_way_are_not_conversations() -> None:
    rows = Rows()
    rows.add(WHOLE[:100], kind=Kind.CHECKPOINT)
    block = rows.add(WHOLE)
    rows.add([], parent=block, kind=Kind.CHECKPOINT, start=BLOCK_TOKENS)
    end = rows.add([1, 2], parent=block, start=BLOCK_TOKENS)
    rows.add([1, 2], parent=block, kind=Kind.CHECKPOINT, start=BLOCK_TOKENS)
    assert rows.tips == {end}


def test_a_checkpoint_at_the_end_of_the_last_block_is_where_it_ends() -> None:
    rows = Rows()
    block = rows.add(WHOLE)
    end = rows.add([], parent=block, kind=Kind.CHECKPOINT, start=BLOCK_TOKENS)
    assert rows.tips == {end}


def test_a_chain_counts_its_parents_and_knows_whether_one_is_missing() -> None:
    rows = Rows()
    first = rows.add(WHOLE)
    second = rows.add(WHOLE, parent=first, start=BLOCK_TOKENS)
    third = rows.add([1], parent=second, start=2 * BLOCK_TOKENS)
    [whole] = Inventory(rows.rows).tips()
    assert whole.is_complete
    assert whole.chain_bytes == sum(entry.n_bytes for entry in Inventory(rows.rows).entries)
    assert [entry.key for entry in Inventory(rows.rows).chain(whole)] == [first, second, third]

    [broken] = [entry for entry in Inventory(rows.rows[1:]).entries if entry.key == third]
    assert not broken.is_complete
    assert [entry.key for entry in Inventory(rows.rows[1:]).chain(broken)] == [second, third]


def pruned(rows: Rows, *, to_bytes: int | None = None, before: float | None = None) -> list[Key]:
    entries = Inventory(rows.rows).to_prune(to_bytes=to_bytes, used_before=before, now=0.0)
    return [entry.key for entry in entries]


def test_an_old_parent_outlives_what_was_used_later() -> None:
    rows = Rows()
    parent = rows.add(WHOLE, used_at=1)
    fresh = rows.add([1], parent=parent, start=BLOCK_TOKENS, used_at=9)
    stale = rows.add([2], parent=parent, start=BLOCK_TOKENS, used_at=2)
    assert pruned(rows, before=5) == [stale]
    assert pruned(rows, to_bytes=0) == [stale, fresh, parent]


def test_pruning_removes_the_end_of_a_turn_first() -> None:
    rows = Rows()
    early = rows.add(WHOLE[:1], kind=Kind.CHECKPOINT, used_at=5)
    parent = rows.add(WHOLE, used_at=5)
    late = rows.add([1], parent=parent, start=BLOCK_TOKENS, used_at=5)
    assert pruned(rows, to_bytes=0)[0] == late
    assert set(pruned(rows, to_bytes=0)) == {early, parent, late}


@st.composite
def forests(draw: st.DrawFn) -> Rows:
    rows = Rows()
    for number in range(draw(st.integers(1, 30))):
        above = draw(st.sampled_from([None, *rows.rows]))
        rows.add(
            [number],
            parent=above.header.key if above else ROOT,
            start=above.header.start + BLOCK_TOKENS if above else 0,
            used_at=draw(st.floats(0, 9)),
            payload_bytes=draw(st.integers(0, 100_000)),
        )
    return rows


def size(entries: list[Listed]) -> int:
    return sum(entry.n_bytes for entry in entries)


@given(forests(), st.none() | st.integers(0, 10**6), st.none() | st.floats(0, 9))
def test_pruning_keeps_every_parent_and_takes_no_more_than_it_must(
    rows: Rows, to_bytes: int | None, before: float | None
) -> None:
    inventory = Inventory(rows.rows)
    gone = inventory.to_prune(to_bytes=to_bytes, used_before=before, now=0.0)
    gone_keys = {entry.key for entry in gone}
    kept = [entry for entry in inventory.entries if entry.key not in gone_keys]
    kept_keys = {entry.key for entry in kept}
    assert len(gone) == len(gone_keys)
    assert all(entry.row.header.parent in kept_keys | {ROOT} for entry in kept)
    if to_bytes is not None:
        assert size(kept) <= to_bytes
    if gone and (before is None or gone[-1].row.last_used_at >= before):
        assert to_bytes is not None
        assert size([*kept, gone[-1]]) > to_bytes
    followed = {entry.row.header.parent for entry in kept}
    if before is not None:
        leaves = [entry for entry in kept if entry.key not in followed]
        assert all(entry.row.last_used_at >= before for entry in leaves)
