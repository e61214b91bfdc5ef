"""One server during a workload: requests go out here, and their outcomes are kept."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rekindle.bench.meter import counts_in, n_prefilled_by
from rekindle.bench.peers.processes import ProcessUsage, ServerProcess
from rekindle.bench.timeline.stages import Window
from rekindle.bench.workloads.texts import Texts
from rekindle.priming.files import Body
from rekindle.replay.client import Changes, Outcome, Server
from rekindle.replay.numbers import sum_if_all_known
from rekindle.replay.traffic import ReplayRequest

REQUEST_LIMIT_SECONDS = 600.0  # picked: a hanging server must not stop the run
CHAT = "/v1/chat/completions"
AS_GIVEN = Changes(max_tokens=None, model=None)


@dataclass(slots=True)
class StageTraffic:
    """`outcome.index` is the index of its request."""

    requests: list[ReplayRequest] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def answered(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.error is None]


@dataclass(slots=True, kw_only=True)
class Stage:
    """A server, the texts to send to it, and everything that was sent and answered."""

    url: str
    process: ServerProcess | None  # None: a remote server
    texts: Texts
    n_slots: int
    is_quick: bool
    calls_tools: bool
    on_request: Callable[[str], None]
    traffic: StageTraffic = field(default_factory=StageTraffic)
    notes: list[str] = field(default_factory=list)
    decoded: list[Outcome] = field(default_factory=list)  # replies whose decode speed counts
    server: Server = field(init=False)
    _began: float = 0.0
    _n_prefilled_before: int = 0  # by processes that have ended
    _n_prefilled_at_start: int | None = None

    def __post_init__(self) -> None:
        self.server = Server(self.url, None, AS_GIVEN)

    async def open(self) -> None:
        """Check that the server answers. Its counter and the clock start here."""
        await self._connect()
        self._began = time.monotonic()

    async def close(self) -> None:
        await self.server.http.aclose()

    def times(self, n: int) -> int:
        """Return how often to do something: a quick run does a quarter, at least 2."""
        return max(n // 4, 2) if self.is_quick else n

    async def send(self, name: str, body: Body, conversation: str) -> Outcome:
        """Send a chat completion."""
        return await self.send_request(
            ReplayRequest(
                name=name, path=CHAT, body=body, headers=(), conversation=conversation, source=0
            )
        )

    async def send_request(self, request: ReplayRequest) -> Outcome:
        self.on_request(request.name)
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

    def windows(self) -> list[Window]:
        """Return when each request was sent, got its first token and ended."""
        return [
            Window(
                self.traffic.requests[each.index].name,
                self._began + each.start,
                self._began + each.start + each.first_token_seconds,
                self._began + each.start + each.seconds,
            )
            for each in self.traffic.answered
            if each.first_token_seconds is not None
        ]

    async def pause(self, seconds: float) -> None:
        """Wait as a reading user does. No measured time includes this."""
        await asyncio.sleep(seconds / 4 if self.is_quick else seconds)

    async def kill_and_restart(self) -> None:
        if self.process is None:
            self.notes.append("it is a remote server and was not restarted")
            return
        self._n_prefilled_before += await self._n_prefilled_since_start() or 0
        await self.close()
        await self.process.end(signal.SIGKILL)
        seconds = await self.process.start()
        self.notes.append(f"back after {seconds:.1f} s")
        self.server = Server(self.url, None, AS_GIVEN)
        await self._connect()

    async def end_process(self) -> ProcessUsage:
        """Stop the server, if it is ours, and return what it used."""
        if self.process is None:
            return ProcessUsage()
        await self.process.end()
        return self.process.usage

    async def n_prefilled(self) -> int | None:
        """Return the tokens prefilled by the server's own counter. None: it has none."""
        here = await self._n_prefilled_since_start()
        return None if here is None else self._n_prefilled_before + here

    def n_prefilled_by_replies(self) -> int | None:
        """Return the tokens prefilled by the counts in replies. None: some have no counts."""
        return sum_if_all_known(each.counts.n_prefilled for each in self.traffic.answered)

    def read_log(self) -> None:
        """Take the counts from the log if replies have none."""
        answered = self.traffic.answered
        if self.process is None or any(each.counts.n_prefilled is not None for each in answered):
            return
        counts = list(counts_in(self.process.log))
        if len(counts) != len(answered):
            return
        in_order = sorted(answered, key=lambda each: each.start + each.seconds)
        logged = {each.index: count for each, count in zip(in_order, counts, strict=True)}
        self.traffic.outcomes = [
            replace(each, counts=logged.get(each.index, each.counts))
            for each in self.traffic.outcomes
        ]

    async def _connect(self) -> None:
        await self.server.check()
        self._n_prefilled_at_start = await n_prefilled_by(self.server)

    async def _n_prefilled_since_start(self) -> int | None:
        start = self._n_prefilled_at_start
        if start is None and self.process is not None:
            start = 0  # it had just started, and did not show its counter yet
        now = await n_prefilled_by(self.server)
        return None if now is None or start is None else now - start
