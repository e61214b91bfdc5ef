"""The OpenAI endpoints: each reads as the life of its request."""

import logging
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.body import read_body
from rekindle.api.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.errors import invalid
from rekindle.api.model_card import ModelCard
from rekindle.api.openai.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Model,
    ModelList,
)
from rekindle.api.openai.embeddings import EmbeddingsApi
from rekindle.api.openai.messages import conversation_of
from rekindle.api.openai.request import chat_options, completion_options, variants
from rekindle.api.openai.response import Envelope, chat_completion, completion, model_of
from rekindle.api.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingsRequest,
    GenerationFields,
)
from rekindle.api.openai.stream import (
    CHAT,
    CHAT_OPENING,
    COMPLETION,
    ChunkOptions,
    Chunks,
    echo_opening,
)
from rekindle.api.openapi import ERRORS, request_body, whole_or_stream
from rekindle.api.replies import Reply, WantedReply, start_replies
from rekindle.api.responder import Responder
from rekindle.api.sse import EventStream
from rekindle.chat.prompt import Prompt
from rekindle.config import Overflow
from rekindle.errors import InvalidRequest
from rekindle.telemetry import Telemetry

logger = logging.getLogger(__name__)

# What OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (
    ChatCompletionRequest,
    ChatCompletionChunk,
    CompletionRequest,
    Completion,
    EmbeddingsRequest,
)
MAX_NAMES_LOGGED = 32


class OpenAiApi:
    def __init__(
        self,
        responder: Responder,
        card: ModelCard,
        telemetry: Telemetry,
        *,
        keep_alive_seconds: float,
    ) -> None:
        self._responder = responder
        self._card = card
        self._telemetry = telemetry
        self._keep_alive_seconds = keep_alive_seconds
        self._names_logged: set[str] = set()
        self._embeddings = EmbeddingsApi(responder, card, telemetry)

    def add_routes(self, app: FastAPI) -> None:
        # llama-server serves each of these with and without the prefix.
        for prefix in ("/v1", ""):
            app.add_api_route(
                f"{prefix}/chat/completions",
                self.chat_completions,
                methods=["POST"],
                openapi_extra=request_body(ChatCompletionRequest),
                responses=whole_or_stream(ChatCompletion, ChatCompletionChunk),
            )
            app.add_api_route(
                f"{prefix}/completions",
                self.completions,
                methods=["POST"],
                openapi_extra=request_body(CompletionRequest),
                responses=whole_or_stream(Completion, Completion),
            )
            self._embeddings.add_routes(app, prefix)
            app.add_api_route(f"{prefix}/models", self.models, methods=["GET"], responses=ERRORS)
            # A path, because names such as `owner/model` have slashes.
            app.add_api_route(
                f"{prefix}/models/{{model_id:path}}",
                self.model,
                methods=["GET"],
                responses=ERRORS | {200: {"model": Model}},
            )

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, self._telemetry)
        conversation = conversation_of(body)
        options = chat_options(
            body,
            conversation.tools,
            self._responder.default_sampling,
            self._responder.tokenizer.n_vocab,
            default_cache_prompt=self._responder.default_cache_prompt,
        )
        prompt = await self._responder.prepare_chat(
            conversation,
            cache_prompt=options.cache_prompt,
            overflow=Overflow(body.overflow) if body.overflow else None,
        )
        envelope = self._envelope(body)
        wanted = [WantedReply(prompt, each) for each in variants(options, envelope.n_per_prompt)]
        if body.stream:
            openings = [CHAT_OPENING] * len(wanted)
            chunks = Chunks(CHAT, envelope, openings, _chunk_options(body))
            return await self._stream(request, wanted, chunks)
        return await self._whole(
            request, wanted, lambda replies: chat_completion(envelope, replies)
        )

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._telemetry)
        options = completion_options(
            body,
            self._responder.default_sampling,
            self._responder.tokenizer.n_vocab,
            default_cache_prompt=self._responder.default_cache_prompt,
        )
        prompts = await self._prompts(body, cache_prompt=options.cache_prompt)
        envelope = self._envelope(body)
        wanted = [
            WantedReply(prompt, each)
            for prompt in prompts
            for each in variants(options, envelope.n_per_prompt)
        ]
        echoes = [one.prompt.text if body.echo else "" for one in wanted]
        if body.stream:
            openings = [echo_opening(echo) if echo else b"" for echo in echoes]
            chunks = Chunks(COMPLETION, envelope, openings, _chunk_options(body))
            return await self._stream(request, wanted, chunks)
        return await self._whole(
            request, wanted, lambda replies: completion(envelope, replies, echoes)
        )

    async def models(self) -> ModelList:
        return ModelList(object="list", data=[model_of(self._card)])

    async def model(self, model_id: str, request: Request) -> Response:
        if model_id != self._card.id:
            message = f"The model `{model_id}` is not served here, `{self._card.id}` is."
            refusal = invalid(message, status=404, param="model", code="model_not_found")
            return refusal.response(request.scope)
        return _json(model_of(self._card))

    async def _stream(
        self, request: Request, wanted: Sequence[WantedReply], chunks: Chunks
    ) -> Response:
        replies = await start_replies(self._responder, wanted, self._telemetry, request=request)
        return EventStream(replies, chunks, keep_alive_seconds=self._keep_alive_seconds)

    async def _whole(
        self,
        request: Request,
        wanted: Sequence[WantedReply],
        complete: Callable[[Sequence[Reply]], ChatCompletion | Completion],
    ) -> Response:
        replies = await start_replies(self._responder, wanted, self._telemetry, request=request)
        try:
            return _json(complete(await unless_client_leaves(request.receive, replies.collect())))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            replies.close()

    async def _prompts(self, body: CompletionRequest, *, cache_prompt: bool) -> list[Prompt]:
        if isinstance(body.prompt, str):
            return [await self._responder.prepare_text(body.prompt, cache_prompt=cache_prompt)]
        if tokens := [item for item in body.prompt if isinstance(item, int)]:
            return [await self._responder.prepare_tokens(tokens)]
        prompts = []
        for index, item in enumerate(item for item in body.prompt if not isinstance(item, int)):
            try:
                if isinstance(item, str):
                    prompts.append(
                        await self._responder.prepare_text(item, cache_prompt=cache_prompt)
                    )
                else:
                    prompts.append(await self._responder.prepare_tokens(item))
            except InvalidRequest as error:
                inner = (error.param or "prompt").removeprefix("prompt")
                raise InvalidRequest(error.message, f"prompt.{index}{inner}") from None
        return prompts

    def _envelope(self, body: GenerationFields) -> Envelope:
        if body.model is not None and body.model != self._card.id:
            self._log_name_once(body.model)
        return Envelope(model=self._card.id, n_per_prompt=body.n or 1)

    def _log_name_once(self, name: str) -> None:
        if name not in self._names_logged and len(self._names_logged) < MAX_NAMES_LOGGED:
            self._names_logged.add(name)
            logger.info("a client asks for model %.80r, `%s` answers", name, self._card.id)


def _chunk_options(body: GenerationFields) -> ChunkOptions:
    return ChunkOptions(
        include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
        progress=body.return_progress is True,
    )


def _json(value: ChatCompletion | Completion | Model) -> Response:
    return Response(to_json(value), media_type="application/json")
