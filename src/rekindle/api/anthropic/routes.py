"""Anthropic's endpoint that counts tokens."""

from fastapi import FastAPI, Request, Response

from rekindle.api.anthropic.bodies import TokenCount
from rekindle.api.anthropic.messages import conversation_of
from rekindle.api.anthropic.schema import CountTokensRequest
from rekindle.api.anthropic.tools import unsupported_tools
from rekindle.api.body import read_body
from rekindle.api.errors import MessagesErrorBody
from rekindle.api.http.context import RequestContext
from rekindle.api.json import json_response
from rekindle.api.openapi import reply, request_body
from rekindle.config import Overflow

# Types that OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (CountTokensRequest, TokenCount)


class AnthropicApi:
    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def add_routes(self, app: FastAPI) -> None:
        app.add_api_route(
            "/v1/messages/count_tokens",
            self.count_tokens,
            methods=["POST"],
            openapi_extra=request_body(CountTokensRequest),
            responses={200: reply(TokenCount), "default": reply(MessagesErrorBody)},
        )

    async def count_tokens(self, request: Request) -> Response:
        body = await read_body(request, CountTokensRequest, self._context.telemetry)
        for name in unsupported_tools(body):
            self._context.telemetry.count_ignored_field(name)
        conversation = conversation_of(body)
        with await self._context.models.lease(body.model) as served:
            # Count the whole conversation, even where the server is set to trim it.
            prompt = await served.responder.prepare_chat(conversation, overflow=Overflow.ERROR)
        return json_response(TokenCount(input_tokens=len(prompt.tokens)))
