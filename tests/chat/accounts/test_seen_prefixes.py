"""Which prefixes were computed: counted, never matched."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.accounts.seen_prefixes import GRAIN, SeenPrefixes, Tokens
from tests.support.workloads import ReferenceFloor


def tokens_of(ids: list[int]) -> Tokens:
    return np.array(ids, np.int32)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=6),
    st.lists(st.integers(0, 2), max_size=60),
)
def test_what_is_known_is_the_longest_prefix_ever_added(
    added: list[list[int]], asked: list[int]
) -> None:
    seen, floor = SeenPrefixes(), ReferenceFloor()
    for ids in added:
        seen.add("", tokens_of(ids))
        floor.learn(ids[: len(ids) // GRAIN * GRAIN])
    n_shared = len(asked) - floor.n_new([*asked, -1]) + 1
    assert seen.n_known("", tokens_of(asked)) == n_shared // GRAIN * GRAIN


def test_equal_tokens_at_other_places_are_not_known() -> None:
    seen = SeenPrefixes()
    ids = list(range(2 * GRAIN))
    seen.add("", tokens_of(ids))
    swapped = [ids[1], ids[0], *ids[2:]]
    assert seen.n_known("", tokens_of(swapped)) == 0
    assert seen.n_known("", tokens_of(ids[GRAIN:] + ids[:GRAIN])) == 0
    assert seen.n_known("", tokens_of([*ids[:GRAIN], *ids[:GRAIN]])) == GRAIN


def test_namespaces_know_nothing_of_each_other() -> None:
    seen = SeenPrefixes()
    ids = tokens_of(list(range(64)))
    seen.add("one", ids)
    assert seen.n_known("one", ids) == 64
    assert seen.n_known("other", ids) == 0


def test_old_prefixes_are_dropped_and_the_last_one_stays() -> None:
    seen = SeenPrefixes()
    for seed in range(40):
        ids = np.random.default_rng(seed).integers(0, 1 << 17, 1_000_000, dtype=np.int32)
        seen.add("", ids)
    assert seen.n_known("", ids) == len(ids)
