"""Keys over a growing list of tokens, and what two of them have in common."""

from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.entry import BLOCK_TOKENS, token_bytes
from rekindle.cache.keys import PrefixKeys

ROOT = b"r" * 16
FEW_TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(FEW_TOKENS, FEW_TOKENS, FEW_TOKENS, st.integers(0, 100))
def test_what_two_prompts_have_in_common_is_counted_in_whole_tokens(
    head: list[int], one: list[int], other: list[int], n_limit: int
) -> None:
    a, b = head + one, head + other
    n_equal = next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert PrefixKeys(ROOT, a).n_common(PrefixKeys(ROOT, b), n_limit) == min(n_equal, n_limit)


def test_ids_that_differ_in_their_last_byte_only_differ() -> None:
    a, b = PrefixKeys(ROOT, [7, 0x010203]), PrefixKeys(ROOT, [7, 0x010204])
    assert a.n_common(b, 2) == 1


def test_tokens_that_are_appended_later_count() -> None:
    tokens = [1, 2]
    growing, whole = PrefixKeys(ROOT, tokens), PrefixKeys(ROOT, [1, 2, 3, 4])
    assert growing.n_common(whole, 4) == 2
    tokens += [3, 4]
    assert growing.n_common(whole, 4) == 4
    assert growing.between(0, 4) == whole.between(0, 4)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=BLOCK_TOKENS))
def test_ids_are_stored_big_endian_whatever_the_machine(tokens: list[int]) -> None:
    assert token_bytes(tokens) == b"".join(each.to_bytes(4, "big") for each in tokens)
