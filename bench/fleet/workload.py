"""Sessions of agents and their requests, drawn from a seed.

A conversation is a head (system prompt and tools), shared by all of its kind, and turns behind it.
Hits follow from that alone; nothing here knows about caches.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOUR_SECONDS = 3600.0

Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorkload:
    """Ranges are log-uniform: small ones are common, large ones not rare.

    "Recorded" refers to the recorded requests of 20 coding agents; 4 bytes make a token.
    """

    hours: float = 4.0  # of arrivals; picked: half a working day
    sessions_per_replica_hour: float = 3.0  # picked: a reply runs a tenth of the time

    n_kinds: int = 40  # picked: agents, in their versions and modes
    kind_exponent: float = 1.1  # Zipf; picked: two of five sessions are of the first two kinds
    head_tokens: Range = (2_000, 20_000)  # recorded: 5.5 kB to 78 kB of system prompt and tools
    first_tokens: Range = (50, 4_000)  # recorded: 0.1 to 16 kB that two first requests do not share

    turns: Range = (5, 40)  # recorded: a task has 11 to 14 rounds; the ends are picked
    turn_tokens: Range = (200, 2_000)  # recorded: tool results and replies; the ends are picked
    reply_share: float = 0.3  # of these, the model's own; picked

    user_share: float = 0.2  # of the turns, that a person writes; picked: 4 tool rounds between
    tool_seconds: float = 3.0  # median; picked: a file is read, a test runs
    tool_spread: float = 0.8  # of the logarithm; picked
    user_seconds: float = 120.0  # median; picked: a person reads and writes
    user_spread: float = 1.0  # of the logarithm; picked
    return_share: float = 0.15  # of the sessions, that are paused and resumed; picked
    return_hours: Range = (1.0, 20.0)  # picked: later that day, or the next

    fan_out_share: float = 0.2  # of the sessions, that start sub-agents; picked
    sub_agents: tuple[int, int] = (2, 4)  # at once; recorded: up to 3 from one client
    sub_turns: Range = (3, 12)  # recorded: up to 12
    sub_head_tokens: Range = (2_000, 8_000)  # recorded: 27 kB and 31 kB; siblings share all of it


@dataclass(frozen=True, slots=True)
class FleetTrace:
    """Conversations by number, with the turns of all in one list.

    Heads have numbers below `n_heads`. A sub-agent has no arrival: its parent's turn starts it.
    """

    n_heads: int
    head_of: list[int]
    head_tokens: list[int]
    place_of: list[float]  # of its session on a ring of length 1; sub-agents share their parent's
    arrivals: list[tuple[float, int]]
    first_turn: list[int]  # the last entry is the number of turns
    inputs: list[int]  # tokens of each turn that are new in its prompt
    replies: list[int]
    gaps: list[float]  # seconds from the end of the reply to the next turn
    sub_agents: dict[int, list[int]]  # by the turn whose reply starts them
    parent_of: dict[int, int]

    @property
    def n_turns(self) -> int:
        return len(self.inputs)


def draw(workload: FleetWorkload, n_replicas: int, seed: int) -> FleetTrace:
    """Draw sessions in proportion to the replicas, so that each has the same load."""
    rng = np.random.default_rng(seed)
    rate = workload.sessions_per_replica_hour * n_replicas
    n_sessions = max(int(rng.poisson(rate * workload.hours)), 1)
    arrives_at = np.sort(rng.uniform(0.0, workload.hours * HOUR_SECONDS, n_sessions))

    starts_some = rng.random(n_sessions) < workload.fan_out_share
    fewest, most = workload.sub_agents
    n_started = np.where(starts_some, rng.integers(fewest, most + 1, n_sessions), 0)
    parents = np.repeat(np.arange(n_sessions), n_started)

    kinds = _kinds(rng, workload, n_sessions)
    heads = np.concatenate([kinds, workload.n_kinds + kinds[parents]])
    head_sizes = np.concatenate(
        [
            _log_uniform(rng, workload.head_tokens, workload.n_kinds),
            _log_uniform(rng, workload.sub_head_tokens, workload.n_kinds),
        ]
    )
    n_turns = np.concatenate(
        [
            _log_uniform(rng, workload.turns, n_sessions),
            _log_uniform(rng, workload.sub_turns, len(parents)),
        ]
    )
    first_turn = np.concatenate([[0], np.cumsum(n_turns)])
    places = rng.random(n_sessions)
    sizes = _log_uniform(rng, workload.turn_tokens, int(first_turn[-1]))
    replies = np.maximum((sizes * workload.reply_share).astype(np.int64), 1)
    inputs = np.maximum(sizes - replies, 1)
    inputs[first_turn[:-1]] = _log_uniform(rng, workload.first_tokens, len(n_turns))
    spawns_at = first_turn[parents] + _any_but_the_last(rng, n_turns[:n_sessions])[parents]
    sub_agents: dict[int, list[int]] = {}
    for number, turn in enumerate(spawns_at.tolist(), start=n_sessions):
        sub_agents.setdefault(turn, []).append(number)
    return FleetTrace(
        n_heads=2 * workload.n_kinds,
        head_of=heads.tolist(),
        head_tokens=head_sizes[heads].tolist(),
        place_of=np.concatenate([places, places[parents]]).tolist(),
        arrivals=list(zip(arrives_at.tolist(), range(n_sessions), strict=True)),
        first_turn=first_turn.tolist(),
        inputs=inputs.tolist(),
        replies=replies.tolist(),
        gaps=_gaps(rng, workload, first_turn, n_turns[:n_sessions]).tolist(),
        sub_agents=sub_agents,
        parent_of=dict(enumerate(parents.tolist(), start=n_sessions)),
    )


def _kinds(rng: np.random.Generator, workload: FleetWorkload, n: int) -> NDArray[np.int64]:
    weights = np.arange(1, workload.n_kinds + 1) ** -workload.kind_exponent
    return rng.choice(workload.n_kinds, size=n, p=weights / weights.sum())


def _gaps(
    rng: np.random.Generator,
    workload: FleetWorkload,
    first_turn: NDArray[np.int64],
    session_turns: NDArray[np.int64],
) -> NDArray[np.float64]:
    n_turns = int(first_turn[-1])
    tools = rng.lognormal(np.log(workload.tool_seconds), workload.tool_spread, n_turns)
    users = rng.lognormal(np.log(workload.user_seconds), workload.user_spread, n_turns)
    gaps = np.where(rng.random(n_turns) < workload.user_share, users, tools)
    # No person writes to a sub-agent.
    n_of_sessions = int(first_turn[len(session_turns)])
    gaps[n_of_sessions:] = tools[n_of_sessions:]
    returns = np.flatnonzero(rng.random(len(session_turns)) < workload.return_share)
    left_at = first_turn[returns] + _any_but_the_last(rng, session_turns)[returns]
    gaps[left_at] = rng.uniform(*workload.return_hours, len(returns)) * HOUR_SECONDS
    return gaps


def _any_but_the_last(rng: np.random.Generator, n_turns: NDArray[np.int64]) -> NDArray[np.int64]:
    return rng.integers(0, n_turns - 1)


def _log_uniform(rng: np.random.Generator, bounds: Range, n: int) -> NDArray[np.int64]:
    low, high = np.log(bounds[0]), np.log(bounds[1])
    drawn: NDArray[np.int64] = np.exp(rng.uniform(low, high, n)).round().astype(np.int64)
    return drawn
