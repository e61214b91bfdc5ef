"""Anthropic's Messages endpoints: each reads as the life of its request."""

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.anthropic.bodies import MessageBody, MessageEvent, TokenCount
from rekindle.api.anthropic.messages import conversation_of
from rekindle.api.anthropic.request import hints_of, last_breakpoint, marks_of, options_of
from rekindle.api.anthropic.response import MessageEnvelope, message_of
from rekindle.api.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.api.anthropic.stream import PING, MessageEvents
from rekindle.api.anthropic.tools import served_by_anthropic
from rekindle.api.body import read_body
from rekindle.api.errors import MessagesErrorBody
from rekindle.api.http.cache_header import cache_header
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.models import Lease
from rekindle.api.openapi import reply, request_body, whole_or_stream
from rekindle.api.replies import WantedReply, start_replies
from rekindle.api.sse import EventStream
from rekindle.chat.prompt.prompt import Prompt
from rekindle.config import Overflow

# What OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (
    MessagesRequest,
    CountTokensRequest,
    MessageBody,
    MessageEvent,
    MessagesErrorBody,
    TokenCount,
)


class AnthropicApi:
    def __init__(self, context: RequestContext) -> None:
        self._desk = context
        self._models = context.models
        self._telemetry = context.telemetry

    def add_routes(self, app: FastAPI) -> None:
        errors: dict[int | str, dict[str, Any]] = {"default": reply(MessagesErrorBody)}
        app.add_api_route(
            "/v1/messages",
            self.messages,
            methods=["POST"],
            openapi_extra=request_body(MessagesRequest),
            responses=whole_or_stream(MessageBody, MessageEvent) | errors,
        )
        app.add_api_route(
            "/v1/messages/count_tokens",
            self.count_tokens,
            methods=["POST"],
            openapi_extra=request_body(CountTokensRequest),
            responses={200: reply(TokenCount), **errors},
        )

    async def messages(self, request: Request) -> Response:
        body = await read_body(request, MessagesRequest, self._telemetry)
        self._count_tools_left_out(body)
        for beta in request.headers.get("anthropic-beta", "").split(","):
            if beta.strip():
                self._telemetry.count_ignored_field(f"anthropic-beta.{beta.strip()}")
        with await self._models.lease(body.model) as served:
            return await self._reply(request, body, served)

    async def _reply(self, request: Request, body: MessagesRequest, served: Lease) -> Response:
        conversation = conversation_of(body)
        options = options_of(
            body,
            conversation,
            served.responder.default_sampling,
            default_cache_prompt=served.responder.default_cache_prompt,
        )
        marks = marks_of(body, conversation)
        caller = self._desk.caller(request, hints_of(body))
        self._desk.name_conversation(request, conversation)
        prompt = await served.responder.prepare_chat(
            conversation,
            cache_prompt=options.cache_prompt,
            overflow=Overflow(body.overflow) if body.overflow else None,
            namespace=caller.namespace,
        )
        options = await self._desk.with_terms(
            options, request, caller, body, marks, conversation, prompt
        )
        previous = body.diagnostics.previous_message_id if body.diagnostics else None
        envelope = MessageEnvelope(
            served.card.id,
            await asyncio.to_thread(last_breakpoint, marks, prompt),
            wants_diagnostics=body.diagnostics is not None,
            has_previous=previous is not None,
        )
        options = replace(options, reply_id=envelope.id, compare_with=previous)
        replies = await start_replies(
            served, [WantedReply(prompt, options)], self._telemetry, request=request
        )
        if body.stream:
            return EventStream(
                replies,
                MessageEvents(envelope),
                keep_alive_seconds=self._desk.ping_seconds,
                keep_alive=PING,
            )
        try:
            [reply] = await unless_client_leaves(request.receive, replies.collect())
            return _json(message_of(envelope, reply), cache_header(reply.done.stats))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            replies.close()

    async def message_prompt(self, request: Request, served: Lease) -> Prompt:
        """For whoever wants to know what it would find."""
        body = await read_body(request, MessagesRequest, self._telemetry)
        caller = self._desk.caller(request, hints_of(body))
        return await served.responder.prepare_chat(
            conversation_of(body),
            overflow=Overflow(body.overflow) if body.overflow else None,
            namespace=caller.namespace,
        )

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountTokensRequest, self._telemetry)
        self._count_tools_left_out(body)
        conversation = conversation_of(body)
        with await self._models.lease(body.model) as served:
            # All of it, though the server may be set to trim what does not fit.
            prompt = await served.responder.prepare_chat(conversation, overflow=Overflow.ERROR)
        return _json(TokenCount(input_tokens=len(prompt.tokens)))

    def _count_tools_left_out(self, body: CountTokensRequest) -> None:
        for kind in served_by_anthropic(body.tools or ()):
            self._telemetry.count_ignored_field(f"tools.{kind}")


def _json(value: MessageBody | TokenCount, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)
