"""llama-server's own endpoints: health, properties, slots, metrics, tokens, templates."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from rekindle import __version__
from rekindle.api.body import fault
from rekindle.api.cache.views import tier_props
from rekindle.api.cache_controls import hints_of
from rekindle.api.http.context import RequestContext
from rekindle.api.http.drain import HEALTH_PATHS
from rekindle.api.http.query import model_wanted
from rekindle.api.json import body_from, json_response
from rekindle.api.models import Lease
from rekindle.api.native.schema import (
    Adapter,
    AdapterScales,
    CacheProps,
    DetokenizeReply,
    DetokenizeRequest,
    DialectProps,
    EngineHealth,
    GenerationProps,
    Health,
    Modalities,
    NextToken,
    Props,
    PropsChange,
    RekindleProps,
    SamplingProps,
    SlotProps,
    Success,
    TemplateReply,
    TokenizeReply,
    TokenizeRequest,
    TokenPiece,
)
from rekindle.api.openai.messages import conversation_of, reasoning_budget_of
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.openapi import Routes
from rekindle.api.requests.adapters import check_scales
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import effective_budget, for_budget
from rekindle.chat.dialects.choice import DialectChoice
from rekindle.chat.reply.tool_use import GrammarProof
from rekindle.errors import InvalidRequest, NotSupported
from rekindle.generation.events import CacheSource
from rekindle.generation.status import EngineStatus, ProcessState, ProcessStatus, SlotStatus
from rekindle.generation.tokenizer import Tokenizer
from rekindle.models.card import ModelState


class NativeApi:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._models = context.models
        self._telemetry = context.telemetry
        self._bodies = context.bodies
        self._settings = context.settings

    def add_routes(self, routes: Routes) -> None:
        for path in sorted(HEALTH_PATHS):
            routes.add("GET", path, self.health, response_model=Health)
        routes.add("GET", "/props", self.props)
        routes.add("POST", "/props", self.change_props, takes=[PropsChange], gives=Success)
        routes.add("GET", "/lora-adapters", self.adapters)
        routes.add(
            "POST", "/lora-adapters", self.set_adapters, takes=[AdapterScales], gives=Success
        )
        routes.add("GET", "/slots", self.slots)
        text = {"text/plain": {"schema": {"type": "string"}}}
        routes.add("GET", "/metrics", self.metrics, media=text)
        routes.add("POST", "/tokenize", self.tokenize, takes=[TokenizeRequest], gives=TokenizeReply)
        routes.add(
            "POST", "/detokenize", self.detokenize, takes=[DetokenizeRequest], gives=DetokenizeReply
        )
        routes.add(
            "POST",
            "/apply-template",
            self.apply_template,
            takes=[ChatCompletionRequest],
            gives=TemplateReply,
        )

    async def health(self, request: Request) -> Health | Response:
        """Report health without details: this endpoint needs no key."""
        if "live" in request.query_params:
            return Health(status="ok")
        await self._models.refresh()
        statuses = self._loaded()
        processes = [status.process for status in statuses if status.process is not None]
        engine = _engine_health(processes) if processes else None
        if processes and all(each.state is ProcessState.FAILED for each in processes):
            body = {"status": "engine failed", "engine": engine}
            return JSONResponse(body, 503, headers={"retry-after": "5"})
        if statuses and not any(status.n_slots for status in statuses):
            # A load balancer then skips this server.
            return JSONResponse({"status": "no upstream"}, 503)
        tiers = [
            tier
            for status in statuses
            for tier in (status.cache.tiers if status.cache else ())
            if tier.name is CacheSource.SHARED
        ]
        health = Health(status="ok")
        if tiers:
            is_well = all(tier.trouble is None for tier in tiers)
            health["shared_store"] = "ok" if is_well else "not answering"
        if engine is not None:
            health["engine"] = engine
        return health

    async def props(self, request: Request) -> Props:
        with await self._models.lease(model_wanted(request)) as served:
            await self._models.refresh()
            return _props(served)

    async def change_props(self, request: Request) -> Response:
        """Refuse, as llama-server does without `--props`: no property can be changed."""
        await self._bodies.read(request, PropsChange)
        raise NotSupported("This server does not support changing global properties.")

    async def adapters(self, request: Request) -> list[Adapter]:
        with await self._models.lease(model_wanted(request)) as served:
            return [
                body_from(Adapter, each, id=number)
                for number, each in enumerate(served.card.adapters)
            ]

    async def set_adapters(self, request: Request) -> Response:
        """Accept the scales that the adapters have. Stored rows depend on them."""
        body = await self._bodies.read(request, AdapterScales)
        with await self._models.lease(model_wanted(request)) as served:
            adapters = served.card.adapters
        check_scales(body.root, adapters)
        return json_response(Success(success=True))

    async def slots(self, request: Request) -> list[SlotProps]:
        if not self._settings.serves_slots:
            raise NotSupported("This server was started with --no-slots.")
        await self._models.refresh()
        status = self._models.status(model_wanted(request))
        visible = self._context.visible_namespace(request)
        if status is None:
            return []
        return [_slot_props(slot.seen_from(visible), status) for slot in status.slots]

    async def metrics(self, request: Request) -> Response:
        if self._settings.admin_metrics:
            self._context.require_admin(request, "Reading the metrics")
        await self._models.refresh()
        return Response(self._telemetry.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, TokenizeRequest)
        with await self._models.lease(body.model) as served:
            return await asyncio.to_thread(_tokenize, body, served.responder.tokenizer)

    async def detokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, DetokenizeRequest)
        with await self._models.lease(body.model) as served:
            return await asyncio.to_thread(_detokenize, body, served.responder.tokenizer)

    async def apply_template(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatCompletionRequest)
        conversation = await self._bodies.work(
            request, partial(conversation_of, body, MediaReader(self._settings.media))
        )
        # Turns of other namespaces must not show.
        namespace = self._context.caller(request, hints_of(body)).namespace
        with await self._models.lease(body.model) as served:
            limit = served.responder.reasoning_limit
            budget = effective_budget(reasoning_budget_of(body), limit)
            prompt = await served.responder.prepare_chat(
                for_budget(conversation, budget), namespace=namespace
            )
        reply = TemplateReply(prompt=prompt.text, tokens=list(prompt.tokens))
        return await asyncio.to_thread(json_response, reply)

    def _loaded(self) -> list[EngineStatus]:
        names = [each.id for each in self._models.listed() if each.state is ModelState.LOADED]
        statuses = [self._models.status(name) for name in names]
        return [status for status in statuses if status is not None]


def _engine_health(processes: Sequence[ProcessStatus]) -> EngineHealth:
    """Return the worst state of all engine processes, and their restarts by cause."""
    states = [process.state for process in processes]
    return EngineHealth(
        state=max(states, key=list(ProcessState).index),
        restarts=sum((Counter(process.restarts) for process in processes), Counter()),
    )


def _props(served: Lease) -> Props:
    status, card = served.responder.status(), served.card
    cache = status.cache
    sampling = served.responder.default_sampling
    seed = -1 if sampling.seed is None else sampling.seed
    limit = served.responder.default_max_tokens
    n_predict = -1 if limit is None else limit
    params = body_from(
        SamplingProps,
        sampling,
        seed=seed,
        max_tokens=n_predict,
        n_predict=n_predict,
        n_probs=0,
        samplers=[each.value for each in sampling.samplers],
        dry_sequence_breakers=list(sampling.dry_sequence_breakers),
    )
    tiers = [tier_props(tier) for tier in cache.tiers] if cache else []
    return Props(
        default_generation_settings=GenerationProps(n_ctx=status.n_ctx, params=params),
        total_slots=status.n_slots,
        model_alias=card.id,
        model_path=card.path,
        model_ftype=card.quantization,
        modalities=Modalities(vision=False, audio=False),
        chat_template=card.chat_template,
        bos_token=card.bos_text,
        eos_token=card.eos_text,
        build_info=f"rekindle-{__version__}",
        rekindle=RekindleProps(
            version=__version__,
            dialect=_dialect_props(served.responder.dialect_choice, served.responder.grammar_proof),
            cache=body_from(CacheProps, cache, tiers=tiers) if cache else None,
            no_drafts_because=status.no_drafts_because,
        ),
    )


def _dialect_props(choice: DialectChoice, proof: GrammarProof | None) -> DialectProps:
    return DialectProps(
        name=choice.dialect.name,
        origin=choice.origin.value,
        line=choice.line,
        losses=list(choice.losses),
        refused_by_grammar=list(proof.refused) if proof else None,
    )


def _slot_props(slot: SlotStatus, status: EngineStatus) -> SlotProps:
    # A literal, because `class` is a keyword.
    return {
        "id": slot.id,
        "n_ctx": status.n_ctx,
        "is_processing": slot.request_id is not None,
        "id_task": slot.request_id or None,
        "next_token": [NextToken(n_decoded=slot.n_generated)],
        "session": slot.session,
        "class": slot.rank.name.lower(),
        "n_prompt_tokens": slot.n_prompt,
        "n_rows": slot.n_rows,
    }


def _tokenize(body: TokenizeRequest, tokenizer: Tokenizer) -> Response:
    try:
        tokens = tokenizer.tokenize(body.content, parse_special=body.parse_special)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, "content") from error
    if body.add_special and tokenizer.bos_token is not None:
        tokens.insert(0, tokenizer.bos_token)
    if not body.with_pieces:
        return json_response(TokenizeReply(tokens=tokens))
    return json_response(TokenizeReply(tokens=[_piece(token, tokenizer) for token in tokens]))


def _detokenize(body: DetokenizeRequest, tokenizer: Tokenizer) -> Response:
    _check_tokens(body.tokens, tokenizer.n_vocab)
    data = tokenizer.detokenize(body.tokens, render_special=True)
    return json_response(DetokenizeReply(content=data.decode("utf-8", "replace")))


def _piece(token: int, tokenizer: Tokenizer) -> TokenPiece:
    data = tokenizer.detokenize((token,), render_special=True)
    try:
        return TokenPiece(id=token, piece=data.decode())
    except UnicodeDecodeError:
        return TokenPiece(id=token, piece=list(data))


def _check_tokens(tokens: Sequence[int], n_vocab: int) -> None:
    for index, token in enumerate(tokens):
        if not 0 <= token < n_vocab:
            raise fault(f"tokens.{index}", f": {token} is not a token of this model.")
