"""The floor of a replay agrees with the reference floor of the tests."""

from hypothesis import given
from hypothesis import strategies as st

from rekindle.replay.floor import Floor, units_of_text, units_of_tokens
from tests.support.workloads import ReferenceFloor

# The digits of ids that share bytes must not count as shared tokens.
tokens = st.lists(st.sampled_from([1, 2, 256, 257, 70000]), max_size=6)


@given(st.lists(tokens, max_size=8), tokens)
def test_the_floor_is_the_prompt_without_its_longest_known_prefix(
    known: list[list[int]], prompt: list[int]
) -> None:
    floor, tree = Floor(), ReferenceFloor()
    for each in known:
        assert floor.n_new(units_of_tokens(each)) == tree.n_new(each)
        floor.learn(units_of_tokens(each))
        tree.learn(each)
    assert floor.n_new(units_of_tokens(prompt)) == tree.n_new(prompt)


def test_characters_count_one_each() -> None:
    floor = Floor()
    floor.learn(units_of_text("caf\u00e9 au lait"))
    assert floor.n_new(units_of_text("caf\u00e9 noir")) == 4
