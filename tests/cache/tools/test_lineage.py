"""Which entries a prompt needs: blocks, the checkpoints between them, and rows after the last."""

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
from rekindle.cache.names import Named
from rekindle.cache.tools.inventory import Inventory
from rekindle.cache.tools.lineage import Lineage, Stored
from tests.cache.entries import MODEL

PROMPT = list(range(2 * BLOCK_TOKENS + 40))
BLOCK = Kind.BLOCK
CHECKPOINT = Kind.CHECKPOINT


def row(kind: Kind, parent: Key, start: int, tokens: list[int]) -> CatalogRow:
    encoded = token_bytes(tokens)
    header = Header(
        key=entry_key(parent, kind, encoded),
        parent=parent,
        fingerprint=MODEL,
        kind=kind,
        start=start,
        tokens=encoded,
        payload_bytes=10,
        compute_seconds=1.0,
        reason=Reason.PREFILL,
        created_at=0.0,
    )
    return CatalogRow(header, 0.0, 1)


FIRST = row(BLOCK, MODEL, 0, PROMPT[:BLOCK_TOKENS])
SECOND = row(BLOCK, FIRST.header.key, BLOCK_TOKENS, PROMPT[BLOCK_TOKENS : 2 * BLOCK_TOKENS])
AFTER = 2 * BLOCK_TOKENS


def behind_second(kind: Kind, tokens: list[int]) -> CatalogRow:
    return row(kind, SECOND.header.key, AFTER, tokens)


def lineage_of(tokens: list[int], *rows: CatalogRow, root: Key = MODEL) -> Lineage:
    named = Named(root=root, name="n", tokens=token_bytes(tokens), session="s", named_at=0.0)
    return Stored(Inventory([FIRST, SECOND, *rows]), [named]).of_name(named)


def keys(lineage: Lineage) -> list[Key]:
    return [entry.key for entry in lineage.entries]


def key_of(*rows: CatalogRow) -> list[Key]:
    return [each.header.key for each in rows]


def test_the_blocks_of_a_prompt_come_in_order_and_no_others() -> None:
    tail = behind_second(BLOCK, PROMPT[AFTER:])
    fork = behind_second(BLOCK, [9999, *PROMPT[AFTER + 1 :]])
    found = lineage_of(PROMPT, fork, tail)
    assert keys(found) == key_of(FIRST, SECOND, tail)
    assert (found.n_found, found.n_tokens) == (len(PROMPT), len(PROMPT))


def test_a_longer_block_stands_in_for_the_end_of_a_prompt() -> None:
    longer = behind_second(BLOCK, [*PROMPT[AFTER:], 7, 8, 9])
    found = lineage_of(PROMPT, longer)
    assert keys(found) == key_of(FIRST, SECOND, longer)
    assert found.n_found == len(PROMPT)


def test_of_blocks_that_hold_the_end_the_shortest_goes() -> None:
    longer = behind_second(BLOCK, [*PROMPT[AFTER:], 7, 8, 9])
    exact = behind_second(BLOCK, PROMPT[AFTER:])
    assert keys(lineage_of(PROMPT, longer, exact)) == key_of(FIRST, SECOND, exact)


def test_a_checkpoint_comes_with_the_rows_that_lead_to_it() -> None:
    checkpoint = behind_second(CHECKPOINT, PROMPT[AFTER : AFTER + 20])
    elsewhere = behind_second(CHECKPOINT, [9999])
    rows = behind_second(BLOCK, PROMPT[AFTER:])
    stored = Stored(Inventory([FIRST, SECOND, checkpoint, elsewhere, rows]), [])
    [entry] = stored.inventory.find(checkpoint.header.key.hex())
    found = stored.of_entry(entry)
    assert keys(found) == key_of(FIRST, SECOND, checkpoint, rows)
    assert found.n_found == AFTER + 20


def test_checkpoints_on_the_way_come_along() -> None:
    early = row(CHECKPOINT, FIRST.header.key, BLOCK_TOKENS, PROMPT[BLOCK_TOKENS : BLOCK_TOKENS + 5])
    at_its_end = row(CHECKPOINT, SECOND.header.key, AFTER, [])
    found = lineage_of(PROMPT, early, at_its_end)
    assert keys(found) == key_of(FIRST, early, SECOND, at_its_end)
    assert found.n_found == AFTER


def test_another_namespace_has_nothing_of_it() -> None:
    assert lineage_of(PROMPT, root=b"n" * 16).entries == ()


def test_a_name_is_listed_with_the_entry_in_which_its_prompt_ends() -> None:
    tail = behind_second(BLOCK, PROMPT[AFTER:])
    given = [
        Named(root=MODEL, name=name, tokens=token_bytes(tokens), session="s", named_at=0.0)
        for name, tokens in (("a", PROMPT), ("b", PROMPT[:AFTER]), ("gone", [5, 5]))
    ]
    stored = Stored(Inventory([FIRST, SECOND, tail]), given)
    assert stored.names_by_entry() == {tail.header.key: ["a"], SECOND.header.key: ["b"]}
