"""The stages of each request: what the engine or the server did at each moment of it.

The engine thread counts first, then the server. A moment in which neither was in a known stage is
"elsewhere": HTTP, sockets, the client, Python of the server that has no probe. While several
requests run, each of them gets the whole time of the engine.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

from rekindle.observe.timeline import StageSpan

WAITING = "wait for orders"
STEP = "step"  # of the engine loop, outside all other stages
BETWEEN = "Python between stages"
ELSEWHERE = "elsewhere"
SERVER = "server"
Seconds = defaultdict[str, float]  # by stage


class Window(NamedTuple):
    """A request as its client saw it. Times are those of `time.monotonic`."""

    name: str
    sent: float
    first_token: float
    ended: float


class Segment(NamedTuple):
    stage: str
    began: float
    ended: float
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Lanes:
    """What ran at the same time. The segments of a lane follow each other."""

    server: Sequence[Segment]
    engine: Sequence[Segment]
    stores: Sequence[Segment]  # threads that read and write entries; some run side by side

    def seconds(self, began: float, ended: float) -> Seconds:
        """Return the seconds of each stage. Together they are the whole time."""
        found: Seconds = defaultdict(float)
        free = began  # up to here, the time is spent
        for segment in _clipped(self.engine, began, ended):
            self._fill(found, free, segment.began)
            found[segment.stage] += segment.ended - segment.began
            free = segment.ended
        self._fill(found, free, ended)
        return found

    def _fill(self, found: Seconds, began: float, ended: float) -> None:
        """Add a time in which the engine had nothing to do."""
        rest = ended - began
        for segment in _clipped(self.server, began, ended):
            found[segment.stage] += segment.ended - segment.began
            rest -= segment.ended - segment.began
        if rest > 0:
            found[ELSEWHERE] += rest


def lanes_of(processes: dict[str, list[StageSpan]]) -> Lanes:
    """Sort the spans of all processes into lanes. A restarted server has several processes."""
    server, engine, stores = [], [], []
    for process, spans in processes.items():
        by_thread = sorted(spans, key=lambda span: span.thread)
        for _, found in groupby(by_thread, key=lambda span: span.thread):
            segments = list(segments_of(found))
            if process.startswith(SERVER):
                server += segments
            elif any(segment.stage == BETWEEN for segment in segments):
                engine += [each for each in segments if each.stage != WAITING]
            else:
                stores += segments
    in_order = [
        sorted(each, key=lambda segment: segment.began) for each in (server, engine, stores)
    ]
    server, engine, stores = in_order
    return Lanes(list(_one_after_another(server)), engine, stores)


def _one_after_another(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Cut segments of several threads where they overlap: the time counts once."""
    at = 0.0
    for segment in segments:
        if segment.ended > at:
            yield segment._replace(began=max(segment.began, at))
            at = segment.ended


def segments_of(spans: Iterable[StageSpan]) -> Iterator[Segment]:
    """Yield the innermost span of one thread at each moment. `spans` come by their beginning."""
    running: list[StageSpan] = []
    at = 0.0  # all before it has been yielded
    for span in (*spans, StageSpan("", math.inf, math.inf, "")):
        while running and running[-1].ended <= span.began:
            inner = running.pop()
            yield from _segment(inner, at, inner.ended)
            at = max(at, inner.ended)
        if running:
            yield from _segment(running[-1], at, span.began)
        at = span.began
        running.append(span)


def _segment(span: StageSpan, began: float, ended: float) -> Iterator[Segment]:
    if ended > began:
        yield Segment(BETWEEN if span.stage == STEP else span.stage, began, ended, span.n_tokens)


def _clipped(segments: Sequence[Segment], began: float, ended: float) -> Iterator[Segment]:
    """Yield the parts of the segments between two times."""
    first = bisect_right(segments, began, key=lambda segment: segment.ended)
    for segment in islice(segments, first, None):
        if segment.began >= ended:
            return
        yield segment._replace(began=max(segment.began, began), ended=min(segment.ended, ended))
