"""The OpenAI endpoints: each reads as the life of its request."""

import logging
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.body import read_body
from rekindle.api.cache_controls import openai_hints, openai_marks
from rekindle.api.http.cache_header import cache_header
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.models import Lease
from rekindle.api.openai.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    EmbeddingList,
)
from rekindle.api.openai.embeddings import EmbeddingsApi
from rekindle.api.openai.messages import conversation_of, marks_of
from rekindle.api.openai.models import ModelsApi
from rekindle.api.openai.request import chat_options, completion_options, variants
from rekindle.api.openai.response import Envelope, chat_completion, completion
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
from rekindle.api.openapi import request_body, whole_or_stream
from rekindle.api.replies import Reply, WantedReply, start_replies
from rekindle.api.responder import Responder
from rekindle.api.sse import EventStream
from rekindle.chat.conversation import Conversation
from rekindle.chat.prompt.prompt import Prompt
from rekindle.config import Overflow
from rekindle.errors import InvalidRequest

logger = logging.getLogger(__name__)

# What OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (
    ChatCompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    CompletionRequest,
    Completion,
    EmbeddingsRequest,
    EmbeddingList,
)
MAX_NAMES_LOGGED = 32


class OpenAiApi:
    def __init__(self, context: RequestContext) -> None:
        self._desk = context
        self._models = context.models
        self._telemetry = context.telemetry
        self._names_logged: set[str] = set()
        self._embeddings_api = EmbeddingsApi(context.models, context.telemetry)
        self._models_api = ModelsApi(context.models)

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
            self._embeddings_api.add_routes(app, prefix)
            self._models_api.add_routes(app, prefix)

    async def chat_completions(self, request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, self._telemetry)
        conversation = conversation_of(body)
        with await self._models.lease(body.model) as served:
            return await self._chat(request, body, conversation, served)

    async def _chat(
        self,
        request: Request,
        body: ChatCompletionRequest,
        conversation: Conversation,
        served: Lease,
    ) -> Response:
        options = chat_options(
            body,
            conversation.tools,
            served.responder.default_sampling,
            served.responder.tokenizer.n_vocab,
            default_cache_prompt=served.responder.default_cache_prompt,
        )
        caller = self._desk.caller(request, openai_hints(body))
        self._desk.name_conversation(request, conversation)
        prompt = await served.responder.prepare_chat(
            conversation,
            cache_prompt=options.cache_prompt,
            overflow=Overflow(body.overflow) if body.overflow else None,
            namespace=caller.namespace,
        )
        options = await self._desk.with_terms(
            options, request, caller, body, marks_of(body, conversation), conversation, prompt
        )
        envelope = self._envelope(body, served)
        wanted = [WantedReply(prompt, each) for each in variants(options, envelope.n_per_prompt)]
        if body.stream:
            openings = [CHAT_OPENING] * len(wanted)
            chunks = Chunks(CHAT, envelope, openings, _chunk_options(body))
            return await self._stream(request, served, wanted, chunks)
        return await self._whole(
            request, served, wanted, lambda replies: chat_completion(envelope, replies)
        )

    async def chat_prompt(self, request: Request, served: Lease) -> Prompt:
        """For whoever wants to know what it would find."""
        body = await read_body(request, ChatCompletionRequest, self._telemetry)
        caller = self._desk.caller(request, openai_hints(body))
        return await served.responder.prepare_chat(
            conversation_of(body),
            overflow=Overflow(body.overflow) if body.overflow else None,
            namespace=caller.namespace,
        )

    async def completion_prompt(self, request: Request, served: Lease) -> Prompt:
        """The same; of several prompts, the first."""
        body = await read_body(request, CompletionRequest, self._telemetry)
        caller = self._desk.caller(request, openai_hints(body))
        prompts = await _prompts(
            body, served.responder, cache_prompt=True, namespace=caller.namespace
        )
        return prompts[0]

    async def completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest, self._telemetry)
        with await self._models.lease(body.model) as served:
            return await self._complete(request, body, served)

    async def _complete(self, request: Request, body: CompletionRequest, served: Lease) -> Response:
        options = completion_options(
            body,
            served.responder.default_sampling,
            served.responder.tokenizer.n_vocab,
            default_cache_prompt=served.responder.default_cache_prompt,
        )
        caller = self._desk.caller(request, openai_hints(body))
        prompts = await _prompts(
            body,
            served.responder,
            cache_prompt=options.cache_prompt,
            namespace=caller.namespace,
        )
        self._desk.name_conversation(request, prompts[0].text)
        envelope = self._envelope(body, served)
        marks = openai_marks(body, ())
        wanted = [
            WantedReply(prompt, each)
            for prompt in prompts
            for each in variants(
                await self._desk.with_terms(options, request, caller, body, marks, None, prompt),
                envelope.n_per_prompt,
            )
        ]
        echoes = [one.prompt.text if body.echo else "" for one in wanted]
        if body.stream:
            openings = [echo_opening(echo) if echo else b"" for echo in echoes]
            chunks = Chunks(COMPLETION, envelope, openings, _chunk_options(body))
            return await self._stream(request, served, wanted, chunks)
        return await self._whole(
            request, served, wanted, lambda replies: completion(envelope, replies, echoes)
        )

    async def _stream(
        self, request: Request, served: Lease, wanted: Sequence[WantedReply], chunks: Chunks
    ) -> Response:
        replies = await start_replies(served, wanted, self._telemetry, request=request)
        return EventStream(replies, chunks, keep_alive_seconds=self._desk.ping_seconds)

    async def _whole(
        self,
        request: Request,
        served: Lease,
        wanted: Sequence[WantedReply],
        complete: Callable[[Sequence[Reply]], ChatCompletion | Completion],
    ) -> Response:
        replies = await start_replies(served, wanted, self._telemetry, request=request)
        try:
            collected = await unless_client_leaves(request.receive, replies.collect())
            return _json(complete(collected), cache_header(collected[0].done.stats))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            replies.close()

    def _envelope(self, body: GenerationFields, served: Lease) -> Envelope:
        if body.model is not None and body.model != served.card.id:
            self._log_name_once(body.model, served.card.id)
        return Envelope(model=served.card.id, n_per_prompt=body.n or 1)

    def _log_name_once(self, name: str, answers: str) -> None:
        if name not in self._names_logged and len(self._names_logged) < MAX_NAMES_LOGGED:
            self._names_logged.add(name)
            logger.info("a client asks for model %.80r, `%s` answers", name, answers)


async def _prompts(
    body: CompletionRequest, responder: Responder, *, cache_prompt: bool, namespace: str
) -> list[Prompt]:
    async def prompt_of(item: str | Sequence[int]) -> Prompt:
        if isinstance(item, str):
            return await responder.prepare_text(
                item, cache_prompt=cache_prompt, namespace=namespace
            )
        return await responder.prepare_tokens(item, namespace=namespace)

    if isinstance(body.prompt, str):
        return [await prompt_of(body.prompt)]
    if tokens := [item for item in body.prompt if isinstance(item, int)]:
        return [await prompt_of(tokens)]
    prompts = []
    for index, item in enumerate(item for item in body.prompt if not isinstance(item, int)):
        try:
            prompts.append(await prompt_of(item))
        except InvalidRequest as error:
            inner = (error.param or "prompt").removeprefix("prompt")
            raise InvalidRequest(error.message, f"prompt.{index}{inner}") from None
    return prompts


def _chunk_options(body: GenerationFields) -> ChunkOptions:
    return ChunkOptions(
        include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
        progress=body.return_progress is True,
    )


def _json(value: ChatCompletion | Completion, headers: dict[str, str]) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)
