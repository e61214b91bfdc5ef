"""The upstreams of one model: routing, waiting, and probing after a failure."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

import httpx

from rekindle.errors import RekindleError, UpstreamFailed
from rekindle.vllm.upstream import ProbeTerms, Served, Upstream, UpstreamGone

_log = logging.getLogger("rekindle.upstream")

FIRST_REST_SECONDS, MAX_REST_SECONDS = 1.0, 60.0  # between two probes; picked


class Routing:
    """State of a request that is looking for an upstream."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys  # of the prompt's chunks
        self.tried: set[Upstream] = set()


class Fleet:
    """Upstreams on the event loop. `n_each` is the most requests that run on one upstream."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        served: Served,
        terms: ProbeTerms,
        *,
        n_each: int,
        first_rest_seconds: float = FIRST_REST_SECONDS,
    ) -> None:
        self.upstreams = tuple(upstreams)
        self.served = served
        self.terms = terms
        self._n_each = n_each
        self._first_rest_seconds = first_rest_seconds
        self._waiting: OrderedDict[Routing, asyncio.Future[Upstream]] = OrderedDict()
        self._probing: dict[Upstream, asyncio.Task[None]] = {}

    @property
    def n_slots(self) -> int:
        return self._n_each * len(self._usable())

    @property
    def trouble(self) -> str | None:
        return "; ".join(each.trouble for each in self.upstreams if each.trouble) or None

    def start(self, client: httpx.AsyncClient) -> None:
        """Probe the upstreams again that did not answer at the start."""
        self._client = client
        for upstream in self.upstreams:
            if upstream.trouble is not None:
                self._watch(upstream)

    async def close(self) -> None:
        tasks = list(self._probing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def n_tokens_known(self, keys: Sequence[bytes]) -> int:
        """Return how many leading tokens the best upstream for a prompt knows."""
        return max((each.prefixes.n_tokens_known(keys) for each in self._usable()), default=0)

    def check_usable(self) -> None:
        if not self._usable():
            raise self._none_usable()

    async def take(self, routing: Routing) -> Upstream:
        """Wait for a free upstream, in order of arrival. Raises UpstreamFailed if none is left."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[routing] = turn
        self._advance()
        try:
            upstream: Upstream = await turn
            return upstream
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())
            raise
        finally:
            if self._waiting.pop(routing, None) is not None:
                self._advance()

    def give_back(self, upstream: Upstream) -> None:
        upstream.n_running -= 1
        self._advance()

    def note_failure(self, upstream: Upstream, error: UpstreamFailed) -> None:
        """Probe an upstream after a failure.

        An upstream that is gone is not used until a probe succeeds. Any other failed upstream stays
        in use meanwhile: the request may have been the cause.
        """
        if isinstance(error, UpstreamGone):
            upstream.trouble = error.message
            upstream.prefixes.clear()  # the upstream may have restarted
        if upstream not in self._probing:
            _log.warning("upstream=%s failed, probing: %s", upstream.name, error.message)
            self._watch(upstream)
        self._advance()

    def _watch(self, upstream: Upstream) -> None:
        self._probing[upstream] = asyncio.create_task(self._revive(upstream))

    async def _revive(self, upstream: Upstream) -> None:
        seconds = self._first_rest_seconds
        while True:
            try:
                served = await upstream.find_model(self._client)
                check_same(upstream, served, self.served)
                await upstream.probe(self._client, self.terms)
                break
            except RekindleError as error:
                upstream.trouble = error.message
                self._advance()
                _log.debug(
                    "upstream=%s probe failed, retry_seconds=%g: %s",
                    upstream.name,
                    seconds,
                    error.message,
                )
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, MAX_REST_SECONDS)
        _log.info("upstream=%s probe succeeded", upstream.name)
        del self._probing[upstream]  # before any await: the next failure starts a new probe
        self._advance()

    def _usable(self) -> list[Upstream]:
        return [each for each in self.upstreams if each.trouble is None]

    def _advance(self) -> None:
        """Give waiting requests their upstream, or an error if no upstream is left for them."""
        for routing, turn in list(self._waiting.items()):
            if turn.done():  # cancelled: `take` removes it
                continue
            usable = [each for each in self._usable() if each not in routing.tried]
            free = [each for each in usable if each.n_running < self._n_each]
            if not usable:
                turn.set_exception(self._none_usable())
            elif free:
                upstream = _best(routing, free)
                upstream.n_running += 1
                turn.set_result(upstream)
            else:
                continue  # later requests may take only upstreams that this one has tried
            del self._waiting[routing]

    def _none_usable(self) -> UpstreamFailed:
        return UpstreamFailed(f"No upstream can answer. {self.trouble or ''}".rstrip())


def _best(routing: Routing, free: Sequence[Upstream]) -> Upstream:
    """Return the upstream that knows most of the prompt; among equals, the least busy one."""
    return max(free, key=lambda each: (each.prefixes.n_tokens_known(routing.keys), -each.n_running))


def check_same(upstream: Upstream, served: Served, expected: Served) -> None:
    if served.model != expected.model or served.n_ctx < expected.n_ctx:
        raise UpstreamFailed(
            f"The upstream {upstream.name} serves {served.model} with {served.n_ctx} tokens of"
            f" context; the others serve {expected.model} with {expected.n_ctx}."
        )
