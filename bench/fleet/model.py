"""The parts of a fleet: caches of blocks, a shared store, and the routers.

Plain numbers: tokens, seconds, bytes. Nothing here has a clock; callers pass the time.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Protocol

import numpy as np

BLOCK_TOKENS = 256
RING_POINTS = 64  # for each replica; picked
BALANCE_FACTOR = 1.5  # haproxy's hash-balance-factor 150; picked
SLOTS = 4  # `--parallel`: with fewer running, a replica starts a request at once
LONGEST_WRITE_SECONDS = 10.0  # writes that would wait longer are dropped; picked


class Policy(StrEnum):
    ROUND_ROBIN = "round robin"
    LEAST_LOADED = "least loaded"
    SESSION_HASH = "session hash"
    BOUNDED_HASH = "bounded hash"
    LONGEST_PREFIX = "longest prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One replica, and the store. The model has the shape of Llama 3.1 8B, in F16."""

    token_bytes: int = 131_072  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    prefill_tokens_per_second: float = 1_000.0  # assumed: a small GPU
    decode_tokens_per_second: float = 40.0  # assumed
    memory_bytes: float = 16e9  # picked
    disk_bytes: float = 128e9  # picked
    disk_bytes_per_second: float = 1.8e9  # measured: docs/benchmarks.md, "On a GPU"
    network_bits_per_second: float = 10e9  # picked
    store_bytes_per_replica: float = 64e9  # picked: the store grows with the fleet
    store_bits_per_second: float = 100e9  # picked: its network does not
    store_seconds: float = 0.005  # latency of a request; picked

    @property
    def memory_tokens(self) -> int:
        return int(self.memory_bytes / self.token_bytes)

    @property
    def disk_tokens(self) -> int:
        """Return the capacity; 0 if computing is faster than reading."""
        reads_per_second = self.disk_bytes_per_second / self.token_bytes
        is_faster = reads_per_second > self.prefill_tokens_per_second
        return int(self.disk_bytes / self.token_bytes) if is_faster else 0


class Shelf:
    """A cache of leading tokens of chains. Evicts the least recently used chain, from its end."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._held: OrderedDict[int, int] = OrderedDict()
        self._n_tokens = 0

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    def held(self, chain: int) -> int:
        return self._held.get(chain, 0)

    def keep(self, chain: int, n_tokens: int) -> None:
        """Store so many tokens of the chain, and mark it as used."""
        n_more = n_tokens - self._held.get(chain, 0)
        if n_more > 0:
            self._held[chain] = n_tokens
            self._n_tokens += n_more
        self._held.move_to_end(chain)
        while self._n_tokens > self._capacity_tokens:
            self._evict()

    def clear(self) -> None:
        self._held.clear()
        self._n_tokens = 0

    def _evict(self) -> None:
        chain, n_held = next(iter(self._held.items()))
        n_over = self._n_tokens - self._capacity_tokens
        n_left = max(n_held - n_over, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        self._n_tokens -= n_held - n_left
        if n_left:
            self._held[chain] = n_left
        else:
            del self._held[chain]


class NetworkLine:
    """A network line that carries one transfer after the other."""

    def __init__(self, bits_per_second: float) -> None:
        self._bytes_per_second = bits_per_second / 8
        self._free_at = 0.0

    def end_of(self, n_bytes: float, now: float) -> float:
        """Return when a transfer that starts now would end."""
        return max(self._free_at, now) + n_bytes / self._bytes_per_second

    def take(self, n_bytes: float, now: float) -> None:
        self._free_at = self.end_of(n_bytes, now)


class SimulatedStore:
    def __init__(self, hardware: Hardware, n_replicas: int) -> None:
        self._token_bytes = hardware.token_bytes
        self._seconds = hardware.store_seconds
        self._shelf = Shelf(int(hardware.store_bytes_per_replica * n_replicas / self._token_bytes))
        self._in = NetworkLine(hardware.store_bits_per_second)
        self._out = NetworkLine(hardware.store_bits_per_second)
        self._coming: dict[int, tuple[float, int]] = {}  # end of the write, tokens held before
        self.away_from = self.away_until = float("inf")

    @property
    def n_tokens(self) -> int:
        return self._shelf.n_tokens

    def found(self, chain: int, now: float) -> int:
        if self._is_away(now):
            return 0
        n_held = self._shelf.held(chain)
        written_at, n_before = self._coming.get(chain, (0.0, 0))
        return min(n_held, n_before) if now < written_at else n_held

    def fetch(
        self, n_tokens: int, network: NetworkLine, now: float, *, deadline: float
    ) -> float | None:
        """Fetch and return the end of the transfer. None: it would end too late."""
        n_bytes = n_tokens * self._token_bytes
        end = max(self._out.end_of(n_bytes, now), network.end_of(n_bytes, now)) + self._seconds
        if end > deadline:
            return None
        self._out.take(n_bytes, now)
        network.take(n_bytes, now)
        return end

    def write(
        self, chain: int, n_tokens: int, network: NetworkLine, now: float, *, begun_at: float
    ) -> int:
        """Write the tokens that the store lacks, in whole blocks. Return how many were sent.

        Blocks are sent as they are computed: the line is busy from `begun_at` on.
        """
        if self._is_away(now):
            return 0
        n_held = self._shelf.held(chain)
        if n_held >= n_tokens:
            self._shelf.keep(chain, n_held)
            return 0
        n_sent = n_tokens - n_held // BLOCK_TOKENS * BLOCK_TOKENS
        n_bytes = n_sent * self._token_bytes
        end = max(self._in.end_of(n_bytes, begun_at), network.end_of(n_bytes, begun_at))
        if end > now + LONGEST_WRITE_SECONDS:
            return 0
        self._in.take(n_bytes, begun_at)
        network.take(n_bytes, begun_at)
        self._coming[chain] = (end + self._seconds, n_held)
        self._shelf.keep(chain, n_tokens)
        return n_sent

    def _is_away(self, now: float) -> bool:
        return self.away_from <= now < self.away_until


class Load:
    """The running requests of each replica, and the idle replicas, the longest idle first."""

    def __init__(self, n_replicas: int) -> None:
        self.running = [0] * n_replicas
        self.served = [0] * n_replicas
        self.alive = [True] * n_replicas
        self._n_running = 0
        self._n_alive = n_replicas
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_replicas))

    def begin(self, replica: int) -> None:
        self._n_running += 1
        self.running[replica] += 1
        self.served[replica] += 1
        self._idle.pop(replica, None)

    def end(self, replica: int) -> None:
        self._n_running -= 1
        self.running[replica] -= 1
        if not self.running[replica] and self.alive[replica]:
            self._idle[replica] = None

    def lose(self, replica: int) -> None:
        self.alive[replica] = False
        self._n_alive -= 1
        self._idle.pop(replica, None)

    def least(self) -> int:
        if self._idle:
            return next(iter(self._idle))
        alive = (replica for replica, is_alive in enumerate(self.alive) if is_alive)
        return min(alive, key=self.running.__getitem__)

    def fair_share(self) -> int:
        """Return how many requests a balanced replica may have, counting the new one."""
        return ceil((self._n_running + 1) * BALANCE_FACTOR / self._n_alive)


class Router(Protocol):
    def choose(self, conversation: int, head: int, place: float) -> int: ...


class RoundRobin:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._last = -1

    def choose(self, conversation: int, head: int, place: float) -> int:
        alive = self._load.alive
        while True:
            self._last = (self._last + 1) % len(alive)
            if alive[self._last]:
                return self._last


class LeastLoaded:
    def __init__(self, load: Load) -> None:
        self._load = load

    def choose(self, conversation: int, head: int, place: float) -> int:
        return self._load.least()


class SessionHash:
    """A consistent hash: the next living replica on a ring, behind the session's place."""

    def __init__(self, load: Load) -> None:
        self._load = load
        n_replicas = len(load.alive)
        points = np.random.default_rng(n_replicas).random(n_replicas * RING_POINTS)
        order = np.argsort(points)
        self._points: list[float] = points[order].tolist()
        self._owners: list[int] = (order % n_replicas).tolist()

    def choose(self, conversation: int, head: int, place: float) -> int:
        return self._behind(place, self._load.alive.__getitem__)

    def _behind(self, place: float, is_eligible: Callable[[int], bool]) -> int:
        point = bisect(self._points, place) % len(self._owners)
        while not is_eligible(self._owners[point]):
            point = (point + 1) % len(self._owners)
        return self._owners[point]


class BoundedHash(SessionHash):
    """The same, but replicas with more than their fair share are skipped."""

    def choose(self, conversation: int, head: int, place: float) -> int:
        alive, running, most = self._load.alive, self._load.running, self._load.fair_share()
        return self._behind(place, lambda replica: alive[replica] and running[replica] < most)


class LongestPrefix:
    """Remembers where prefixes were sent, but does not know of evictions."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._replica_of: dict[int, int] = {}
        self._holders_of: dict[int, dict[int, None]] = {}

    def choose(self, conversation: int, head: int, place: float) -> int:
        most = max(SLOTS, self._load.fair_share())
        replica = self._replica_of.get(conversation)
        if replica is None or not self._has_room(replica, most):
            replica = self._holder(head, most)
        self._replica_of[conversation] = replica
        self._holders_of.setdefault(head, {})[replica] = None
        return replica

    def _holder(self, head: int, most: int) -> int:
        running, served = self._load.running, self._load.served
        holders = [each for each in self._holders_of.get(head, ()) if self._has_room(each, most)]
        if not holders:
            return self._load.least()
        return min(holders, key=lambda each: (running[each], served[each]))

    def _has_room(self, replica: int, most: int) -> bool:
        return self._load.alive[replica] and self._load.running[replica] < most


ROUTERS: dict[Policy, Callable[[Load], Router]] = {
    Policy.ROUND_ROBIN: RoundRobin,
    Policy.LEAST_LOADED: LeastLoaded,
    Policy.SESSION_HASH: SessionHash,
    Policy.BOUNDED_HASH: BoundedHash,
    Policy.LONGEST_PREFIX: LongestPrefix,
}
