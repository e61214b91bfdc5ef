"""`generation.Engine` over vLLM servers: one task per request, all on the event loop.

What is cached is the upstreams' own affair; here it is only known what was sent to whom.

vLLM tells how much of a prompt it had only behind the last token, unless it puts usage into
every chunk. A reply therefore begins with progress that holds what is known of the upstream,
and `PromptEvaluated` comes when the upstream has told: at its first chunk, or at the end.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import httpx

from rekindle.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RekindleError,
    ShuttingDown,
    UpstreamFailed,
    UpstreamTimedOut,
)
from rekindle.generation.events import (
    CachedSpan,
    CacheSource,
    Embedded,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenEvent,
)
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    Forecast,
    SlotPhase,
    SlotStatus,
    StoredBranch,
    StoredPrefix,
    TierStatus,
)
from rekindle.vllm.fleet import Claim, Fleet
from rekindle.vllm.prefix_table import CHUNK_TOKENS, chunk_keys
from rekindle.vllm.sampling import check_grammar, is_enforced, sampling_fields
from rekindle.vllm.upstream import Upstream
from rekindle.vllm.wire import Chunk, UpstreamRequest

_log = logging.getLogger("rekindle.upstream")

MAX_RETRY_SECONDS = 60
UNREPORTED_TOKENS = 2 * CHUNK_TOKENS  # known prefix from which silence is worth a word; picked


class _RunningRequest:
    """One request: its TokenStream, and where it stands."""

    def __init__(self, request: GenerationRequest, engine: "VllmEngine") -> None:
        self.request = request
        self.claim = Claim(chunk_keys(request.terms.namespace, request.prompt))
        self.events: asyncio.Queue[TokenEvent | RekindleError] = asyncio.Queue()
        self.submitted_at = self.sent_at = time.monotonic()
        self.slot: int | None = None
        self.sampled: list[int] = []
        self.evaluated: PromptEvaluated | None = None
        self.forecast: tuple[CachedSpan, ...] = ()
        self.first_chunk_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        self._engine = engine

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        try:
            while True:
                event = await self.events.get()
                if isinstance(event, RekindleError):
                    raise event
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._engine.cancel(self)

    @property
    def n_known(self) -> int:
        return self.forecast[-1].stop if self.forecast else 0


class VllmEngine:
    def __init__(
        self,
        fleet: Fleet,
        *,
        n_vocab: int,
        end_tokens: frozenset[int],
        queue_size: int,
        first_byte_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._n_vocab = n_vocab
        self._end_tokens = end_tokens
        self._queue_size = queue_size
        self._first_byte_seconds = first_byte_seconds
        self._jobs: dict[str, _RunningRequest] = {}
        self._counters = CacheCounters()
        self._mean_seconds = 1.0  # of a request, for Retry-After
        self._has_said: set[str] = set()
        self._draining = False
        self._drained = asyncio.Event()

    def start(self) -> None:
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        )
        self._fleet.start(self._client)

    def submit(self, request: GenerationRequest) -> _RunningRequest:
        if self._draining:
            raise ShuttingDown("The server is shutting down.")
        n_ctx = self._fleet.served.n_ctx
        if len(request.prompt) >= n_ctx:
            raise PromptTooLong(n_prompt=len(request.prompt), n_ctx=n_ctx)
        job = _RunningRequest(request, self)
        if request.background:  # vLLM has no such thing: it is as if somebody had arrived
            job.events.put_nowait(Finished(StopCause.YIELDED))
            return job
        if request.terms.persist:
            raise InvalidRequest(
                "vLLM keeps prompts by itself: none is stored on this server's disk.", "persist"
            )
        self._fleet.check_usable()
        n_slots = self._fleet.n_slots
        n_ahead = len(self._jobs) - n_slots
        if n_ahead >= self._queue_size:
            raise Overloaded(
                f"All {n_slots} slots are busy and {n_ahead} requests wait.",
                retry_after_seconds=self._retry_after(n_ahead),
            )
        ask = self._ask_for(request)  # refuses what vLLM cannot do
        assert request.id not in self._jobs
        self._jobs[request.id] = job
        job.task = asyncio.create_task(self._run(job, ask))
        return job

    def cancel(self, job: _RunningRequest) -> None:
        if self._jobs.pop(job.request.id, None) is not None:
            assert job.task is not None
            job.task.cancel()
            if job.first_chunk_at is not None and job.evaluated is None:
                self._evaluated(job, job.n_known)  # it will not say any more
            self._notice_drained()

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        raise InvalidRequest("This server makes no embeddings: they are not made with vLLM.")

    def check_grammar(self, grammar: Grammar) -> None:
        check_grammar(grammar)

    async def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        """What was sent before to whoever would get it; whether it is kept, vLLM does not tell."""
        spans = self._spans(self._fleet.n_tokens_known(chunk_keys(namespace, tokens)), len(tokens))
        return Forecast(len(tokens), spans, None, None)

    async def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        return ()

    async def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        return ()

    async def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        return None

    async def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        return False

    async def forget(self, key: str | None, *, namespace: str) -> int:
        return 0

    def status(self) -> EngineStatus:
        running = [job for job in self._jobs.values() if job.slot is not None]
        n_ctx = self._fleet.served.n_ctx
        tier = TierStatus(
            name=CacheSource.UPSTREAM,
            n_entries=sum(len(each.prefixes) for each in self._fleet.upstreams),
            n_bytes=0,
            budget_bytes=0,
            trouble=self._fleet.trouble,
        )
        return EngineStatus(
            n_slots=self._fleet.n_slots,
            n_running=len(running),
            n_waiting=len(self._jobs) - len(running),
            max_waiting=self._queue_size,
            n_ctx=n_ctx,
            n_cells=n_ctx,
            n_cells_used=0,
            cache=CacheStatus(
                model_class="upstream",
                off_because=None,
                tiers=(tier,),
                counters=self._counters.copy(),
            ),
            slots=tuple(sorted(map(_slot_status, running), key=lambda slot: slot.id)),
        )

    async def shut_down(self, grace_seconds: float) -> None:
        """Takes no more, lets streams end for a while, then cuts them."""
        self._draining = True
        if self._jobs:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), grace_seconds)
        self.cut()
        await self._fleet.close()
        await self._client.aclose()

    def cut(self) -> None:
        """Ends every request at once, with an error that says why."""
        self._draining = True
        for job in list(self._jobs.values()):
            job.events.put_nowait(ShuttingDown("The server is shutting down."))
            self.cancel(job)

    async def _run(self, job: _RunningRequest, ask: UpstreamRequest) -> None:
        try:
            await self._generate_somewhere(job, ask)
        except RekindleError as error:
            job.events.put_nowait(error)
        except Exception as error:
            _log.exception("request=%s failed", job.request.id)
            job.events.put_nowait(EngineError(f"The request failed: {error!r}."))
        finally:
            job.slot = None
            if self._jobs.pop(job.request.id, None) is not None:
                seconds = time.monotonic() - job.submitted_at
                self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
                self._notice_drained()

    async def _generate_somewhere(self, job: _RunningRequest, ask: UpstreamRequest) -> None:
        """Until the first token another upstream may do it as well."""
        failure: UpstreamFailed | None = None
        while True:
            try:
                upstream = await self._fleet.take(job.claim)
            except UpstreamFailed as nobody:
                raise (failure or nobody) from None
            try:
                await self._generate(job, upstream, ask)
                return
            except UpstreamFailed as error:
                self._fleet.rest(upstream, error)
                if job.sampled or isinstance(error, UpstreamTimedOut):
                    raise
                failure = error
                job.claim.tried.add(upstream)
            finally:
                job.slot = None
                self._fleet.give_back(upstream)

    async def _generate(
        self, job: _RunningRequest, upstream: Upstream, ask: UpstreamRequest
    ) -> None:
        assert upstream.served is not None
        job.slot = self._free_slot()
        job.sent_at = time.monotonic()
        n_known = upstream.prefixes.n_tokens_known(job.claim.keys)
        job.forecast = ()
        if job.request.cache_prompt and upstream.reports_cached:
            job.forecast = self._spans(n_known, len(job.request.prompt))
        ask = replace(ask, model=upstream.served.model)
        finished: Finished | None = None
        n_cached: int | None = None
        chunks = upstream.stream(self._client, ask, seconds=self._first_byte_seconds)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    n_cached = n_cached if chunk.n_cached is None else chunk.n_cached
                    if chunk.n_cached is not None and job.evaluated is None:
                        self._evaluated(job, chunk.n_cached)
                    if chunk.tokens or chunk.finish:
                        finished = self._sampled(job, chunk) or finished
        finally:
            self._learn(job, upstream)
        if job.evaluated is None:
            self._evaluated(job, 0)
        if n_cached is None and n_known >= UNREPORTED_TOKENS and not upstream.reports_cached:
            self._say_once(
                f"upstream={upstream.name} does not tell how much of a prompt it had: start it"
                " with --enable-prompt-tokens-details"
            )
        job.events.put_nowait(finished or Finished(StopCause.LENGTH))

    def _sampled(self, job: _RunningRequest, chunk: Chunk) -> Finished | None:
        """The end, if this is it; it is told behind what usage says."""
        if job.first_chunk_at is None:
            self._begin(job)
        tokens = list(chunk.tokens)
        finished = None
        if chunk.finish == "stop":
            end = chunk.stop_token
            if tokens and (tokens[-1].token in self._end_tokens or tokens[-1].token == end):
                end = tokens.pop().token
            finished = Finished(StopCause.END_OF_TURN, end)
        elif chunk.finish is not None:
            if chunk.finish not in ("length", "repetition"):
                raise UpstreamFailed(f"The upstream ended the reply: {chunk.finish}.")
            finished = Finished(StopCause.LENGTH)
        if job.request.max_tokens == 0:  # vLLM samples one at least
            return Finished(StopCause.LENGTH) if finished else None
        for sampled in tokens:
            if not 0 <= sampled.token < self._n_vocab:
                raise UpstreamFailed(f"The upstream sampled {sampled.token}, which is no token.")
            job.sampled.append(sampled.token)
            job.events.put_nowait(sampled)
        return finished

    def _begin(self, job: _RunningRequest) -> None:
        job.first_chunk_at = time.monotonic()
        if job.evaluated is None:
            n_prompt = len(job.request.prompt)
            elapsed = job.first_chunk_at - job.sent_at
            job.events.put_nowait(PrefillProgress(n_prompt, n_prompt, elapsed, job.forecast))

    def _evaluated(self, job: _RunningRequest, n_cached: int) -> None:
        first_at = job.first_chunk_at or time.monotonic()
        n_prompt = len(job.request.prompt)
        spans = self._spans(n_cached, n_prompt)
        n_cached = spans[-1].stop if spans else 0
        job.evaluated = PromptEvaluated(
            n_prompt=n_prompt,
            n_cached=n_cached,
            queue_seconds=job.sent_at - job.submitted_at,
            prefill_seconds=first_at - job.sent_at,
            spans=spans,
        )
        self._counters.upstream.tokens += n_cached
        self._counters.prefilled_tokens += n_prompt - n_cached
        job.events.put_nowait(job.evaluated)

    def _learn(self, job: _RunningRequest, upstream: Upstream) -> None:
        """Also of a reply that was cut: the prompt is computed when the first token is there."""
        if job.request.cache_prompt and job.first_chunk_at is not None:
            computed = (*job.request.prompt, *job.sampled[:-1])
            upstream.prefixes.learn(chunk_keys(job.request.terms.namespace, computed))

    def _ask_for(self, request: GenerationRequest) -> UpstreamRequest:
        room = self._fleet.served.n_ctx - len(request.prompt)
        wanted = room if request.max_tokens is None else max(request.max_tokens, 1)
        grammar = request.sampling.grammar
        if grammar is not None and not is_enforced(grammar):
            self._say_once(
                "vLLM applies a grammar from the first token: calls that the model may make or"
                " not are not held to their schemas"
            )
        return UpstreamRequest(
            request_id=request.id,
            model="",
            tokens=request.prompt,
            sampling=sampling_fields(
                request.sampling,
                max_tokens=min(wanted, room),
                end_tokens=self._end_tokens,
            ),
            # Nobody else has this one: nothing is found under it, now or later.
            salt=request.terms.namespace if request.cache_prompt else secrets.token_hex(32),
            n_top_logprobs=request.n_top_logprobs,
        )

    def _spans(self, n_cached: int, n_prompt: int) -> tuple[CachedSpan, ...]:
        """The last token of a prompt is always computed."""
        stop = min(n_cached, n_prompt - 1)
        return (CachedSpan(CacheSource.UPSTREAM, 0, stop),) if stop > 0 else ()

    def _free_slot(self) -> int:
        taken = {job.slot for job in self._jobs.values()}
        return next(number for number in range(len(self._jobs) + 1) if number not in taken)

    def _say_once(self, text: str) -> None:
        if text not in self._has_said:
            self._has_said.add(text)
            _log.warning("%s", text)

    def _notice_drained(self) -> None:
        if self._draining and not self._jobs:
            self._drained.set()

    def _retry_after(self, n_ahead: int) -> int:
        rounds = 1 + n_ahead / max(self._fleet.n_slots, 1)
        return min(MAX_RETRY_SECONDS, max(1, round(self._mean_seconds * rounds)))


def _slot_status(job: _RunningRequest) -> SlotStatus:
    assert job.slot is not None
    n_prompt = len(job.request.prompt)
    is_decoding = job.first_chunk_at is not None
    return SlotStatus(
        id=job.slot,
        request_id=job.request.id,
        session=job.request.terms.session,
        rank=job.request.terms.rank,
        n_prompt=n_prompt,
        n_rows=(n_prompt if is_decoding else 0) + len(job.sampled),
        n_generated=len(job.sampled),
        phase=SlotPhase.DECODING if is_decoding else SlotPhase.PREFILLING,
        n_cached=job.evaluated.n_cached if job.evaluated else job.n_known,
    )
