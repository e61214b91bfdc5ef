"""Decisions as numbers: what to keep, what to evict first, and whether to load or recompute.

Pure functions and small state of plain numbers: no I/O, and the caller passes the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rekindle.config.choices import WritePolicy
from rekindle.generation.request import Rank

# A checkpoint costs as much as 0.5 to 25 blocks, so they are sparse. All four numbers are picked.
CHECKPOINT_INTERVAL = 2048
MIN_SPACING = 32
TAIL_GRAIN = 64  # tokens of an identical prompt that are recomputed, at most
EXPORT_SHARE = 0.03  # of compute time; picked
OVERDUE_EXPORT_SHARE = 0.25  # once an export has waited for OVERDUE_SECONDS; picked
OVERDUE_SECONDS = 0.5  # so that a reply that ended a second ago survives a crash
EXPORT_BURST_SECONDS = 0.05  # picked
# One export counts for at most this: a thread without a core for seconds copied nothing. Picked.
MAX_EXPORT_SECONDS = 0.25
SCARCE_SHARE = 0.5  # share of the write budget; below it only reused entries are written

# An entry without rows (a recurrent model's block) still has token ids. Without a floor, evicting
# one would move the clock far beyond the priority of every entry with rows.
MIN_ENTRY_BYTES = 1024

_HOUR_SECONDS = 3600.0


def priority(clock: float, seconds_saved: float, n_bytes: int, hits: int) -> float:
    """Return the GreedyDual-Size-Frequency priority: the entry with the lowest is evicted first.

    `clock` is the highest priority evicted so far, so that entries age.
    """
    return clock + hits * seconds_saved / max(n_bytes, MIN_ENTRY_BYTES)


class Speed:
    """Seconds per unit (byte, token). Recent observations and large amounts count most."""

    _KEEP = 0.8  # factor for the weight of earlier observations; picked
    _SOFTEN = 0.9  # picked

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * self._KEEP + amount
        self._seconds = self._seconds * self._KEEP + seconds

    def seconds(self, amount: float) -> float | None:
        """Return how long `amount` will take; None if not measured yet."""
        return amount * self._seconds / self._amount if self._amount else None

    def soften(self) -> None:
        """Lower the estimate after a refusal: one bad measurement must not decide for ever."""
        self._seconds *= self._SOFTEN


class LoadableSpan(NamedTuple):
    """A stretch of a stored prefix that one tier holds."""

    n_tokens: int
    load_seconds: float | None  # None: not measured yet, which counts as free


def best_cut(spans: Sequence[LoadableSpan], prefill_seconds_per_token: float | None) -> int:
    """Return how many leading spans to load so that loading and computing the rest is fastest."""
    if prefill_seconds_per_token is None:
        return len(spans)
    best, best_seconds, seconds = 0, 0.0, 0.0  # relative to computing everything
    for n_loaded, span in enumerate(spans, start=1):
        seconds += (span.load_seconds or 0.0) - span.n_tokens * prefill_seconds_per_token
        if seconds <= best_seconds:
            best, best_seconds = n_loaded, seconds
    return best


def checkpoint_positions(n_start: int, n_prompt: int, boundaries: Sequence[int]) -> list[int]:
    """Return, in ascending order, where to take checkpoints while computing [n_start, n_prompt)."""
    inside = [position for position in boundaries if n_start < position < n_prompt]
    kept: list[int] = []
    for position in inside:
        if not kept or position - kept[-1] >= MIN_SPACING:
            kept.append(position)
    tail = n_prompt - TAIL_GRAIN
    if max(kept, default=n_start) < tail:
        at_grain = (n_prompt - 1) // TAIL_GRAIN * TAIL_GRAIN
        kept.append(inside[-1] if inside and inside[-1] >= tail else at_grain)
    between = [
        position
        for before, behind in pairwise([n_start, *kept])
        for position in range(
            before + CHECKPOINT_INTERVAL, behind - MIN_SPACING + 1, CHECKPOINT_INTERVAL
        )
    ]
    return sorted(kept + between)


def surplus_checkpoints(positions: Sequence[int], n_keep: int) -> list[int]:
    """Return the checkpoints of one path to drop, least useful first; `positions` are ascending.

    A new request most often diverges near the path's tip. So a checkpoint is worth the gap it
    closes, relative to its distance from the tip. The first (system and tools) and the last two
    (this turn and the one before) always stay.
    """
    left = list(positions)
    dropped = []
    while len(left) > max(n_keep, 3):
        least = min(
            range(1, len(left) - 2),
            key=lambda i: (left[i + 1] - left[i - 1]) / (left[-1] - left[i]),
        )
        dropped.append(left.pop(least))
    return dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRules:
    bytes_per_hour: int  # 0: no limit
    policy: WritePolicy
    min_tokens: int


def admits_to_disk(
    rules: WriteRules, *, n_prefix_tokens: int, was_reused: bool, budget_left_share: float
) -> bool:
    if n_prefix_tokens < rules.min_tokens or budget_left_share <= 0:
        return False
    return was_reused or (rules.policy is WritePolicy.ALL and budget_left_share >= SCARCE_SHARE)


def admits_to_shared(
    rules: WriteRules, *, n_prefix_tokens: int, was_reused: bool, is_pinned: bool, rank: Rank
) -> bool:
    """Return whether to share the entry. A sub-agent's rows are shared only once reused."""
    if n_prefix_tokens < rules.min_tokens:
        return False
    is_wanted = rules.policy is WritePolicy.ALL and rank is not Rank.EPHEMERAL
    return is_wanted or was_reused or is_pinned


class WriteBudget:
    """A bucket that holds one hour's bytes and refills evenly. 0 bytes per hour: no limit."""

    def __init__(self, bytes_per_hour: int) -> None:
        self._capacity = bytes_per_hour
        self._left = float(bytes_per_hour)
        self._filled_at = 0.0

    def take(self, n_bytes: int, now: float) -> bool:
        """Return whether `n_bytes` may be written now. If so, they count as written."""
        if self._capacity == 0:
            return True
        self._refill(now)
        if n_bytes > self._left:
            return False
        self._left -= n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        """Return bytes to the bucket that were not written after all."""
        self._left = min(self._left + n_bytes, self._capacity)

    def left_share(self, now: float) -> float:
        if self._capacity == 0:
            return 1.0
        self._refill(now)
        return self._left / self._capacity

    def _refill(self, now: float) -> None:
        refill = (now - self._filled_at) * self._capacity / _HOUR_SECONDS
        self._left = min(self._left + max(refill, 0.0), self._capacity)
        self._filled_at = now


class ExportPace:
    """The share of time that exports may take from requests being computed.

    On a CPU exports are free: computing a block takes a thousand times longer. On a GPU the two
    take about as long, and unlimited exports would halve the speed of prefill.
    """

    def __init__(self) -> None:
        self._credit_seconds = EXPORT_BURST_SECONDS

    @property
    def may_export(self) -> bool:
        return self._credit_seconds >= 0

    def earn(self, computed_seconds: float, *, is_overdue: bool) -> None:
        share = OVERDUE_EXPORT_SHARE if is_overdue else EXPORT_SHARE
        credit = self._credit_seconds + share * computed_seconds
        self._credit_seconds = min(credit, EXPORT_BURST_SECONDS)

    def spend(self, exported_seconds: float) -> None:
        self._credit_seconds -= min(exported_seconds, MAX_EXPORT_SECONDS)


class CellTax:
    """The cost of one more used cell per decode step, learnt from the steps themselves.

    Unified KV attends over all used cells, so the rows of an idle conversation slow down every
    token of the others: by 31 % with two of 16k tokens, measured on an H200.
    """

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}

    def observe(self, n_sequences: int, n_cells_used: int, seconds: float) -> None:
        """Add a step that computed one token for each of `n_sequences` and nothing else."""
        fit = self._fits.get(n_sequences)
        if fit is None:
            fit = self._fits[n_sequences] = _Fit()
        fit.observe(n_cells_used, seconds)

    def seconds_per_cell(self, n_sequences: int) -> float:
        """Return the cost per step; 0 until there are enough observations."""
        fit = self._fits.get(n_sequences)
        return fit.slope() if fit else 0.0


def should_park(tax_paid_seconds: float, restore_seconds: float) -> bool:
    """Return whether to free an idle slot: once keeping it has cost as much as a restore will.

    `tax_paid_seconds` is the slot's cost to the others since its last use. As in the ski rental
    problem, both costs together are at most twice those of the best choice.
    """
    return tax_paid_seconds > 0 and tax_paid_seconds >= restore_seconds


class _Fit:
    """A line fitted to (cells, seconds). Older points count less."""

    # All four are picked. _KEEP remembers 500 steps: a conversation alone adds one cell per step.
    # The spread is a standard deviation. Below it, noise would look like a slope.
    _KEEP = 0.998
    _MIN_WEIGHT = 64.0
    _MIN_SPREAD_CELLS = 512.0
    _OUTLIER = 3.0  # times the mean; larger values are cut, so that a stall does not tilt the line

    __slots__ = ("_cells", "_cells_seconds", "_cells_squared", "_seconds", "_weight")

    def __init__(self) -> None:
        self._weight = self._cells = self._seconds = 0.0
        self._cells_squared = self._cells_seconds = 0.0

    def observe(self, n_cells: int, seconds: float) -> None:
        keep, weight = self._KEEP, self._weight
        if weight > 1.0 and seconds * weight > self._OUTLIER * self._seconds:
            seconds = self._OUTLIER * self._seconds / weight
        self._weight = weight * keep + 1.0
        self._cells = self._cells * keep + n_cells
        self._seconds = self._seconds * keep + seconds
        self._cells_squared = self._cells_squared * keep + n_cells * n_cells
        self._cells_seconds = self._cells_seconds * keep + n_cells * seconds

    def slope(self) -> float:
        if self._weight < self._MIN_WEIGHT:
            return 0.0
        mean_cells = self._cells / self._weight
        variance = self._cells_squared / self._weight - mean_cells * mean_cells
        if variance < self._MIN_SPREAD_CELLS**2:
            return 0.0
        covariance = self._cells_seconds / self._weight - mean_cells * self._seconds / self._weight
        return max(covariance / variance, 0.0)
