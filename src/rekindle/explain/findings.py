"""Misses of a trace put together: what happened again and again, and what it cost."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.explain.trace_file import TracedReply
from rekindle.explain.volatile import Volatile, volatile_of
from rekindle.observe.request_record import Miss, MissReason

HOUR_SECONDS = 3600.0
MIN_TIMES = 2  # that a place changes before it is called volatile
SHOWN_VALUES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    n_times: int
    tokens: int
    tokens_in_last_hour: int  # of the trace
    tokens_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MissGroup:
    """Misses of one session at one place, for one reason."""

    session: str
    miss: Miss  # the last of them
    cost: Cost
    volatile: Volatile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolatileSpan:
    """A place that changes on and on, whoever asks."""

    volatile: Volatile  # as it was last
    miss: Miss
    cost: Cost
    n_sessions: int
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    n_replies: int
    n_prompt: int
    n_cached: int
    n_prefilled: int
    n_recomputed: int
    n_lost: int
    seconds: float  # from the first reply to the last
    reasons: dict[MissReason, int]
    volatile: tuple[VolatileSpan, ...]  # the dearest first
    groups: tuple[MissGroup, ...]


@dataclass(frozen=True, slots=True)
class _SeenReplies:
    at: float
    session: str
    miss: Miss


def findings_of(replies: Sequence[TracedReply]) -> Findings:
    seen = [
        _SeenReplies(each.at, each.session, each.miss) for each in replies if each.miss is not None
    ]
    first, last = (replies[0].at, replies[-1].at) if replies else (0.0, 0.0)
    price = _Price(first, last)
    return Findings(
        n_replies=len(replies),
        n_prompt=sum(each.n_prompt for each in replies),
        n_cached=sum(each.n_cached for each in replies),
        n_prefilled=sum(each.n_prefilled for each in replies),
        n_recomputed=sum(each.n_recomputed for each in replies),
        n_lost=sum(each.miss.tokens_lost for each in seen),
        seconds=last - first,
        reasons=dict(Counter(each.miss.reason for each in seen)),
        volatile=_volatile(seen, price),
        groups=_groups(seen, price),
    )


class _Price:
    def __init__(self, first: float, last: float) -> None:
        self._hour_began = last - HOUR_SECONDS
        self._hours = max((last - first) / HOUR_SECONDS, 1.0)

    def of(self, seen: Iterable[_SeenReplies]) -> Cost:
        lost = [(each.at, each.miss.tokens_lost) for each in seen]
        tokens = sum(n for _, n in lost)
        return Cost(
            n_times=len(lost),
            tokens=tokens,
            tokens_in_last_hour=sum(n for at, n in lost if at >= self._hour_began),
            tokens_per_hour=tokens / self._hours,
        )


def _groups(seen: Sequence[_SeenReplies], price: _Price) -> tuple[MissGroup, ...]:
    places: dict[object, list[_SeenReplies]] = defaultdict(list)
    for each in seen:
        miss = each.miss
        if miss.tokens_lost:
            places[each.session, miss.reason, miss.message, miss.part].append(each)
    groups = [
        MissGroup(
            session=group[-1].session,
            miss=group[-1].miss,
            cost=price.of(group),
            volatile=volatile_of(group[-1].miss),
        )
        for group in places.values()
    ]
    return tuple(sorted(groups, key=lambda group: -group.cost.tokens))


def _volatile(seen: Sequence[_SeenReplies], price: _Price) -> tuple[VolatileSpan, ...]:
    places: dict[object, list[tuple[_SeenReplies, Volatile]]] = defaultdict(list)
    for each in seen:
        found = volatile_of(each.miss)
        if found is not None and each.miss.tokens_lost:
            places[each.miss.message, each.miss.part, found.kind].append((each, found))
    spans = [
        VolatileSpan(
            volatile=found[-1][1],
            miss=found[-1][0].miss,
            cost=price.of(each for each, _ in found),
            n_sessions=len({each.session for each, _ in found}),
            values=tuple(dict.fromkeys(what.value for _, what in reversed(found)))[:SHOWN_VALUES],
        )
        for found in places.values()
        if len(found) >= MIN_TIMES
    ]
    return tuple(sorted(spans, key=lambda span: -span.cost.tokens))
