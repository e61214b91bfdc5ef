"""The decisions as tables, and the small state they are learnt into."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.policy import (
    CHECKPOINT_INTERVAL,
    EXPORT_BURST_SECONDS,
    MIN_SPACING,
    TAIL_GRAIN,
    CellTax,
    ExportPace,
    LoadableSpan,
    Speed,
    WriteBudget,
    WriteRules,
    admits_to_disk,
    best_cut,
    checkpoint_positions,
    priority,
    should_park,
    surplus_checkpoints,
)
from rekindle.config.choices import WritePolicy

HOUR = 3600.0


@pytest.mark.parametrize(
    ("goes_first", "stays"),
    [
        (priority(0.0, 1.0, 4096, 1), priority(0.0, 1.0, 4096, 2)),
        (priority(0.0, 1.0, 8192, 1), priority(0.0, 1.0, 4096, 1)),
        (priority(0.0, 1.0, 4096, 1), priority(0.0, 2.0, 4096, 1)),
        (priority(0.0, 1.0, 4096, 9), priority(1.0, 1.0, 4096, 1)),
    ],
    ids=["less used", "larger", "cheaper to compute", "long ago"],
)
def test_eviction_priority(goes_first: float, stays: float) -> None:
    assert goes_first < stays


def test_an_entry_without_rows_does_not_rule_the_clock() -> None:
    assert priority(0.0, 1.0, 0, 1) < 100 * priority(0.0, 1.0, 100_000, 1)


def test_a_speed_is_unknown_until_something_took_time() -> None:
    speed = Speed()
    assert speed.seconds(10) is None
    speed.observe(0, 0.5)
    assert speed.seconds(10) is None


def test_a_speed_follows_what_is_observed_now() -> None:
    speed = Speed()
    for _ in range(20):
        speed.observe(100, 1.0)
    assert speed.seconds(200) == pytest.approx(2.0)
    for _ in range(20):
        speed.observe(100, 3.0)
    assert speed.seconds(200) == pytest.approx(6.0, rel=0.05)


def test_a_small_amount_says_little_about_a_speed() -> None:
    speed = Speed()
    speed.observe(1000, 1.0)
    speed.observe(1, 1.0)
    assert speed.seconds(1000) == pytest.approx(2.2, rel=0.05)


def test_a_refused_load_is_tried_again_after_a_while() -> None:
    speed = Speed()
    speed.observe(100, 5.0)
    for _ in range(16):
        speed.soften()
    seconds = speed.seconds(100)
    assert seconds is not None
    assert seconds < 1.0


@pytest.mark.parametrize(
    ("spans", "prefill", "cut"),
    [
        ([], 1.0, 0),
        ([LoadableSpan(10, 5.0)], 1.0, 1),
        ([LoadableSpan(10, 15.0)], 1.0, 0),
        ([LoadableSpan(10, 10.0)], 1.0, 1),
        ([LoadableSpan(10, 15.0)], None, 1),
        ([LoadableSpan(10, None)], 1.0, 1),
        ([LoadableSpan(10, 1.0), LoadableSpan(10, 15.0)], 1.0, 1),
        ([LoadableSpan(10, 15.0), LoadableSpan(10, 1.0)], 1.0, 2),
        ([LoadableSpan(10, 15.0), LoadableSpan(10, 6.0)], 1.0, 0),
        (
            [
                LoadableSpan(10, 1.0),
                LoadableSpan(10, 15.0),
                LoadableSpan(10, 4.0),
                LoadableSpan(10, 30.0),
            ],
            1.0,
            3,
        ),
    ],
    ids=[
        "nothing stored",
        "faster to load",
        "faster to compute",
        "as fast: loading leaves the processor to others",
        "prefill not measured",
        "load not measured",
        "slow tail",
        "a slow head that a fast tail pays for",
        "a slow head that it does not pay for",
        "the best cut is inside",
    ],
)
def test_where_loading_ends(spans: list[LoadableSpan], prefill: float | None, cut: int) -> None:
    assert best_cut(spans, prefill) == cut


@pytest.mark.parametrize(
    ("n_start", "n_prompt", "boundaries", "positions"),
    [
        (0, 50, [], []),
        (0, 64, [], []),
        (0, 65, [], [64]),
        (0, 500, [], [448]),
        (0, 512, [], [448]),
        (0, 500, [200], [200, 448]),
        (0, 500, [200, 450], [200, 450]),
        (0, 500, [200, 220, 450], [200, 450]),
        (0, 500, [420, 440], [420, 440]),
        (0, 500, [435], [435, 448]),
        (200, 500, [100, 200, 300, 500, 600], [300, 448]),
        (460, 500, [], []),
        (0, 5000, [4990], [2048, 4096, 4990]),
        (0, 5000, [1000, 4990], [1000, 3048, 4990]),
        (0, 4110, [4100], [2048, 4100]),
        (3000, 5000, [4990], [4990]),
    ],
    ids=[
        "short prompt",
        "no position inside",
        "just one",
        "the tail",
        "the end itself is no checkpoint's place",
        "a boundary and the tail",
        "a boundary near the end is the tail",
        "too close behind another",
        "too close behind another, but it is the tail",
        "the tail is kept however close",
        "only what is being computed",
        "the start is near enough to the end",
        "every interval",
        "the interval counts from the boundary",
        "a boundary wins over an interval",
        "the interval counts from the start",
    ],
)
def test_where_checkpoints_are_taken(
    n_start: int, n_prompt: int, boundaries: list[int], positions: list[int]
) -> None:
    assert checkpoint_positions(n_start, n_prompt, boundaries) == positions


@given(
    n_start=st.integers(0, 9000),
    n_more=st.integers(1, 9000),
    boundaries=st.lists(st.integers(0, 18000), max_size=20).map(sorted),
)
def test_checkpoints_are_never_far_apart_and_seldom_close(
    n_start: int, n_more: int, boundaries: list[int]
) -> None:
    n_prompt = n_start + n_more
    positions = checkpoint_positions(n_start, n_prompt, boundaries)
    assert all(n_start < position < n_prompt for position in positions)
    assert n_prompt - max(positions, default=n_start) <= TAIL_GRAIN
    gaps = [behind - before for before, behind in pairwise([n_start, *positions])]
    assert all(gap < CHECKPOINT_INTERVAL + MIN_SPACING for gap in gaps)
    assert all(gap >= MIN_SPACING for gap in gaps[1:-1])
    assert all(gap > 0 for gap in gaps)


def test_thinning_keeps_the_first_and_the_last_two() -> None:
    assert surplus_checkpoints([1, 2, 3, 100, 101], n_keep=3) == [2, 3]
    assert surplus_checkpoints([0, 900, 910, 1000], n_keep=3) == [900]
    assert surplus_checkpoints([1, 2, 3], n_keep=0) == []
    assert surplus_checkpoints([1, 2, 3, 4], n_keep=4) == []


def test_thinning_drops_what_is_crowded_and_far_from_the_tip() -> None:
    assert surplus_checkpoints([0, 500, 510, 900, 910, 1000], n_keep=5) == [510]


def test_distances_from_the_tip_grow_geometrically_while_a_path_grows() -> None:
    left: list[int] = []
    for position in range(100, 40_100, 100):
        left.append(position)
        for surplus in surplus_checkpoints(left, n_keep=10):
            left.remove(surplus)
        if position > 10_000:
            distances = [left[-1] - each for each in left[:-1]]
            ratios = [far / near for far, near in pairwise(distances)]
            assert all(1.2 < ratio < 4 for ratio in ratios)
    assert len(left) == 10


@pytest.mark.parametrize(
    ("policy", "n_tokens", "was_reused", "left", "is_admitted"),
    [
        (WritePolicy.ALL, 64, False, 1.0, True),
        (WritePolicy.ALL, 63, True, 1.0, False),
        (WritePolicy.REUSED, 64, False, 1.0, False),
        (WritePolicy.REUSED, 64, True, 1.0, True),
        (WritePolicy.ALL, 64, False, 0.5, True),
        (WritePolicy.ALL, 64, False, 0.49, False),
        (WritePolicy.ALL, 64, True, 0.49, True),
        (WritePolicy.ALL, 64, True, 0.0, False),
    ],
)
def test_what_is_written_to_disk(
    policy: WritePolicy, n_tokens: int, left: float, *, was_reused: bool, is_admitted: bool
) -> None:
    admitted = admits_to_disk(
        WriteRules(bytes_per_hour=0, policy=policy, min_tokens=64),
        n_prefix_tokens=n_tokens,
        was_reused=was_reused,
        budget_left_share=left,
    )
    assert admitted == is_admitted


def test_a_write_budget_is_spent_and_refills_with_time() -> None:
    budget = WriteBudget(1000)
    now = 5 * HOUR
    assert budget.take(900, now)
    assert not budget.take(200, now)
    assert budget.left_share(now) == pytest.approx(0.1)
    assert budget.take(200, now + HOUR / 10)
    assert budget.left_share(now + HOUR / 10) == pytest.approx(0.0)


def test_an_idle_hour_saves_up_no_more_than_one_hour() -> None:
    budget = WriteBudget(1000)
    assert budget.take(1000, 0.0)
    assert budget.left_share(9 * HOUR) == 1.0
    assert not budget.take(1001, 9 * HOUR)


def test_a_budget_of_0_is_no_limit() -> None:
    budget = WriteBudget(0)
    assert budget.take(10**15, 0.0)
    assert budget.left_share(0.0) == 1.0


SECONDS_PER_CELL = 54e-9  # measured on an H200, as is the time of a step without cells
STEP_SECONDS = 4.8e-3


def trained(seconds_per_cell: float, *, n_steps: int = 2000, widest: int = 50_000) -> CellTax:
    rng = random.Random(1)
    tax = CellTax()
    for _ in range(n_steps):
        n_cells = rng.randint(0, widest)
        noise = rng.gauss(0, 0.02 * STEP_SECONDS)
        tax.observe(2, n_cells, STEP_SECONDS + seconds_per_cell * n_cells + noise)
    return tax


def test_the_tax_is_learnt_from_noisy_steps() -> None:
    learnt = trained(SECONDS_PER_CELL).seconds_per_cell(2)
    assert learnt == pytest.approx(SECONDS_PER_CELL, rel=0.05)


def test_a_stall_does_not_pass_for_a_tax() -> None:
    tax = trained(SECONDS_PER_CELL)
    tax.observe(2, 50_000, 1.0)
    assert tax.seconds_per_cell(2) == pytest.approx(SECONDS_PER_CELL, rel=0.2)


@pytest.mark.parametrize(
    "tax",
    [
        CellTax(),
        trained(SECONDS_PER_CELL, n_steps=60),
        trained(SECONDS_PER_CELL, widest=1000),
        trained(-SECONDS_PER_CELL),
    ],
    ids=["nothing seen", "few steps", "cells hardly vary", "it would be negative"],
)
def test_there_is_no_tax_until_it_is_known(tax: CellTax) -> None:
    assert tax.seconds_per_cell(2) == 0.0


def test_a_batch_of_another_size_has_a_tax_of_its_own() -> None:
    assert trained(SECONDS_PER_CELL).seconds_per_cell(1) == 0.0


@pytest.mark.parametrize(
    ("tax_paid", "restore", "parks"),
    [(0.39, 0.4, False), (0.4, 0.4, True), (0.0, 0.0, False), (0.1, 0.0, True)],
)
def test_a_slot_is_parked_once_it_has_cost_its_restore(
    tax_paid: float, restore: float, *, parks: bool
) -> None:
    assert should_park(tax_paid, restore) == parks


def test_exports_take_no_more_than_their_share_of_what_is_computed() -> None:
    pace = ExportPace()
    exported = 0.0
    for _ in range(1000):
        pace.earn(0.006, is_overdue=False)
        if pace.may_export:
            pace.spend(0.012)
            exported += 0.012
    assert 0.03 * 6 <= exported <= 0.03 * 6 + EXPORT_BURST_SECONDS + 0.012


def test_overdue_exports_get_a_larger_share() -> None:
    pace = ExportPace()
    pace.spend(EXPORT_BURST_SECONDS + 0.1)
    pace.earn(0.4, is_overdue=False)
    assert not pace.may_export
    pace.earn(0.4, is_overdue=True)
    assert pace.may_export


def test_an_export_whose_thread_had_no_core_does_not_stop_exports_for_long() -> None:
    pace = ExportPace()
    pace.spend(30.0)
    pace.earn(1.0, is_overdue=True)
    assert pace.may_export


def test_exports_that_cost_little_never_wait() -> None:
    pace = ExportPace()
    for _ in range(1000):
        pace.earn(0.6, is_overdue=False)
        assert pace.may_export
        pace.spend(0.0015)
