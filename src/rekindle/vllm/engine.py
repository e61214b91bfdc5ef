"""`generation.Engine` over vLLM servers: one task per request, all on the event loop.

Upstreams manage their own caches; this engine knows only which prompts it sent to which upstream.

vLLM reports the number of cached prompt tokens after the last token, unless it puts usage into
every chunk. A reply therefore begins with progress that holds an estimate. `PromptEvaluated`
follows when the upstream has reported: at the first chunk, or at the end.
"""

import asyncio
import logging
import secrets
import time
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import TypeVar, cast

import httpx

from rekindle.errors import (
    EngineError,
    InvalidRequest,
    PromptTooLong,
    RekindleError,
    UpstreamFailed,
    UpstreamTimedOut,
)
from rekindle.generation.events import (
    NO_SPANS,
    CacheSource,
    Embedded,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    Spans,
    StopCause,
    TokenEvent,
)
from rekindle.generation.forgetting import Deleted
from rekindle.generation.questions import (
    AnyQuestion,
    Forget,
    ForgetKey,
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    Quarantine,
    Question,
    ReadTokens,
)
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.request_queue import RequestQueue, RequestStream
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    Forecast,
    SlotPhase,
    SlotStatus,
    TierStatus,
)
from rekindle.vllm.fleet import Fleet, Routing
from rekindle.vllm.prefix_table import CHUNK_TOKENS, chunk_keys
from rekindle.vllm.sampling import checked, is_enforced, sampling_fields
from rekindle.vllm.upstream import Upstream
from rekindle.vllm.wire import Chunk, UpstreamRequest

T = TypeVar("T")
_log = logging.getLogger("rekindle.upstream")

UNREPORTED_TOKENS = 2 * CHUNK_TOKENS  # known prefix whose reuse should be reported; picked
VLLM_CACHE = "vLLM keeps its own cache. It has no way to delete a part of it."


class _RunningRequest:
    """The state of one request, from its submission to its last event."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.routing = Routing(chunk_keys(request.terms.namespace, request.prompt))
        self.submitted_at = self.sent_at = time.monotonic()
        self.slot: int | None = None
        self.sampled: list[int] = []
        self.evaluated: PromptEvaluated | None = None
        self.forecast = NO_SPANS
        self.first_chunk_at: float | None = None
        self.task: asyncio.Task[None] | None = None


class VllmEngine:
    finishes_calls = False  # vLLM cuts a reply off anywhere

    def __init__(self, fleet: Fleet, *, queue_size: int, first_byte_seconds: float) -> None:
        self._fleet = fleet
        self._n_vocab = fleet.terms.n_vocab
        self._end_tokens = fleet.terms.end_tokens
        self._queue_size = queue_size
        self._first_byte_seconds = first_byte_seconds
        self._jobs: dict[str, _RunningRequest] = {}
        self._replies: RequestQueue[TokenEvent] = RequestQueue(
            max_waiting=queue_size, on_cancel=self._cancel
        )
        self._counters = CacheCounters()
        self._warned: set[str] = set()

    def start(self) -> None:
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        )
        self._fleet.start(self._client)

    def submit(self, request: GenerationRequest) -> RequestStream[TokenEvent]:
        n_ctx = self._fleet.served.n_ctx
        if len(request.prompt) >= n_ctx:
            raise PromptTooLong(n_prompt=len(request.prompt), n_ctx=n_ctx)
        if request.background:  # vLLM has no background requests: each yields at once
            stream = self._replies.open(request.id, n_slots=0, background=True)
            self._replies.deliver(request.id, Finished(StopCause.YIELDED))
            return stream
        if request.terms.persist:
            raise InvalidRequest(
                "`persist` is not supported with vLLM, which caches prompts itself.", "persist"
            )
        self._fleet.check_usable()
        ask = self._upstream_request(request)  # raises InvalidRequest for what vLLM cannot do
        stream = self._replies.open(request.id, n_slots=self._fleet.n_slots, background=False)
        job = self._jobs[request.id] = _RunningRequest(request)
        job.task = asyncio.create_task(self._run(job, ask))
        return stream

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.pop(request_id)
        assert job.task is not None
        job.task.cancel()
        if job.first_chunk_at is not None and job.evaluated is None:
            self._evaluated(job, job.forecast.n_tokens)  # the upstream will report no counts

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        raise InvalidRequest("Embeddings are not supported with vLLM.")

    def check_grammar(self, grammar: Grammar) -> Future[None]:
        return checked(grammar)

    async def ask(self, question: Question[T]) -> T:
        return cast(T, self._answer(cast(AnyQuestion, question)))

    def _answer(self, question: AnyQuestion) -> object:
        """Nothing is stored here, and vLLM does not list what it caches."""
        match question:
            case LookUp():
                return self._look_up(question)
            case ListStored() | ListBranches():
                return ()
            case ReadTokens():
                return None
            case PinStored() | Quarantine():
                return 0
            case Forget() | ForgetKey():
                return Deleted(counts={}, unreached=(VLLM_CACHE,))

    def _look_up(self, question: LookUp) -> Forecast:
        """Return the prefix that was sent before to the upstream that would get this prompt.

        vLLM does not report whether it still caches that prefix.
        """
        keys, n_prompt = chunk_keys(question.namespace, question.tokens), len(question.tokens)
        spans = self._spans(self._fleet.n_tokens_known(keys), n_prompt)
        return Forecast(n_prompt, spans, None, None)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    async def refresh(self) -> None:
        """Do nothing: the status is always new."""

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
            no_drafts_because="vLLM drafts tokens itself, as it is set",
        )

    async def shut_down(self, grace_seconds: float) -> None:
        self._replies.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._replies.drained()
        self.cut()
        await self._fleet.close()
        await self._client.aclose()

    def cut(self) -> None:
        self._replies.cut()

    async def _run(self, job: _RunningRequest, ask: UpstreamRequest) -> None:
        try:
            self._end(job, await self._generate_somewhere(job, ask))
        except RekindleError as error:
            self._end(job, error)
        except Exception as error:
            _log.exception("upstream: request failed request=%s", job.request.id)
            self._end(job, EngineError(f"The request failed: {error!r}."))

    def _end(self, job: _RunningRequest, event: Finished | RekindleError) -> None:
        self._jobs.pop(job.request.id, None)
        self._deliver(job, event)

    def _deliver(self, job: _RunningRequest, event: TokenEvent | RekindleError) -> None:
        self._replies.deliver(job.request.id, event)

    async def _generate_somewhere(self, job: _RunningRequest, ask: UpstreamRequest) -> Finished:
        """Retry on another upstream after a failure, as long as no token was sampled."""
        failure: UpstreamFailed | None = None
        while True:
            try:
                upstream = await self._fleet.take(job.routing)
            except UpstreamFailed as none_left:
                raise (failure or none_left) from None
            try:
                return await self._generate(job, upstream, ask)
            except UpstreamFailed as error:
                self._fleet.note_failure(upstream, error)
                if job.sampled or isinstance(error, UpstreamTimedOut):
                    raise
                failure = error
                job.routing.tried.add(upstream)
            finally:
                job.slot = None
                self._fleet.give_back(upstream)

    async def _generate(
        self, job: _RunningRequest, upstream: Upstream, ask: UpstreamRequest
    ) -> Finished:
        assert upstream.wire is not None
        job.slot = self._free_slot()
        job.sent_at = time.monotonic()
        n_known = upstream.prefixes.n_tokens_known(job.routing.keys)
        job.forecast = NO_SPANS
        if job.request.cache_prompt and upstream.reports_cached:
            job.forecast = self._spans(n_known, len(job.request.prompt))
        finished: Finished | None = None
        n_cached: int | None = None
        chunks = upstream.stream(self._client, upstream.wire, ask, seconds=self._first_byte_seconds)
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
            self._warn_once(
                f"upstream={upstream.name} does not report cached prompt tokens: start it with"
                " --enable-prompt-tokens-details"
            )
        return finished or Finished(StopCause.LENGTH)

    def _sampled(self, job: _RunningRequest, chunk: Chunk) -> Finished | None:
        """Deliver the chunk's tokens. Return the last event if the chunk ends the reply.

        The caller delivers it after the usage report, which comes in a later chunk.
        """
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
        if job.request.max_tokens == 0:  # vLLM samples at least one token
            return Finished(StopCause.LENGTH) if finished else None
        for sampled in tokens:
            if not 0 <= sampled.token < self._n_vocab:
                raise UpstreamFailed(f"The upstream sampled an unknown token: {sampled.token}.")
            job.sampled.append(sampled.token)
            self._deliver(job, sampled)
        return finished

    def _begin(self, job: _RunningRequest) -> None:
        job.first_chunk_at = time.monotonic()
        if job.evaluated is None:
            n_prompt = len(job.request.prompt)
            elapsed = job.first_chunk_at - job.sent_at
            self._deliver(job, PrefillProgress(n_prompt, n_prompt, elapsed, job.forecast))

    def _evaluated(self, job: _RunningRequest, n_cached: int) -> None:
        first_at = job.first_chunk_at or time.monotonic()
        n_prompt = len(job.request.prompt)
        spans = self._spans(n_cached, n_prompt)
        n_cached = spans.n_tokens
        job.evaluated = PromptEvaluated(
            n_prompt=n_prompt,
            n_cached=n_cached,
            queue_seconds=job.sent_at - job.submitted_at,
            prefill_seconds=first_at - job.sent_at,
            spans=spans,
        )
        self._counters.upstream.tokens += n_cached
        self._counters.prefilled_tokens += n_prompt - n_cached
        self._deliver(job, job.evaluated)

    def _learn(self, job: _RunningRequest, upstream: Upstream) -> None:
        """Note the prefix as known to the upstream, also after a cancelled reply.

        The prompt is computed once the first token has come.
        """
        if job.request.cache_prompt and job.first_chunk_at is not None:
            computed = (*job.request.prompt, *job.sampled[:-1])
            upstream.prefixes.learn(chunk_keys(job.request.terms.namespace, computed))

    def _upstream_request(self, request: GenerationRequest) -> UpstreamRequest:
        room = self._fleet.served.n_ctx - len(request.prompt)
        wanted = room if request.max_tokens is None else max(request.max_tokens, 1)
        grammar = request.sampling.grammar
        if grammar is not None and not is_enforced(grammar):
            self._warn_once(
                "upstream: vLLM applies a grammar from the first token, so optional tool calls are"
                " not constrained to their schemas"
            )
        if request.sampling.reasoning_limit is not None:
            self._warn_once("upstream: a budget of reasoning tokens is not applied with vLLM")
        return UpstreamRequest(
            request_id=request.id,
            tokens=request.prompt,
            sampling=sampling_fields(
                request.sampling,
                max_tokens=min(wanted, room),
                end_tokens=self._end_tokens,
            ),
            # A fresh salt: no other request shares this prefix.
            salt=request.terms.namespace if request.cache_prompt else secrets.token_hex(32),
            n_top_logprobs=request.n_top_logprobs,
        )

    def _spans(self, n_cached: int, n_prompt: int) -> Spans:
        """Return the cached span. The last token of a prompt is always computed."""
        return NO_SPANS.extended(CacheSource.UPSTREAM, min(n_cached, n_prompt - 1))

    def _free_slot(self) -> int:
        taken = {job.slot for job in self._jobs.values()}
        return next(number for number in range(len(self._jobs) + 1) if number not in taken)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)


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
        n_cached=job.evaluated.n_cached if job.evaluated else job.forecast.n_tokens,
        namespace=job.request.terms.namespace,
    )
