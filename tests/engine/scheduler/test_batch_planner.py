"""The planner is a pure function: each row is a situation and the batch it must give."""

import pytest

from rekindle.cache.keys import PrefixKeys
from rekindle.engine.scheduler.batch_planner import (
    PREFILL_GRAIN,
    STALL_SECONDS,
    BatchLimits,
    first_chunk,
    plan_batch,
    prefill_allowance,
)
from rekindle.engine.sequence import Phase, Sequence
from rekindle.generation.request import GenerationRequest, Sampling
from tests.support.fake_backend import FakeSampler


def decoding(name: str) -> Sequence:
    sequence = make(name, n_prompt=10)
    sequence.n_computed, sequence.phase = 10, Phase.DECODING
    sequence.tokens.append(1)
    return sequence


def prefilling(name: str, n_pending: int) -> Sequence:
    sequence = make(name, n_prompt=n_pending)
    sequence.phase = Phase.PREFILLING
    return sequence


def make(name: str, n_prompt: int) -> Sequence:
    request = GenerationRequest(
        id=name, prompt=(7,) * n_prompt, boundaries=(), sampling=Sampling(), max_tokens=None
    )
    tokens = list(request.prompt)
    return Sequence(
        request=request,
        arrived_at=0.0,
        max_length=100_000,
        tokens=tokens,
        keys=PrefixKeys(b"", tokens),
        sampler=FakeSampler(),
    )


def planned(
    sequences: list[Sequence],
    *,
    max_tokens: int = 512,
    max_prefill: int = 512,
    cells: int = 9999,
    grain: int = PREFILL_GRAIN,
    enough: int = 9999,
) -> list[tuple[str, int]]:
    plan = plan_batch(sequences, BatchLimits(max_tokens, max_prefill, cells, grain, enough))
    return [(sequence.request.id, n_tokens) for sequence, n_tokens in plan]


def test_prefills_precede_decodes_in_a_batch() -> None:
    assert planned([prefilling("old", 100), decoding("young")]) == [("old", 100), ("young", 1)]


def test_a_long_prompt_is_cut_into_whole_grains_beside_a_stream() -> None:
    assert planned([decoding("d"), prefilling("p", 6000)]) == [("p", 448), ("d", 1)]


def test_without_grains_a_batch_is_filled_up() -> None:
    assert planned([decoding("d"), prefilling("p", 6000)], grain=1) == [("p", 511), ("d", 1)]
    burst = [prefilling("first", 6), prefilling("second", 518)]
    assert planned(burst, grain=1) == [("first", 6), ("second", 506)]


@pytest.mark.parametrize(
    ("pending", "chunks"),
    [
        ([518, 518, 518], [518, 518]),
        ([1_024, 518], [1_024]),
        ([1_000, 152], [1_000, 152]),
        ([1_000, 153], [1_000, 24]),
        ([6_000, 518], [2_048]),
        ([100] * 16, [100] * 11),
        ([120] * 16, [120] * 9),
    ],
)
def test_prompts_join_each_other_up_to_what_is_enough(
    pending: list[int], chunks: list[int]
) -> None:
    burst = [prefilling(str(number), n_tokens) for number, n_tokens in enumerate(pending)]
    plan = planned(burst, max_tokens=2048, grain=1, enough=1024)
    assert [n_tokens for _, n_tokens in plan] == chunks


@pytest.mark.parametrize(
    ("n_done", "room", "n_tokens"),
    [
        (0, 512, 512),
        (300, 512, 512),
        (500, 64, 64),
        (720, 100, 64),
        (700, 130, 128),
        (5600, 512, 400),  # the rest
    ],
)
def test_a_chunk_is_the_rest_of_the_prompt_or_whole_grains(
    n_done: int, room: int, n_tokens: int
) -> None:
    sequence = prefilling("p", 6000)
    sequence.n_computed = n_done
    assert planned([sequence], max_tokens=room) == [("p", n_tokens)]


def test_a_chunk_ends_where_a_checkpoint_is_due() -> None:
    sequence = prefilling("p", 6000)
    sequence.stops = [900, 130]
    assert planned([sequence]) == [("p", 130)]


def test_a_sequence_that_is_being_restored_computes_nothing() -> None:
    sequence = prefilling("p", 6000)
    sequence.phase = Phase.RESTORING
    assert planned([sequence, decoding("d")]) == [("d", 1)]


def test_a_prefill_beside_a_stream_keeps_within_its_allowance() -> None:
    sequences = [decoding("d"), prefilling("p", 6000)]
    assert planned(sequences, max_prefill=128) == [("p", 128), ("d", 1)]


def test_a_prefill_without_streams_has_no_allowance() -> None:
    assert planned([prefilling("p", 6000)], max_prefill=128) == [("p", 512)]


def test_the_oldest_prefill_is_planned_first_and_the_next_gets_the_rest() -> None:
    sequences = [prefilling("old", 300), prefilling("young", 6000)]
    assert planned(sequences) == [("old", 300), ("young", 192)]


def test_the_allowance_is_shared_by_all_prefills() -> None:
    sequences = [decoding("d"), prefilling("old", 100), prefilling("young", 6000)]
    assert planned(sequences, max_prefill=128) == [("old", 100), ("young", 28), ("d", 1)]


def test_a_younger_prefill_never_overtakes_one_that_found_no_room() -> None:
    sequences = [prefilling("first", 480), prefilling("second", 500), prefilling("third", 5)]
    assert planned(sequences)[0] == ("first", 480)
    assert "third" not in dict(planned(sequences))


def test_a_batch_smaller_than_a_grain_still_makes_progress() -> None:
    assert planned([prefilling("p", 100)], max_tokens=32) == [("p", 32)]


def test_the_end_of_a_prompt_is_not_held_back_by_the_grain() -> None:
    assert planned([prefilling("p", 65)]) == [("p", 65)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [(0, []), (1, [("d", 1)]), (20, [("p", 19), ("d", 1)]), (65, [("p", 64), ("d", 1)])],
)
def test_no_more_tokens_than_free_cells_and_decodes_take_theirs_first(
    cells: int, expected: list[tuple[str, int]]
) -> None:
    assert planned([decoding("d"), prefilling("p", 6000)], cells=cells) == expected


@pytest.mark.parametrize(
    ("seconds_per_token", "allowance"),
    [
        (0.0, 512),  # nothing measured yet
        (STALL_SECONDS / 10_000, 512),
        (STALL_SECONDS / 200, 192),
        (STALL_SECONDS / 64, 64),
        (1.0, 64),  # never below one grain: progress comes first
    ],
)
def test_prefill_allowance(seconds_per_token: float, allowance: int) -> None:
    assert prefill_allowance(seconds_per_token, 512) == allowance


def test_a_prompt_does_not_wait_for_its_sampler_and_delays_no_other() -> None:
    first = prefilling("first", 600)
    first.sampler = None
    sequences = [first, prefilling("second", 40)]
    first.n_computed = 512
    assert planned(sequences) == [("first", 88), ("second", 40)]
    first.n_computed = 600
    assert planned(sequences) == [("second", 40)]


@pytest.mark.parametrize(
    ("n_start", "n_end", "first"),
    [
        pytest.param(0, 1551, 0, id="from the first cell: full batches first"),
        pytest.param(640, 1300, 0, id="from the start of a tile: full batches first"),
        pytest.param(628, 1279, 139, id="inside a tile: the odd batch first, then a full one"),
        pytest.param(7, 1924, 377, id="three full batches from a tile on, 4 tokens behind them"),
        pytest.param(100, 612, 0, id="one full batch and nothing else"),
        pytest.param(1552, 1982, 0, id="46 tokens over: they fill most of a tile"),
        pytest.param(1925, 2054, 1, id="1 token over: computed alone"),
        pytest.param(1925, 1926, 0, id="1 token in all"),
        pytest.param(100, 229, 0, id="1 token over, but few cells before it"),
    ],
)
def test_the_first_batch_of_a_prompt_leaves_the_others_whole_tiles(
    n_start: int, n_end: int, first: int
) -> None:
    assert first_chunk(n_start, n_end, 512) == first
    assert first <= n_end - n_start
