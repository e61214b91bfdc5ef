"""Anthropic's Messages endpoints: each reads as the life of its request."""

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.anthropic.bodies import MessageBody, MessageEvent, TokenCount
from rekindle.api.anthropic.messages import conversation_of
from rekindle.api.anthropic.request import breakpoint_of, options_of
from rekindle.api.anthropic.response import MessageEnvelope, message_of
from rekindle.api.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.api.anthropic.stream import PING, Events
from rekindle.api.anthropic.tools import served_by_anthropic
from rekindle.api.body import read_body
from rekindle.api.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.errors import MessagesErrorBody
from rekindle.api.model_card import ModelCard
from rekindle.api.openapi import request_body, whole_or_stream
from rekindle.api.replies import WantedReply, start_replies
from rekindle.api.responder import Responder
from rekindle.api.sse import EventStream
from rekindle.config import Overflow
from rekindle.telemetry import Telemetry

# What OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (MessagesRequest, CountTokensRequest, MessageEvent)


class AnthropicApi:
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

    def add_routes(self, app: FastAPI) -> None:
        errors: dict[int | str, dict[str, Any]] = {"default": {"model": MessagesErrorBody}}
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
            responses={200: {"model": TokenCount}, **errors},
        )

    async def messages(self, request: Request) -> Response:
        body = await read_body(request, MessagesRequest, self._telemetry)
        self._count_tools_left_out(body)
        conversation = conversation_of(body)
        options = options_of(
            body,
            conversation,
            self._responder.default_sampling,
            default_cache_prompt=self._responder.default_cache_prompt,
        )
        prompt = await self._responder.prepare_chat(
            conversation,
            cache_prompt=options.cache_prompt,
            overflow=Overflow(body.overflow) if body.overflow else None,
        )
        envelope = MessageEnvelope(self._card.id, breakpoint_of(body, prompt))
        replies = await start_replies(
            self._responder, [WantedReply(prompt, options)], self._telemetry, request=request
        )
        if body.stream:
            return EventStream(
                replies,
                Events(envelope),
                keep_alive_seconds=self._keep_alive_seconds,
                keep_alive=PING,
            )
        try:
            [reply] = await unless_client_leaves(request.receive, replies.collect())
            return _json(message_of(envelope, reply))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            replies.close()

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountTokensRequest, self._telemetry)
        self._count_tools_left_out(body)
        # All of it, though the server may be set to trim what does not fit.
        prompt = await self._responder.prepare_chat(conversation_of(body), overflow=Overflow.ERROR)
        return _json(TokenCount(input_tokens=len(prompt.tokens)))

    def _count_tools_left_out(self, body: CountTokensRequest) -> None:
        for kind in served_by_anthropic(body.tools or ()):
            self._telemetry.count_ignored_field(f"tools.{kind}")


def _json(value: MessageBody | TokenCount) -> Response:
    return Response(to_json(value), media_type="application/json")
