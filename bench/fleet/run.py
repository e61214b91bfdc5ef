"""Simulate one fleet under one workload, request by request in order of time."""

import heapq
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.fleet.model import (
    BLOCK_TOKENS,
    ROUTERS,
    Hardware,
    Load,
    NetworkLine,
    Policy,
    Shelf,
    SimulatedStore,
)
from bench.fleet.workload import FleetTrace

LOST_SHARE = 0.1  # of the replicas; at least one, never all; picked
AWAY_SECONDS = 600.0

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    n_replicas: int
    policy: Policy
    has_store: bool
    hardware: Hardware = field(default_factory=Hardware)
    replicas_die_at: float | None = None  # seconds; their disks are lost too
    store_leaves_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """One row for each request, in the order of arrival. Units are tokens unless named."""

    setup: FleetSetup
    at_seconds: Numbers
    first_token_seconds: Numbers
    live: Numbers  # in the context or in memory
    disk: Numbers
    shared: Numbers
    recomputed: Numbers
    new: Numbers  # never computed anywhere in the fleet
    replies: Numbers
    written: Numbers  # to the store, when the reply has ended
    busy_seconds: Numbers  # of each replica
    last_arrival_seconds: float  # of a session; later requests are further turns

    @property
    def prompt(self) -> Numbers:
        return self.live + self.disk + self.shared + self.recomputed


def simulate(trace: FleetTrace, setup: FleetSetup) -> FleetOutcome:
    return _Run(trace, setup).play()


class _Match(NamedTuple):
    """Where leading tokens are. Each source starts where the one before it ends."""

    live: int
    disk: int
    shared: int

    @property
    def n_tokens(self) -> int:
        return self.live + self.disk + self.shared


class _Replica:
    __slots__ = ("busy_seconds", "disk", "downlink", "free_at", "memory", "uplink")

    def __init__(self, hardware: Hardware) -> None:
        self.memory = Shelf(hardware.memory_tokens)
        self.disk = Shelf(hardware.disk_tokens)
        self.uplink = NetworkLine(hardware.network_bits_per_second)
        self.downlink = NetworkLine(hardware.network_bits_per_second)
        self.free_at = 0.0  # when the waiting prompts are computed
        self.busy_seconds = 0.0

    def lose_everything(self) -> None:
        self.memory.clear()
        self.disk.clear()


class _Running(NamedTuple):
    turn: int
    replica: int
    first_token_at: float


class _Run:
    def __init__(self, trace: FleetTrace, setup: FleetSetup) -> None:
        self._trace, self._setup, self._hardware = trace, setup, setup.hardware
        self._load = Load(setup.n_replicas)
        self._router = ROUTERS[setup.policy](self._load)
        self._replicas = [_Replica(setup.hardware) for _ in range(setup.n_replicas)]
        self._store = SimulatedStore(setup.hardware, setup.n_replicas) if setup.has_store else None
        if self._store and setup.store_leaves_at is not None:
            self._store.away_from = setup.store_leaves_at
            self._store.away_until = setup.store_leaves_at + AWAY_SECONDS
        self._next_turn = trace.first_turn[:-1]
        self._whole_heads = [n // BLOCK_TOKENS * BLOCK_TOKENS for n in trace.head_tokens]
        # Tokens of each conversation behind the last whole block of its head, replies included.
        self._own = [n % BLOCK_TOKENS for n in trace.head_tokens]
        self._seen_heads: set[int] = set()
        self._running: dict[int, _Running] = {}  # by conversation
        self._n_awaited: dict[int, int] = {}  # sub-agents that still run, by their parent
        self._events = list(trace.arrivals)  # a turn begins, or its reply ends
        self._columns = [array("d", bytes(8 * trace.n_turns)) for _ in _COLUMNS]

    def play(self) -> FleetOutcome:
        dies_at = self._setup.replicas_die_at
        while self._events:
            now, conversation = heapq.heappop(self._events)
            if dies_at is not None and now >= dies_at:
                self._lose_some()
                dies_at = None
            if conversation in self._running:
                self._end(conversation, now)
            else:
                self._begin(conversation, now)
        columns = {name: np.asarray(c) for name, c in zip(_COLUMNS, self._columns, strict=True)}
        order = np.argsort(columns["at_seconds"], kind="stable")
        columns = {name: column[order] for name, column in columns.items()}
        busy = np.array([replica.busy_seconds for replica in self._replicas])
        return FleetOutcome(
            setup=self._setup,
            busy_seconds=busy,
            last_arrival_seconds=self._trace.arrivals[-1][0],
            **columns,
        )

    def _begin(self, conversation: int, now: float) -> None:
        trace, hardware = self._trace, self._hardware
        turn = self._next_turn[conversation]
        head, n_head = trace.head_of[conversation], self._whole_heads[conversation]
        number = self._router.choose(conversation, head, trace.place_of[conversation])
        replica = self._replicas[number]

        match, fetched_at = self._match(replica, conversation, now)
        n_prompt = n_head + self._own[conversation] + trace.inputs[turn]
        n_recomputed = n_prompt - match.n_tokens
        work_seconds = (
            match.disk * hardware.token_bytes / hardware.disk_bytes_per_second
            + n_recomputed / hardware.prefill_tokens_per_second
        )
        replica.free_at = max(replica.free_at, fetched_at) + work_seconds
        decode_seconds = trace.replies[turn] / hardware.decode_tokens_per_second
        replica.busy_seconds += work_seconds + decode_seconds

        # A request for the same tokens waits for this one, so they count as held from now on.
        self._own[conversation] += trace.inputs[turn] + trace.replies[turn]
        for shelf in (replica.memory, replica.disk):
            shelf.keep(trace.n_heads + conversation, self._own[conversation])
            shelf.keep(head, n_head)  # never older than the chain behind it
        self._load.begin(number)
        self._running[conversation] = _Running(turn, number, replica.free_at)
        heapq.heappush(self._events, (replica.free_at + decode_seconds, conversation))
        n_new = trace.inputs[turn]
        if head not in self._seen_heads:
            self._seen_heads.add(head)
            n_new += trace.head_tokens[conversation]
        row = (now, replica.free_at - now, *match, n_recomputed, n_new, trace.replies[turn])
        for column, value in zip(self._columns, row, strict=False):
            column[turn] = value

    def _end(self, conversation: int, now: float) -> None:
        turn, replica, first_token_at = self._running.pop(conversation)
        self._load.end(replica)
        if self._store and self._load.alive[replica]:
            self._columns[-1][turn] = self._write(conversation, replica, now, first_token_at)
        self._next_turn[conversation] = turn + 1
        started = self._trace.sub_agents.get(turn)
        if started:
            self._n_awaited[conversation] = len(started)
            for each in started:
                heapq.heappush(self._events, (now, each))
        elif turn + 1 < self._trace.first_turn[conversation + 1]:
            self._go_on(conversation, now)
        elif (parent := self._trace.parent_of.get(conversation)) is not None:
            self._n_awaited[parent] -= 1
            if not self._n_awaited[parent]:
                self._go_on(parent, now)

    def _write(self, conversation: int, replica: int, now: float, begun_at: float) -> int:
        assert self._store
        uplink = self._replicas[replica].uplink
        head, n_head = self._trace.head_of[conversation], self._whole_heads[conversation]
        chain, n_own = self._trace.n_heads + conversation, self._own[conversation]
        n_written = self._store.write(head, n_head, uplink, now, begun_at=begun_at)
        n_written += self._store.write(chain, n_own, uplink, now, begun_at=begun_at)
        return n_written

    def _go_on(self, conversation: int, now: float) -> None:
        gap = self._trace.gaps[self._next_turn[conversation] - 1]
        heapq.heappush(self._events, (now + gap, conversation))

    def _match(self, replica: _Replica, conversation: int, now: float) -> tuple[_Match, float]:
        """Return the match, and when all of it is fetched."""
        match = self._found(replica, conversation, self._store, now)
        if not match.shared or not self._store:
            return match, now
        deadline = now + match.shared / self._hardware.prefill_tokens_per_second
        end = self._store.fetch(match.shared, replica.downlink, now, deadline=deadline)
        if end is None:
            return self._found(replica, conversation, None, now), now
        return match, end

    def _found(
        self, replica: _Replica, conversation: int, store: SimulatedStore | None, now: float
    ) -> _Match:
        n_head = self._whole_heads[conversation]
        head = _sources(replica, store, self._trace.head_of[conversation], n_head, now)
        if head.n_tokens < n_head:
            return head  # rows behind a gap cannot be used
        chain = self._trace.n_heads + conversation
        own = _sources(replica, store, chain, self._own[conversation], now)
        return _Match(head.live + own.live, head.disk + own.disk, head.shared + own.shared)

    def _lose_some(self) -> None:
        n_replicas = len(self._replicas)
        n_lost = min(max(round(n_replicas * LOST_SHARE), 1), n_replicas - 1)
        for number in range(n_lost):
            self._load.lose(number)
            self._replicas[number].lose_everything()


_COLUMNS = (
    "at_seconds",
    "first_token_seconds",
    "live",
    "disk",
    "shared",
    "recomputed",
    "new",
    "replies",
    "written",
)


def _sources(
    replica: _Replica, store: SimulatedStore | None, chain: int, n_wanted: int, now: float
) -> _Match:
    n_live = replica.memory.held(chain)
    if n_live >= n_wanted:
        return _Match(n_wanted, 0, 0)
    n_local = max(n_live, replica.disk.held(chain))
    n_found = max(n_local, store.found(chain, now)) if store and n_local < n_wanted else n_local
    return _Match(n_live, n_local - n_live, n_found - n_local)
