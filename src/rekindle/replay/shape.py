"""When each request starts. No clock and no network: callers report which requests ended."""

import heapq
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from rekindle.errors import StartupError
from rekindle.replay.traffic import ReplayRequest, Traffic

SHAPES = "recorded, sequential, interleaved or concurrent:N"
_CONCURRENT = re.compile(r"concurrent[ :=](\d+)")


class Schedule(Protocol):
    def take_ready(self) -> list[int]:
        """Return the requests that may start now, each once."""

    def end(self, index: int) -> None:
        """Note that the request has ended, with or without an error."""


def shape_of(traffic: Traffic, wanted: str | None) -> str:
    """Return the wanted shape, or the default one. Raise StartupError if it does not fit."""
    if wanted is None:
        return "recorded" if traffic.has_times else "sequential"
    if wanted == "recorded" and not traffic.has_times:
        raise StartupError("--shape recorded: not every request has a time. Choose another shape.")
    if concurrent := _CONCURRENT.fullmatch(wanted):
        if int(concurrent[1]) < 1:
            raise StartupError("--shape concurrent:N needs an N of at least 1.")
        return f"concurrent:{int(concurrent[1])}"
    if wanted not in ("recorded", "sequential", "interleaved"):
        raise StartupError(f"--shape should be {SHAPES}, not {wanted!r}.")
    return wanted


def schedule_of(requests: Sequence[ReplayRequest], shape: str) -> Schedule:
    match shape:
        case "recorded":
            return Recorded(requests)
        case "sequential":
            return InTurn(range(len(requests)))
        case "interleaved":
            return InTurn(_round_robin(requests))
        case _:
            return Concurrent(requests, limit=int(shape.partition(":")[2]))


class Recorded:
    """A request waits for all requests that had ended before it started, without think time.

    `requests` are in the order they started, file after file.
    """

    def __init__(self, requests: Sequence[ReplayRequest]) -> None:
        self._order_of_ends: list[int] = []
        self._n_ends_before: list[int] = []  # by request: how many of those ends it waits for
        running: list[tuple[float, int]] = []
        for index, request in enumerate(requests):
            # A file waits for the one before it.
            is_next_file = index and requests[index - 1].source != request.source
            started_after = inf if is_next_file else request.started or 0.0
            while running and running[0][0] <= started_after:
                self._order_of_ends.append(heapq.heappop(running)[1])
            self._n_ends_before.append(len(self._order_of_ends))
            heapq.heappush(running, (inf if request.ended is None else request.ended, index))
        self._ended: set[int] = set()
        self._n_ends = 0  # leading requests of `_order_of_ends` that have ended here
        self._next = 0

    def take_ready(self) -> list[int]:
        first = self._next
        while (
            self._next < len(self._n_ends_before)
            and self._n_ends_before[self._next] <= self._n_ends
        ):
            self._next += 1
        return list(range(first, self._next))

    def end(self, index: int) -> None:
        self._ended.add(index)
        while (
            self._n_ends < len(self._order_of_ends)
            and self._order_of_ends[self._n_ends] in self._ended
        ):
            self._n_ends += 1


@dataclass(slots=True)
class InTurn:
    """One request at a time, in this order."""

    order: Sequence[int]
    n_started: int = 0
    n_ended: int = 0

    def take_ready(self) -> list[int]:
        if self.n_started > self.n_ended or self.n_started == len(self.order):
            return []
        self.n_started += 1
        return [self.order[self.n_started - 1]]

    def end(self, index: int) -> None:
        assert index == self.order[self.n_ended]
        self.n_ended += 1


class Concurrent:
    """Up to `limit` requests at once, one of each conversation."""

    def __init__(self, requests: Sequence[ReplayRequest], *, limit: int) -> None:
        self._conversations = [request.conversation for request in requests]
        self._waiting = list(range(len(requests)))
        self._running: set[int] = set()
        self._limit = limit

    def take_ready(self) -> list[int]:
        busy = {self._conversations[index] for index in self._running}
        ready: list[int] = []
        for index in self._waiting:
            if len(self._running) + len(ready) == self._limit:
                break
            if self._conversations[index] not in busy:
                busy.add(self._conversations[index])
                ready.append(index)
        self._running.update(ready)
        self._waiting = [index for index in self._waiting if index not in self._running]
        return ready

    def end(self, index: int) -> None:
        self._running.remove(index)


def _round_robin(requests: Sequence[ReplayRequest]) -> list[int]:
    queues: dict[str, deque[int]] = {}
    for index, request in enumerate(requests):
        queues.setdefault(request.conversation, deque()).append(index)
    order: list[int] = []
    while len(order) < len(requests):
        order += [queue.popleft() for queue in queues.values() if queue]
    return order
