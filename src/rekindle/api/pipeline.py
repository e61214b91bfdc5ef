"""The life of a request that generates, the same for every wire format.

Read the body, find the caller, lease the model, build the prompts, start the replies, then
stream them or collect them whole. A `WireFormat` supplies how a body is read (`read`) and how
replies are written (`encoder`, `whole`). Every refusal happens before the reply begins.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import Request, Response

from rekindle.api.cache_controls import CommonFields, Mark, hints_of, terms_of
from rekindle.api.errors import failure_of
from rekindle.api.http.cache_header import CACHE_HEADER, cache_header_value
from rekindle.api.http.caller import Caller
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.api.http.error_shapes import ErrorBody
from rekindle.api.http.session_header import SCOPE_KEY, conversation_name, show_session
from rekindle.api.http.usage_window import scaled
from rekindle.api.json import json_response
from rekindle.api.models import Lease
from rekindle.api.openapi import Routes
from rekindle.api.replies import Envelope, Replies, Reply, WantedReply, start_replies
from rekindle.api.requests.adapters import AdapterScale, check_scales
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import effective_budget, for_budget
from rekindle.api.requests.sampling import N_SEEDS
from rekindle.api.sse import KEEP_ALIVE, MEDIA_TYPE, STREAM_HEADERS, Encoder, EventStream
from rekindle.chat.conversation import Conversation
from rekindle.chat.infill import Infill
from rekindle.chat.mixed_tokens import Mixed
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import OmittedMedia, ReplyOptions
from rekindle.chat.responder import Responder
from rekindle.config.choices import Overflow
from rekindle.errors import InvalidRequest, NotSupported, PromptTooLong
from rekindle.generation.request import Sampling
from rekindle.generation.status import Forecast
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Miss

logger = logging.getLogger(__name__)

EXPLAIN_HEADER = "x-rekindle-explain"
MAX_NAMES_LOGGED = 32

B = TypeVar("B", bound=CommonFields)


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text or token ids that no chat template wraps, or a gap to fill."""

    path: str  # of the field in the body; empty: the whole body
    content: str | Sequence[int] | Mixed | Infill


@dataclass(frozen=True, slots=True)
class TokenContext:
    """Token ids that the client keeps of an earlier prompt and its reply."""

    path: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request as its wire format reads it, and the functions that write its replies."""

    prompt: Conversation | Sequence[RawPrompt]
    after: TokenContext | None = None  # what the conversation follows
    marks: tuple[Mark, ...]
    overflow: Overflow | None = None  # None: the server's default
    n_per_prompt: int = 1
    ignored: Sequence[str] = ()  # parts of the request to count as ignored
    media_omitted: tuple[OmittedMedia, ...] = ()
    reasoning_budget: int | None = None  # None: as the server is set
    adapters: Sequence[AdapterScale] = ()  # scales that the model's adapters should have
    # Takes the model's default sampling and its vocabulary.
    options: Callable[[Sampling, Tokenizer], ReplyOptions]
    encoder: Callable[[Envelope], Encoder]
    whole: Callable[[Envelope, Sequence[Reply]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat(Generic[B]):
    """One API for generating: its types, and how to read its requests."""

    name: str
    operation: str  # its name in OpenAPI
    paths: tuple[str, ...]
    schema: type[B]
    body: type  # of a whole reply
    event: type | None = None  # of a streamed reply; None: the path never streams
    error: type = ErrorBody
    id_prefix: str
    # Takes the headers as well.
    read: Callable[[B, Caller, Mapping[str, str], MediaReader], Exchange]
    blocks: bool = False  # `read` may wait for a disk
    # A stream begins even if the prompt is too long, and fails at once: its clients compact the
    # conversation only on reading the error there.
    begins_too_long: bool = False
    keep_alive: bytes = KEEP_ALIVE
    media_type: str = MEDIA_TYPE  # of streams
    amend: Callable[[B, Request], B] | None = None  # adds what the path and the query say
    # Acts on a request that is not only looked up. A response ends it.
    before: Callable[[B, Request], Awaitable[Response | None]] | None = None
    while_leased: Callable[[B, Request], None] | None = None  # the model stays loaded meanwhile


class Pipeline:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._models = context.models
        self._telemetry = context.telemetry
        self._bodies = context.bodies
        self._names_logged: set[str] = set()

    def add_routes(self, routes: Routes, wire_format: WireFormat[Any]) -> None:
        async def endpoint(request: Request) -> Response:
            return await self.reply(request, wire_format)

        for path in wire_format.paths:
            routes.add(
                "POST",
                path,
                endpoint,
                name=wire_format.operation,
                takes=[wire_format.schema],
                gives=wire_format.body,
                streams=[wire_format.event] if wire_format.event else [],
                stream_type=wire_format.media_type,
                error=wire_format.error,
            )

    async def reply(self, request: Request, wire_format: WireFormat[B]) -> Response:
        body = await self._body(request, wire_format)
        if wire_format.before is not None:
            answer = await wire_format.before(body, request)
            if answer is not None:
                return answer
        caller, exchange = await self._read(request, wire_format, body)
        for name in exchange.ignored:
            self._telemetry.count_ignored_field(name)
        for each in exchange.media_omitted:
            self._telemetry.count_media_omitted(each.kind, each.count)
        began = time.monotonic()
        with await self._models.lease(body.model) as served:
            load_seconds = time.monotonic() - began
            self._log_other_name(body.model, served.card.id)
            if wire_format.while_leased is not None:
                wire_format.while_leased(body, request)
            exchange = _with_budget(exchange, served.responder.reasoning_limit)
            starting = self._start(
                request, body, caller, exchange, served, wire_format, load_seconds
            )
            started = await unless_client_leaves(request.receive, starting)
        if isinstance(started, Response):
            return started
        envelope, encoder, replies = started
        if encoder is not None:
            return EventStream(
                replies,
                encoder,
                keep_alive_seconds=self._context.settings.ping_seconds,
                keep_alive=wire_format.keep_alive,
                media_type=wire_format.media_type,
            )
        try:
            collected = await unless_client_leaves(request.receive, replies.collect())
        finally:
            replies.close()
        headers = {CACHE_HEADER: cache_header_value(collected[0].done)}

        def whole() -> Response:
            return json_response(exchange.whole(envelope, collected), headers)

        # In a thread: log probabilities may be thousands of times as long as the reply.
        is_long = any(wanted.options.n_top_logprobs for wanted in envelope.wanted)
        return await asyncio.to_thread(whole) if is_long else whole()

    async def _start(
        self,
        request: Request,
        body: CommonFields,
        caller: Caller,
        exchange: Exchange,
        served: Lease,
        wire_format: WireFormat[B],
        load_seconds: float,
    ) -> tuple[Envelope, Encoder | None, Replies] | Response:
        if exchange.adapters:
            check_scales(exchange.adapters, served.card.adapters, "lora")
        key = uuid.uuid4().hex
        envelope = Envelope(
            id=wire_format.id_prefix + key,
            key=key,
            created=int(time.time()),
            model=served.card.id,
            wanted=await self._wanted(request, body, caller, exchange, served.responder),
            load_seconds=load_seconds,
            usage_scale=self._context.usage_scale(request, served.card.n_ctx),
        )
        encoder = exchange.encoder(envelope) if body.stream else None
        try:
            replies = await start_replies(served, envelope, self._telemetry, request=request)
        except PromptTooLong as error:
            primes = envelope.wanted[0].options.max_tokens == 0
            if encoder is None or primes or not wire_format.begins_too_long:
                raise
            refusal = failure_of(error, request.scope).body(request.scope)
            frames = encoder.begin() + encoder.fail(refusal)
            return Response(frames, headers=STREAM_HEADERS, media_type=wire_format.media_type)
        return envelope, encoder, replies

    async def look_up(
        self, request: Request, wire_format: WireFormat[B]
    ) -> tuple[Forecast, Miss | None]:
        """Forecast what the request's first prompt would find in the cache."""
        body = await self._body(request, wire_format)
        caller, exchange = await self._read(request, wire_format, body)
        with await self._models.lease(body.model) as served:
            exchange = _with_budget(exchange, served.responder.reasoning_limit)
            prompts = await _prompts(exchange, served.responder, caller, cache_prompt=True)
            session = self._context.caller(request).session
            return await served.responder.look_up(prompts[0], session=session)

    async def count_tokens(self, request: Request, wire_format: WireFormat[B]) -> int:
        """Return how many tokens the request's prompts have. A chat is counted as a whole."""
        body = await self._body(request, wire_format)
        caller, exchange = await self._read(request, wire_format, body)
        with await self._models.lease(body.model) as served:
            exchange = _with_budget(exchange, served.responder.reasoning_limit)
            exchange = replace(exchange, overflow=Overflow.ERROR)
            prompts = await _prompts(exchange, served.responder, caller, cache_prompt=True)
            scale = self._context.usage_scale(request, served.card.n_ctx)
        return scaled(sum(len(prompt.tokens) for prompt in prompts), scale)

    async def _body(self, request: Request, wire_format: WireFormat[B]) -> B:
        body = await self._bodies.read(request, wire_format.schema)
        return body if wire_format.amend is None else wire_format.amend(body, request)

    async def _read(
        self, request: Request, wire_format: WireFormat[B], body: B
    ) -> tuple[Caller, Exchange]:
        caller = self._context.caller(request, hints_of(body))
        media = MediaReader(self._context.settings.media)
        read = partial(wire_format.read, body, caller, request.headers, media)
        exchange = await self._bodies.work(request, read, blocks=wire_format.blocks)
        return caller, exchange

    async def _wanted(
        self,
        request: Request,
        body: CommonFields,
        caller: Caller,
        exchange: Exchange,
        responder: Responder,
    ) -> list[WantedReply]:
        """Build the prompts, each with the options of its replies."""
        options = await self._bodies.work(
            request,
            partial(exchange.options, responder.default_sampling, responder.tokenizer),
        )
        cache_prompt = body.cache_prompt
        options = replace(
            options,
            max_tokens=0 if body.primes else options.max_tokens,
            cache_prompt=responder.default_cache_prompt if cache_prompt is None else cache_prompt,
            # A batch with drafts rounds differently, and a seed promises the same reply again.
            speculate=body.speculates and (bool(body.speculative) or options.sampling.seed is None),
            streams=bool(body.stream),
            rank=caller.rank,
            explain=self._context.settings.explains or request.headers.get(EXPLAIN_HEADER) == "1",
            reasoning_budget=exchange.reasoning_budget,
            media_omitted=exchange.media_omitted,
        )
        conversation = exchange.prompt if isinstance(exchange.prompt, Conversation) else None
        if SCOPE_KEY not in request.scope and conversation is not None:
            name = await self._bodies.work(request, partial(conversation_name, conversation))
            show_session(request.scope, name)
        prompts = await _prompts(exchange, responder, caller, cache_prompt=options.cache_prompt)
        if SCOPE_KEY not in request.scope:  # raw text, and the client names no session
            show_session(request.scope, conversation_name(prompts[0].text))
        primes = options.max_tokens == 0
        if body.persist and not (primes and options.cache_prompt):
            raise InvalidRequest(
                "`persist` requires `max_tokens: 0` (or `prefill: true`) and `cache_prompt`"
                " enabled.",
                "persist",
            )
        wanted = []
        for prompt in prompts:
            # In a thread: finding where marked messages end means rendering them.
            terms = await asyncio.to_thread(
                terms_of, caller, body, exchange.marks, conversation, prompt, primes=primes
            )
            variants = _variants(replace(options, terms=terms), exchange.n_per_prompt)
            wanted += [WantedReply(prompt, each) for each in variants]
        return wanted

    def _log_other_name(self, asked: str | None, served: str) -> None:
        """Log once that a model answers to a name that is not its own."""
        if asked is None or asked == served or asked in self._names_logged:
            return
        if len(self._names_logged) < MAX_NAMES_LOGGED:
            self._names_logged.add(asked)
            logger.info("models: request for %.80r served by `%s`", asked, served)


def _with_budget(exchange: Exchange, limit: int | None) -> Exchange:
    """Settle the reasoning budget: it may change the prompt. `limit`: of the model."""
    if not isinstance(exchange.prompt, Conversation):
        return exchange
    budget = effective_budget(exchange.reasoning_budget, limit)
    prompt = for_budget(exchange.prompt, budget)
    return replace(exchange, prompt=prompt, reasoning_budget=budget)


async def _prompts(
    exchange: Exchange, responder: Responder, caller: Caller, *, cache_prompt: bool
) -> list[Prompt]:
    namespace = caller.namespace
    if isinstance(exchange.prompt, Conversation) and exchange.after is not None:
        following = responder.prepare_after(
            exchange.after.tokens, exchange.prompt, namespace=namespace
        )
        return [await _named(exchange.after.path, following)]
    if isinstance(exchange.prompt, Conversation):
        prompt = await responder.prepare_chat(
            exchange.prompt,
            cache_prompt=cache_prompt,
            overflow=exchange.overflow,
            namespace=namespace,
            session=caller.session,
        )
        return [prompt]
    return [
        await _raw_prompt(raw, responder, cache_prompt=cache_prompt, namespace=namespace)
        for raw in exchange.prompt
    ]


async def _raw_prompt(
    raw: RawPrompt, responder: Responder, *, cache_prompt: bool, namespace: str
) -> Prompt:
    match raw.content:
        case str() as text:
            preparing = responder.prepare_text(text, cache_prompt=cache_prompt, namespace=namespace)
        case Infill() as infill:
            return await _infill_prompt(
                raw.path, responder.prepare_infill(infill, namespace=namespace)
            )
        case Mixed(parts):
            preparing = responder.prepare_mixed(parts, namespace=namespace)
        case tokens:
            preparing = responder.prepare_tokens(tokens, namespace=namespace)
    return await _named(raw.path, preparing)


async def _infill_prompt(path: str, preparing: Awaitable[Prompt]) -> Prompt:
    """Await the prompt. Its errors name their fields; a model that cannot is a fault of `path`."""
    try:
        return await preparing
    except NotSupported as error:
        if not path:
            raise
        raise InvalidRequest(error.message, path) from None


async def _named(path: str, preparing: Awaitable[Prompt]) -> Prompt:
    """Await the prompt. An error names the field."""
    try:
        return await preparing
    except InvalidRequest as error:
        # The responder sees one prompt, and calls it `prompt`.
        inner = (error.param or "prompt").removeprefix("prompt")
        raise InvalidRequest(error.message, path + inner) from None


def _variants(options: ReplyOptions, n: int) -> Iterator[ReplyOptions]:
    """Yield options for n replies to one prompt. A fixed seed becomes n different fixed seeds."""
    seed = options.sampling.seed
    for i in range(n):
        variant = None if seed is None else (seed + i) % N_SEEDS
        yield replace(options, sampling=replace(options.sampling, seed=variant))
