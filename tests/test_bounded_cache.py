"""`BoundedCache` against a plain model of it."""

from hypothesis import given
from hypothesis import strategies as st

from rekindle.bounded_cache import BoundedCache

Steps = st.lists(st.tuples(st.sampled_from("gpd"), st.integers(0, 6), st.integers(0, 40)))


def test_the_least_recently_used_item_is_evicted_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_items=2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    assert cache.peek("b") == 2  # and is still the oldest
    assert cache.put("c", 3) == [("b", 2)]
    assert list(cache) == ["a", "c"]


def test_values_come_least_recently_used_first_and_reading_them_is_no_use() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_items=3)
    for value, key in enumerate("abc"):
        cache.put(key, value)
    cache.get("a")
    assert cache.values() == [1, 2, 0]
    assert list(cache) == ["b", "c", "a"]


def test_a_value_beyond_the_byte_limit_is_not_kept_and_evicts_nothing_else() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_bytes=10)
    cache.put("small", 1, n_bytes=4)
    assert cache.put("large", 2, n_bytes=11) == [("large", 2)]
    assert list(cache.items()) == [("small", 1)]
    assert cache.put("small", 3, n_bytes=11) == [("small", 3)]
    assert cache.n_bytes == len(cache) == 0


def test_a_replaced_value_keeps_its_size_and_is_the_most_recently_used() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_bytes=10)
    cache.put("a", 1, n_bytes=4)
    cache.put("b", 2, n_bytes=4)
    cache.replace("a", 3)
    assert (list(cache.items()), cache.n_bytes) == ([("b", 2), ("a", 3)], 8)
    assert cache.put("c", 4, n_bytes=4) == [("b", 2)]


def test_a_spared_item_is_not_evicted_for_a_new_one() -> None:
    cache: BoundedCache[str, int] = BoundedCache(max_items=2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.put("c", 3, is_spared="a".__eq__) == [("c", 3)]
    assert cache.put("d", 4, is_spared="b".__eq__) == [("a", 1)]
    assert list(cache) == ["b", "d"]


@given(Steps)
def test_bytes_and_items_stay_within_bounds_and_agree_with_a_list(
    steps: list[tuple[str, int, int]],
) -> None:
    cache: BoundedCache[int, int] = BoundedCache(max_items=4, max_bytes=100)
    model: list[tuple[int, int]] = []  # key, size; the value is the size
    for step, key, size in steps:
        held = next((item for item in model if item[0] == key), None)
        if step == "p":
            model = [item for item in model if item[0] != key] + [(key, size)]
            while len(model) > 4 or sum(size for _, size in model) > 100:
                model.pop(0)
            cache.put(key, size, n_bytes=size)
        elif step == "g":
            assert cache.get(key) == (held[1] if held else None)
            if held:
                model.remove(held)
                model.append(held)
        else:
            assert cache.pop(key) == (held[1] if held else None)
            model = [item for item in model if item[0] != key]
        assert list(cache) == [key for key, _ in model]
        assert cache.n_bytes == sum(size for _, size in model)
