"""The misses of a trace, grouped by place and reason, with their cost."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.explain.trace_file import TracedReply
from rekindle.explain.volatile import Volatile, volatile_of
from rekindle.observe.request_record import Miss, MissReason

HOUR_SECONDS = 3600.0
MIN_TIMES = 2  # changes of a place before it counts as volatile
SHOWN_VALUES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    n_times: int
    tokens: int
    tokens_in_last_hour: int  # the last hour of the trace
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
    """A place that changes from prompt to prompt, in any session."""

    volatile: Volatile  # its last value
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
    volatile: tuple[VolatileSpan, ...]  # most expensive first
    groups: tuple[MissGroup, ...]


@dataclass(frozen=True, slots=True)
class _Missed:
    at: float
    session: str
    miss: Miss


def findings_of(replies: Sequence[TracedReply]) -> Findings:
    """Sum up the replies, which are in order of time."""
    missed = [
        _Missed(each.at, each.session, each.miss) for each in replies if each.miss is not None
    ]
    first, last = (replies[0].at, replies[-1].at) if replies else (0.0, 0.0)
    costly = [each for each in missed if each.miss.tokens_lost]
    return Findings(
        n_replies=len(replies),
        n_prompt=sum(each.n_prompt for each in replies),
        n_cached=sum(each.n_cached for each in replies),
        n_prefilled=sum(each.n_prefilled for each in replies),
        n_recomputed=sum(each.n_recomputed for each in replies),
        n_lost=sum(each.miss.tokens_lost for each in missed),
        seconds=last - first,
        reasons=dict(Counter(each.miss.reason for each in missed)),
        volatile=_volatile(costly, first, last),
        groups=_groups(costly, first, last),
    )


def _cost(missed: Iterable[_Missed], first: float, last: float) -> Cost:
    lost = [(each.at, each.miss.tokens_lost) for each in missed]
    tokens = sum(n for _, n in lost)
    return Cost(
        n_times=len(lost),
        tokens=tokens,
        tokens_in_last_hour=sum(n for at, n in lost if at >= last - HOUR_SECONDS),
        tokens_per_hour=tokens / max((last - first) / HOUR_SECONDS, 1.0),
    )


def _groups(missed: Sequence[_Missed], first: float, last: float) -> tuple[MissGroup, ...]:
    places: dict[object, list[_Missed]] = defaultdict(list)
    for each in missed:
        places[each.session, each.miss.reason, each.miss.message, each.miss.part].append(each)
    groups = [
        MissGroup(
            session=group[-1].session,
            miss=group[-1].miss,
            cost=_cost(group, first, last),
            volatile=volatile_of(group[-1].miss),
        )
        for group in places.values()
    ]
    return tuple(sorted(groups, key=lambda group: -group.cost.tokens))


def _volatile(missed: Sequence[_Missed], first: float, last: float) -> tuple[VolatileSpan, ...]:
    places: dict[object, list[tuple[_Missed, Volatile]]] = defaultdict(list)
    for each in missed:
        if (found := volatile_of(each.miss)) is not None:
            places[each.miss.message, each.miss.part, found.kind].append((each, found))
    spans = [
        VolatileSpan(
            volatile=found[-1][1],
            miss=found[-1][0].miss,
            cost=_cost((each for each, _ in found), first, last),
            n_sessions=len({each.session for each, _ in found}),
            values=tuple(dict.fromkeys(what.value for _, what in reversed(found)))[:SHOWN_VALUES],
        )
        for found in places.values()
        if len(found) >= MIN_TIMES
    ]
    return tuple(sorted(spans, key=lambda span: -span.cost.tokens))
