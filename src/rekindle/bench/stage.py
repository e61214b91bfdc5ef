"""Where a workload plays: one server, what is sent to it, and what came of it."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.bench.meter import count_log, prefilled_so_far
from rekindle.bench.peers.processes import ServerProcess
from rekindle.bench.workloads.texts import Texts
from rekindle.priming.files import Body
from rekindle.replay.client import Changes, Outcome, Server
from rekindle.replay.traffic import ReplayRequest

REQUEST_LIMIT_SECONDS = 600.0  # picked: a server that hangs is not waited for
CHAT = "/v1/chat/completions"
AS_GIVEN = Changes(max_tokens=None, model=None)


@dataclass(slots=True)
class StageTraffic:
    """The request of an outcome is the one at its index."""

    requests: list[ReplayRequest] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a workload is played."""

    n_slots: int
    is_quick: bool = False

    def times(self, n: int) -> int:
        return max(n // 4, 2) if self.is_quick else n


class Stage:
    def __init__(
        self,
        url: str,
        *,
        process: ServerProcess | None,  # None: somebody else has started it
        texts: Texts,
        size: Size,
        calls_tools: bool,
        on_request: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.server = Server(url, None, AS_GIVEN)
        self.texts = texts
        self.size = size
        self.calls_tools = calls_tools
        self.traffic = StageTraffic()
        self.notes: list[str] = []
        self._process = process
        self._on_request = on_request
        self._began = time.monotonic()
        self._n_prefilled_before = 0  # by processes that have ended
        self._n_prefilled_at_start: int | None = None

    async def open(self) -> None:
        await self.server.check()
        self._n_prefilled_at_start = await prefilled_so_far(self.server)
        self._began = time.monotonic()

    async def close(self) -> None:
        await self.server.http.aclose()

    async def send(self, name: str, body: Body, conversation: str) -> Outcome:
        """A chat completion."""
        return await self.send_request(
            ReplayRequest(
                name=name, path=CHAT, body=body, headers=(), conversation=conversation, source=0
            )
        )

    async def send_request(self, request: ReplayRequest) -> Outcome:
        self._on_request(request.name)
        index = len(self.traffic.requests)
        self.traffic.requests.append(request)
        try:
            async with asyncio.timeout(REQUEST_LIMIT_SECONDS):
                outcome = await self.server.send(index, request, self._began)
        except TimeoutError:
            start = time.monotonic() - self._began - REQUEST_LIMIT_SECONDS
            outcome = Outcome(index, start, REQUEST_LIMIT_SECONDS, error="no reply in time")
        self.traffic.outcomes.append(outcome)
        return outcome

    async def pause(self, seconds: float) -> None:
        """Somebody reads; it is in nobody's time."""
        await asyncio.sleep(seconds / 4 if self.size.is_quick else seconds)

    async def kill_and_restart(self) -> None:
        if self._process is None:
            self.notes.append("it was not restarted, as somebody else has started it")
            return
        self._n_prefilled_before += await self._prefilled_here() or 0
        await self.close()
        await self._process.end(signal.SIGKILL)
        seconds = await self._process.start()
        self.notes.append(f"back after {seconds:.1f} s")
        self.server = Server(self._process.url, None, AS_GIVEN)
        await self.server.check()
        self._n_prefilled_at_start = await prefilled_so_far(self.server)

    async def n_prefilled(self) -> int | None:
        """By the server's own count; None: it has none."""
        here = await self._prefilled_here()
        return None if here is None else self._n_prefilled_before + here

    def n_prefilled_as_told(self) -> int | None:
        """By its replies; None: not all of them say."""
        told = [each.counts.n_prefilled for each in self.traffic.outcomes if each.error is None]
        known = [n for n in told if n is not None]
        return sum(known) if known and len(known) == len(told) else None

    def read_log(self) -> None:
        """Of a server that counts nothing in its replies, but in its log."""
        outcomes = self.traffic.outcomes
        answered = [each for each in outcomes if each.error is None]
        if self._process is None or any(each.counts.n_prefilled is not None for each in answered):
            return
        counts = count_log(self._process.log)
        if len(counts) != len(answered):
            return
        in_order = sorted(answered, key=lambda each: each.start + each.seconds)
        told = {each.index: count for each, count in zip(in_order, counts, strict=True)}
        self.traffic.outcomes = [
            replace(each, counts=told.get(each.index, each.counts)) for each in outcomes
        ]

    async def _prefilled_here(self) -> int | None:
        if self._n_prefilled_at_start is None:
            return None
        now = await prefilled_so_far(self.server)
        return None if now is None else now - self._n_prefilled_at_start


def fields_of(message: Body) -> dict[str, Any]:
    """What clients send back of a reply."""
    names = ("role", "content", "reasoning_content", "tool_calls")
    return {name: message[name] for name in names if name in message}
