"""llama-server's own endpoints: health, properties, slots, metrics, tokens, templates."""

import asyncio
from collections.abc import Sequence

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from rekindle import __version__
from rekindle.api.body import fault, read_body
from rekindle.api.cache.views import tier_props
from rekindle.api.http.query import model_wanted
from rekindle.api.json import body_from
from rekindle.api.models import Lease, Models
from rekindle.api.native.schema import (
    CacheProps,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationProps,
    Health,
    Modalities,
    NextToken,
    Props,
    RekindleProps,
    SamplingProps,
    SlotProps,
    TemplateReply,
    TokenizeReply,
    TokenizeRequest,
    TokenPiece,
)
from rekindle.api.openai.messages import conversation_of
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.openapi import Routes
from rekindle.errors import InvalidRequest
from rekindle.generation.events import CacheSource
from rekindle.generation.status import EngineStatus, SlotStatus
from rekindle.generation.tokenizer import Tokenizer
from rekindle.models.card import ModelState
from rekindle.observe.telemetry import Telemetry


class NativeApi:
    def __init__(self, models: Models, telemetry: Telemetry) -> None:
        self._models = models
        self._telemetry = telemetry

    def add_routes(self, routes: Routes) -> None:
        routes.add("GET", "/health", self.health, response_model=Health)
        routes.add("GET", "/props", self.props)
        routes.add("GET", "/slots", self.slots)
        text = {"text/plain": {"schema": {"type": "string"}}}
        routes.add("GET", "/metrics", self.metrics, media=text)
        routes.add("POST", "/tokenize", self.tokenize, takes=[TokenizeRequest])
        routes.add("POST", "/detokenize", self.detokenize, takes=[DetokenizeRequest])
        routes.add("POST", "/apply-template", self.apply_template, takes=[ChatCompletionRequest])

    async def health(self) -> Health | Response:
        """Report health without details: this endpoint needs no key."""
        statuses = self._loaded()
        if statuses and not any(status.n_slots for status in statuses):
            # A load balancer then skips this server.
            return JSONResponse({"status": "no upstream"}, 503)
        tiers = [
            tier
            for status in statuses
            for tier in (status.cache.tiers if status.cache else ())
            if tier.name is CacheSource.SHARED
        ]
        if not tiers:
            return Health(status="ok")
        is_well = all(tier.trouble is None for tier in tiers)
        return Health(status="ok", shared_store="ok" if is_well else "not answering")

    async def props(self, request: Request) -> Props:
        with await self._models.lease(model_wanted(request)) as served:
            return _props(served)

    async def slots(self, request: Request) -> list[SlotProps]:
        status = self._models.status(model_wanted(request))
        return [_slot_props(slot, status) for slot in status.slots] if status else []

    async def metrics(self) -> Response:
        return Response(self._telemetry.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> TokenizeReply:
        body = await read_body(request, TokenizeRequest, self._telemetry)
        with await self._models.lease(body.model) as served:
            return await asyncio.to_thread(_tokenize, body, served.responder.tokenizer)

    async def detokenize(self, request: Request) -> DetokenizeReply:
        body = await read_body(request, DetokenizeRequest, self._telemetry)
        with await self._models.lease(body.model) as served:
            tokenizer = served.responder.tokenizer
            _check_tokens(body.tokens, tokenizer.n_vocab)
            data = await asyncio.to_thread(tokenizer.detokenize, body.tokens, render_special=True)
        return DetokenizeReply(content=data.decode("utf-8", "replace"))

    async def apply_template(self, request: Request) -> TemplateReply:
        body = await read_body(request, ChatCompletionRequest, self._telemetry)
        conversation = conversation_of(body)
        with await self._models.lease(body.model) as served:
            prompt = await served.responder.prepare_chat(conversation)
        return TemplateReply(prompt=prompt.text, tokens=list(prompt.tokens))

    def _loaded(self) -> list[EngineStatus]:
        names = [each.id for each in self._models.listed() if each.state is ModelState.LOADED]
        statuses = [self._models.status(name) for name in names]
        return [status for status in statuses if status is not None]


def _props(served: Lease) -> Props:
    status, card = served.responder.status(), served.card
    cache = status.cache
    sampling = served.responder.default_sampling
    seed = -1 if sampling.seed is None else sampling.seed
    params = body_from(SamplingProps, sampling, seed=seed, max_tokens=-1, n_predict=-1)
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
            version=__version__, cache=body_from(CacheProps, cache, tiers=tiers) if cache else None
        ),
    )


def _slot_props(slot: SlotStatus, status: EngineStatus) -> SlotProps:
    # A literal, because `class` is a keyword.
    return {
        "id": slot.id,
        "n_ctx": status.n_ctx,
        "is_processing": slot.request_id is not None,
        "id_task": slot.request_id,
        "next_token": [NextToken(n_decoded=slot.n_generated)],
        "session": slot.session,
        "class": slot.rank.name.lower(),
        "n_prompt_tokens": slot.n_prompt,
        "n_rows": slot.n_rows,
    }


def _tokenize(body: TokenizeRequest, tokenizer: Tokenizer) -> TokenizeReply:
    try:
        tokens = tokenizer.tokenize(body.content, parse_special=body.parse_special)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, "content") from error
    if body.add_special and tokenizer.bos_token is not None:
        tokens.insert(0, tokenizer.bos_token)
    if not body.with_pieces:
        return TokenizeReply(tokens=tokens)
    return TokenizeReply(tokens=[_piece(token, tokenizer) for token in tokens])


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
