"""llama-server's own endpoints: health, properties, metrics, tokens, templates."""

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from rekindle import __version__
from rekindle.api.body import read_body
from rekindle.api.model_card import ModelCard
from rekindle.api.native_schema import (
    CacheProps,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationProps,
    Health,
    Modalities,
    Props,
    RekindleProps,
    SamplingProps,
    TemplateReply,
    TierProps,
    TokenizeReply,
    TokenizeRequest,
    TokenPiece,
)
from rekindle.api.openai.messages import conversation_of
from rekindle.api.openai.schema import ChatCompletionRequest
from rekindle.api.openapi import ERRORS, request_body
from rekindle.api.responder import Responder
from rekindle.errors import InvalidRequest
from rekindle.generation import CacheStatus, Sampling, Tokenizer
from rekindle.telemetry import Telemetry

WIRE_TYPES = (TokenizeRequest, DetokenizeRequest, ChatCompletionRequest)


class NativeApi:
    def __init__(self, responder: Responder, card: ModelCard, telemetry: Telemetry) -> None:
        self._responder = responder
        self._card = card
        self._telemetry = telemetry

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route("/health", self.health, methods=["GET"], responses=ERRORS)
        app.add_api_route("/health", self.health, methods=["HEAD"], responses=ERRORS)
        app.add_api_route("/props", self.props, methods=["GET"], responses=ERRORS)
        app.add_api_route(
            "/metrics",
            self.metrics,
            methods=["GET"],
            response_class=Response,
            responses=ERRORS | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        )
        app.add_api_route(
            "/tokenize",
            self.tokenize,
            methods=["POST"],
            openapi_extra=request_body(TokenizeRequest),
            responses=ERRORS,
        )
        app.add_api_route(
            "/detokenize",
            self.detokenize,
            methods=["POST"],
            openapi_extra=request_body(DetokenizeRequest),
            responses=ERRORS,
        )
        app.add_api_route(
            "/apply-template",
            self.apply_template,
            methods=["POST"],
            openapi_extra=request_body(ChatCompletionRequest),
            responses=ERRORS,
        )

    async def health(self) -> Health:
        return Health(status="ok")

    async def props(self) -> Props:
        status = self._responder.status()
        return Props(
            default_generation_settings=GenerationProps(
                n_ctx=status.n_ctx, params=_sampling_props(self._responder.default_sampling)
            ),
            total_slots=status.n_slots,
            model_alias=self._card.id,
            model_path=self._card.path,
            model_ftype=self._card.quantization,
            modalities=Modalities(vision=False, audio=False),
            chat_template=self._card.chat_template,
            bos_token=self._card.bos_text,
            eos_token=self._card.eos_text,
            build_info=f"rekindle-{__version__}",
            rekindle=RekindleProps(
                version=__version__, cache=_cache_props(status.cache) if status.cache else None
            ),
        )

    async def metrics(self) -> Response:
        return Response(self._telemetry.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def tokenize(self, request: Request) -> TokenizeReply:
        body = await read_body(request, TokenizeRequest, self._telemetry)
        return await asyncio.to_thread(_tokenize, body, self._responder.tokenizer)

    async def detokenize(self, request: Request) -> DetokenizeReply:
        body = await read_body(request, DetokenizeRequest, self._telemetry)
        tokenizer = self._responder.tokenizer
        _check_tokens(body.tokens, tokenizer.n_vocab)
        data = await asyncio.to_thread(tokenizer.detokenize, body.tokens, render_special=True)
        return DetokenizeReply(content=data.decode("utf-8", "replace"))

    async def apply_template(self, request: Request) -> TemplateReply:
        body = await read_body(request, ChatCompletionRequest, self._telemetry)
        prompt = await self._responder.prepare_chat(conversation_of(body))
        return TemplateReply(prompt=prompt.text, tokens=list(prompt.tokens))


def _tokenize(body: TokenizeRequest, tokenizer: Tokenizer) -> TokenizeReply:
    tokens = tokenizer.tokenize(body.content, parse_special=body.parse_special)
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
            path = f"tokens.{index}"
            raise InvalidRequest(f"`{path}`: {token} is not a token of this model.", path)


def _sampling_props(sampling: Sampling) -> SamplingProps:
    return SamplingProps(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repeat_penalty=sampling.repeat_penalty,
        repeat_last_n=sampling.repeat_last_n,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=-1 if sampling.seed is None else sampling.seed,
        max_tokens=-1,
        n_predict=-1,
    )


def _cache_props(cache: CacheStatus) -> CacheProps:
    return CacheProps(
        model_class=cache.model_class,
        off_because=cache.off_because,
        tiers=[
            TierProps(
                name=tier.name,
                entries=tier.n_entries,
                bytes=tier.n_bytes,
                budget_bytes=tier.budget_bytes,
                trouble=tier.trouble,
            )
            for tier in cache.tiers
        ],
    )
