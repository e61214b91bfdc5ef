"""The table of n-grams: what was put is found at its place, one by one or all at once."""

import random

import numpy as np
import pytest

from rekindle.cache.drafts.ngrams import NgramTable

SEED = 7


def as_array(tokens: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return np.array(tokens, dtype=np.uint64)


@pytest.mark.parametrize("n", [3, 4])
def test_tokens_that_were_put_at_once_are_found_one_by_one(n: int) -> None:
    noise = random.Random(1)
    tokens = [noise.randrange(150_000) for _ in range(200)]
    table = NgramTable(n, 2**14)
    table.put_all(as_array(tokens), 1000, SEED)
    found = [table.find(tokens[i - n : i], SEED) for i in range(n, len(tokens) + 1)]
    expected = [1000 + i for i in range(n, len(tokens) + 1)]
    assert sum(a == b for a, b in zip(found, expected, strict=True)) > 190  # a few share a slot


def test_the_last_occurrence_is_found() -> None:
    table = NgramTable(3, 1024)
    table.put_all(as_array([1, 2, 3, 9, 1, 2, 3, 8]), 0)
    assert table.find([1, 2, 3]) == 7
    table.put([1, 2, 3], 50)
    assert table.find([1, 2, 3]) == 50


def test_used_slots_are_spared_on_request() -> None:
    table = NgramTable(3, 1024)
    table.put([1, 2, 3], 50)
    table.put_all(as_array([1, 2, 3, 4]), 0, spare=True)
    assert table.find([1, 2, 3]) == 50
    assert table.find([2, 3, 4]) == 4


def test_another_seed_finds_nothing() -> None:
    table = NgramTable(3, 2**16)
    table.put([1, 2, 3], 5, seed=1)
    assert table.find([1, 2, 3], seed=2) is None


def test_fewer_tokens_than_an_n_gram_change_nothing() -> None:
    table = NgramTable(4, 1024)
    table.put_all(as_array([1, 2, 3]), 0)
    assert table.find([0, 1, 2, 3]) is None
