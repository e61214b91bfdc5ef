"""Snapshots of a server, made from the replies of its endpoints, and rates between two.

Pure functions: replies in, values out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SHARED = "shared"
SOURCES = ("live", "memory", "disk", SHARED, "upstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    id: int
    is_processing: bool
    session: str
    rank: str
    n_rows: int
    n_prompt: int
    n_decoded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    name: str
    n_entries: int
    n_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    name: str
    last_used: float  # seconds since the epoch
    n_requests: int
    n_prompt: int
    n_cached: int
    n_prefilled: int
    n_prefilled_twice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Prompt tokens by source, and generated ones: since the server's start, or per second."""

    live: float
    memory: float
    disk: float
    shared: float
    upstream: float
    prefilled: float
    generated: float

    @property
    def n_reused(self) -> float:
        return self.live + self.memory + self.disk + self.shared + self.upstream

    @property
    def hit_share(self) -> float | None:
        """Cached share of the prompt tokens; None: there were none."""
        n_prompt = self.n_reused + self.prefilled
        return self.n_reused / n_prompt if n_prompt else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    taken_at: float  # seconds since the epoch
    model: str | None  # None: no model is loaded
    version: str | None
    uptime_seconds: float | None  # None: the server does not report it
    n_slots: int
    n_busy: int
    n_waiting: int
    n_cells: int
    n_cells_used: int
    tokens: Tokens
    tiers: tuple[TierView, ...]
    is_shared_store_up: bool | None  # None: there is no shared store
    slots: tuple[SlotView, ...]
    sessions: tuple[SessionView, ...]  # most recently used first


def snapshot_of(
    *,
    taken_at: float,
    props: Mapping[str, Any] | None,  # None: no model is loaded
    props_age_seconds: float,
    metrics: "Metrics",
    slots: Sequence[Mapping[str, Any]],
    sessions: Sequence[Mapping[str, Any]],
) -> ServerSnapshot:
    """Raises ValueError, LookupError or TypeError if a reply is not from a Rekindle server."""
    ours = props["rekindle"] if props is not None else {}
    uptime = ours.get("uptime_seconds")
    return ServerSnapshot(
        taken_at=taken_at,
        model=props["model_alias"] if props is not None else None,
        version=ours.get("version"),
        uptime_seconds=None if uptime is None else uptime + props_age_seconds,
        n_slots=metrics.get("rekindle_slots"),
        n_busy=metrics.get("rekindle_slots_busy"),
        n_waiting=metrics.get("rekindle_requests_waiting"),
        n_cells=metrics.get("rekindle_cells"),
        n_cells_used=metrics.get("rekindle_cells_used"),
        tokens=metrics.tokens(),
        tiers=tuple(
            TierView(
                name=name,
                n_entries=metrics.get("rekindle_cache_entries", name),
                n_bytes=metrics.get("rekindle_cache_bytes", name),
                budget_bytes=metrics.get("rekindle_cache_budget_bytes", name),
            )
            for name in metrics.labels("rekindle_cache_entries")
        ),
        is_shared_store_up=(
            metrics.get("rekindle_shared_store_up") == 1
            if metrics.labels("rekindle_shared_store_up")
            else None
        ),
        slots=tuple(map(_slot, slots)),
        sessions=tuple(map(_session, sessions)),
    )


def rates_between(before: ServerSnapshot, after: ServerSnapshot) -> Tokens | None:
    """Return tokens per second. None: no time has passed, or the server was restarted."""
    seconds = after.taken_at - before.taken_at
    one, two = asdict(before.tokens), asdict(after.tokens)
    grown = {name: two[name] - one[name] for name in two}
    if seconds <= 0 or min(grown.values()) < 0:
        return None
    return Tokens(**{name: amount / seconds for name, amount in grown.items()})


class Metrics:
    """Values by name, and by their only label."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                label = next(iter(sample.labels.values()), "")
                self._values[sample.name, label] = sample.value

    def get(self, name: str, label: str = "") -> int:
        """Return 0 for a missing value: a counter appears with its first count."""
        return int(self._values.get((name, label), 0))

    def labels(self, name: str) -> list[str]:
        return [label for each, label in self._values if each == name]

    def tokens(self) -> Tokens:
        reused = "rekindle_prompt_tokens_reused_total"
        return Tokens(
            **{source: self.get(reused, source) for source in SOURCES},
            prefilled=self.get("rekindle_prompt_tokens_prefilled_total"),
            generated=self.get("rekindle_generated_tokens_total"),
        )


def _slot(told: Mapping[str, Any]) -> SlotView:
    return SlotView(
        id=told["id"],
        is_processing=told["is_processing"],
        session=told["session"],
        rank=told["class"],
        n_rows=told["n_rows"],
        n_prompt=told["n_prompt_tokens"],
        n_decoded=sum(each["n_decoded"] for each in told["next_token"]),
    )


def _session(told: Mapping[str, Any]) -> SessionView:
    return SessionView(
        name=told["session"],
        last_used=told["last_used"],
        n_requests=told["requests"],
        n_prompt=told["prompt_tokens"],
        n_cached=told["cached_tokens"],
        n_prefilled=told["prefilled_tokens"],
        n_prefilled_twice=told["prefilled_twice_tokens"],
    )
