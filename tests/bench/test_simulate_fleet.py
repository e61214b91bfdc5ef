"""The simulation of a fleet: its results follow from blocks, caches and routing."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.fleet.__main__ import main
from bench.fleet.jobs import summary
from bench.fleet.model import BLOCK_TOKENS, BoundedHash, Hardware, Load, Policy, Shelf
from bench.fleet.run import AWAY_SECONDS, FleetOutcome, FleetSetup, simulate
from bench.fleet.workload import HOUR_SECONDS, FleetTrace, FleetWorkload, draw

SMALL = FleetWorkload(hours=3.0)
ALONE = FleetWorkload(
    hours=0.1, sessions_per_replica_hour=0.01, fan_out_share=0.0, return_share=0.0
)
AMPLE = Hardware(memory_bytes=1e12, disk_bytes=1e13, store_bytes_per_replica=1e13)
MIDDLE = SMALL.hours * HOUR_SECONDS / 2


def run(
    trace: FleetTrace, n_replicas: int, policy: Policy, *, store: bool, hardware: Hardware = AMPLE
) -> FleetOutcome:
    setup = FleetSetup(n_replicas=n_replicas, policy=policy, has_store=store, hardware=hardware)
    return simulate(trace, setup)


def prompt_tokens(trace: FleetTrace) -> int:
    """Counted anew: every prompt has the head, all inputs so far and all replies before."""
    total = 0
    for conversation, n_head in enumerate(trace.head_tokens):
        begin, end = trace.first_turn[conversation], trace.first_turn[conversation + 1]
        inputs = np.cumsum(trace.inputs[begin:end])
        replies = np.cumsum([0, *trace.replies[begin : end - 1]])
        total += int(n_head * (end - begin) + inputs.sum() + replies.sum())
    return total


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("policy", list(Policy))
def test_cached_and_computed_tokens_add_up_to_the_prompts(policy: Policy, *, store: bool) -> None:
    trace = draw(SMALL, 5, seed=3)
    outcome = run(trace, 5, policy, store=store, hardware=Hardware())
    assert outcome.prompt.sum() == prompt_tokens(trace)
    assert len(outcome.at_seconds) == trace.n_turns
    assert (np.diff(outcome.at_seconds) >= 0).all()
    for source in (outcome.live, outcome.disk, outcome.shared, outcome.recomputed):
        assert (source >= 0).all()
    assert (outcome.recomputed >= outcome.new).all()
    assert (outcome.first_token_seconds > 0).all()


def test_one_replica_does_the_same_under_every_policy() -> None:
    trace = draw(SMALL, 1, seed=5)
    first, *others = (run(trace, 1, policy, store=False) for policy in Policy)
    for other in others:
        assert np.array_equal(first.recomputed, other.recomputed)
        assert np.array_equal(first.first_token_seconds, other.first_token_seconds)


def test_equal_seeds_give_equal_outcomes_and_different_seeds_do_not() -> None:
    outcomes = [run(draw(SMALL, 4, seed), 4, Policy.BOUNDED_HASH, store=True) for seed in (1, 1, 2)]
    assert np.array_equal(outcomes[0].first_token_seconds, outcomes[1].first_token_seconds)
    assert outcomes[0].prompt.sum() != outcomes[2].prompt.sum()


def test_a_conversation_that_never_returns_to_a_replica_is_computed_completely_each_time() -> None:
    trace = draw(ALONE, 64, seed=1)
    assert len(trace.head_of) == 1
    outcome = run(trace, 64, Policy.ROUND_ROBIN, store=False)
    assert np.array_equal(outcome.recomputed, outcome.prompt)
    stored = run(trace, 64, Policy.ROUND_ROBIN, store=True)
    assert np.array_equal(stored.recomputed, stored.new)


def test_round_robin_without_a_store_computes_more_with_more_replicas() -> None:
    found = [
        summary(run(draw(SMALL, n, seed=1), n, Policy.ROUND_ROBIN, store=False)).amplification
        for n in (1, 4, 16)
    ]
    assert found == sorted(found)
    assert found[0] < 1.05
    assert found[2] > 3 * found[0]


@pytest.mark.parametrize("policy", list(Policy))
def test_with_an_unlimited_store_almost_nothing_is_recomputed(
    policy: Policy,
) -> None:
    # Sub-agents that start at once on different replicas all compute their head.
    workload = replace(SMALL, fan_out_share=0.0)
    outcome = run(draw(workload, 16, seed=1), 16, policy, store=True)
    assert 1.0 <= summary(outcome).amplification < 1.05


def test_the_store_receives_at_most_the_computed_tokens_and_returns_at_most_the_missing_ones() -> (
    None
):
    outcome = run(draw(SMALL, 8, seed=2), 8, Policy.ROUND_ROBIN, store=True)
    # A block that is not whole is written again when it has grown.
    most = outcome.recomputed.sum() + outcome.replies.sum() + BLOCK_TOKENS * len(outcome.replies)
    assert 0 < outcome.written.sum() <= most
    without = run(draw(SMALL, 8, seed=2), 8, Policy.ROUND_ROBIN, store=False)
    assert 0 < outcome.shared.sum() <= without.recomputed.sum()
    assert without.written.sum() == without.shared.sum() == 0


def test_nothing_is_fetched_over_a_network_that_is_slower_than_computing() -> None:
    trace = draw(SMALL, 4, seed=1)
    speed = AMPLE.token_bytes * AMPLE.prefill_tokens_per_second * 8
    slow = replace(AMPLE, network_bits_per_second=0.9 * speed)
    assert run(trace, 4, Policy.ROUND_ROBIN, store=True, hardware=slow).shared.sum() == 0
    fast = replace(AMPLE, network_bits_per_second=1.5 * speed)
    assert run(trace, 4, Policy.ROUND_ROBIN, store=True, hardware=fast).shared.sum() > 0


def test_the_prefixes_of_a_dead_replica_are_found_in_the_store() -> None:
    trace = draw(SMALL, 40, seed=1)
    extra = {}
    for store in (True, False):
        setup = FleetSetup(
            n_replicas=40, policy=Policy.SESSION_HASH, has_store=store, hardware=AMPLE
        )
        calm, disturbed = (
            simulate(trace, replace(setup, replicas_die_at=at)) for at in (None, MIDDLE)
        )
        assert disturbed.prompt.sum() == calm.prompt.sum()
        extra[store] = disturbed.recomputed.sum() - calm.recomputed.sum()
    assert extra[False] > 10_000
    assert extra[True] < 0.2 * extra[False]


def test_a_store_outage_fails_no_request_and_the_store_is_used_again() -> None:
    trace = draw(SMALL, 8, seed=1)
    setup = FleetSetup(
        n_replicas=8,
        policy=Policy.ROUND_ROBIN,
        has_store=True,
        hardware=AMPLE,
        store_leaves_at=MIDDLE,
    )
    outcome = simulate(trace, setup)
    away = (outcome.at_seconds >= MIDDLE) & (outcome.at_seconds < MIDDLE + AWAY_SECONDS)
    assert outcome.prompt.sum() == prompt_tokens(trace)
    assert away.any()
    assert outcome.shared[away].sum() == 0
    assert outcome.shared[outcome.at_seconds >= MIDDLE + AWAY_SECONDS].sum() > 0


def test_a_shelf_evicts_the_least_recently_used_chain_from_its_end() -> None:
    shelf = Shelf(capacity_tokens=1000)
    shelf.keep(1, 600)
    shelf.keep(2, 300)
    shelf.keep(3, 300)
    assert [shelf.held(chain) for chain in (1, 2, 3)] == [256, 300, 300]
    shelf.keep(1, 256)
    shelf.keep(4, 300)
    assert [shelf.held(chain) for chain in (1, 2, 3, 4)] == [256, 0, 300, 300]
    assert shelf.n_tokens == 856


def test_bounded_hash_skips_an_owner_with_more_than_its_share() -> None:
    load = Load(8)
    router = BoundedHash(load)
    owner = router.choose(0, 0, 0.5)
    assert router.choose(1, 0, 0.5) == owner
    load.begin(owner)
    assert router.choose(2, 0, 0.5) != owner
    load.end(owner)
    assert router.choose(2, 0, 0.5) == owner


def test_the_program_writes_tables_numbers_and_pictures(tmp_path: Path) -> None:
    main(["--quick", "--replicas", "3", "--policy", "session hash", "--out", str(tmp_path)])
    pictures = {"fleet-computed.svg", "fleet-first-token.svg", "fleet-store.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {"fleet.md", "fleet.csv", *pictures}
    with (tmp_path / "fleet.csv").open() as file:
        rows = list(csv.DictReader(file))
    whole = [row for row in rows if row["window"] == "whole"]
    assert [row["disturbed_by"] for row in whole].count("") == 2
    assert all(float(row["amplification"]) >= 1 for row in whole)
    assert "the store is away for 10 minutes" in (tmp_path / "fleet.md").read_text()
