"""How long drafts should be: as long as they are expected to make the step pay."""

import pytest

from rekindle.engine.speculation.lengths import KEPT, Cost, draft_lengths
from rekindle.engine.speculation.step_costs import FORGET_STEPS, STALE_STEPS, StepCosts

SURE = [0.95**n for n in range(1, 17)]
DOUBTFUL = [0.3**n for n in range(1, 17)]


def linear(per_token: float) -> Cost:
    return lambda n_drafted, n_accepted: 1 + per_token * n_drafted


def test_a_sure_draft_is_long_where_tokens_are_cheap() -> None:
    assert draft_lengths([SURE], 64, linear(0.02)) == [16]
    [length] = draft_lengths([SURE], 64, linear(0.43))
    assert 2 <= length < 16


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    assert draft_lengths([DOUBTFUL], 64, linear(0.43)) == [0]
    assert draft_lengths([SURE], 64, linear(1.0)) == [0]
    assert draft_lengths([[]], 64, linear(0.0)) == [0]
    assert draft_lengths([SURE], 0, linear(0.0)) == [0]


def test_a_jump_in_the_cost_is_overcome_by_a_longer_draft() -> None:
    """On a GPU, two tokens cost 1.5 steps and eight cost 1.7."""
    assert draft_lengths([SURE], 64, lambda n, right: 1.5 + 0.03 * n)[0] == 16


def test_the_likeliest_tokens_come_first() -> None:
    lengths = draft_lengths([SURE, DOUBTFUL, SURE], 8, linear(0.001))
    assert sum(lengths) == 8
    assert lengths[0] >= 3 <= lengths[2]
    assert lengths[1] <= 1


def test_replies_whose_tokens_are_all_sure_share_the_room() -> None:
    lengths = draft_lengths([[1.0] * 16] * 5, 64, linear(0.02))
    assert sorted(lengths) == [12, 13, 13, 13, 13]


@pytest.mark.parametrize("per_token", [0.005, 0.01, 0.1, 0.43])
def test_a_reply_without_a_draft_keeps_its_speed(per_token: float) -> None:
    cost = linear(per_token)
    lengths = draft_lengths([SURE, []], 64, cost)
    assert lengths[1] == 0
    assert KEPT * cost(sum(lengths), 0.0) <= 1


def test_the_cost_of_a_width_is_measured() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0.010)
        costs.observe(4, 0.023)
    assert costs.ratio(1, 3, 0.0) == pytest.approx(2.3)
    assert 1.0 < costs.ratio(1, 1, 0.0) < costs.ratio(1, 2, 0.0) < 2.3  # between the two
    assert costs.ratio(1, 7, 0.0) > 2.3


def test_an_unknown_width_looks_cheap_so_that_it_is_measured() -> None:
    costs = StepCosts()
    assert costs.ratio(1, 7, 0.0) < 2
    costs.observe(1, 0.01)
    assert costs.ratio(1, 7, 0.0) < 2


def test_one_slow_step_does_not_decide() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 0.01)
        costs.observe(2, 0.01)
    costs.observe(2, 10.0)
    assert costs.ratio(1, 1, 0.0) < 1.5


def test_a_width_that_was_not_measured_for_long_is_tried_again() -> None:
    costs = StepCosts()
    costs.observe(1, 0.01)
    costs.observe(8, 1.0)
    assert costs.ratio(1, 7, 0.0) > 50
    for _ in range(2 * FORGET_STEPS):
        costs.observe(1, 0.01)
    assert costs.ratio(1, 7, 0.0) < 2


def test_the_width_of_a_step_without_drafts_is_measured_from_time_to_time() -> None:
    costs = StepCosts()
    assert costs.is_stale(1)
    costs.observe(1, 0.01)
    for _ in range(STALE_STEPS - 1):
        assert not costs.is_stale(1)
        costs.observe(8, 0.02)
    costs.observe(8, 0.02)
    assert costs.is_stale(1)


def test_no_two_widths_cost_the_same_because_they_are_close() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(17, 0.054)
        costs.observe(24, 0.068)
    assert costs.ratio(17, 7, 0.0) == pytest.approx(0.068 / 0.054)


def test_sampling_accepted_tokens_has_its_price() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.observe(1, 0.010)
        costs.observe(5, 0.010)
        costs.observe_sampling(2, 0.020)
    assert costs.ratio(1, 4, 4.0) == pytest.approx(3.0)
