"""Anthropic's endpoint that counts tokens."""

from functools import partial

from fastapi import Request, Response

from rekindle.api.anthropic.bodies import TokenCount
from rekindle.api.anthropic.messages import conversation_of, reasoning_budget_of
from rekindle.api.anthropic.schema import CountTokensRequest
from rekindle.api.anthropic.tools import unsupported_tools
from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import MessagesErrorBody
from rekindle.api.http.usage_window import scaled
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import effective_budget, for_budget
from rekindle.config.choices import Overflow


def add_token_count(routes: Routes, context: RequestContext) -> None:
    async def count_tokens(request: Request) -> Response:
        body = await context.bodies.read(request, CountTokensRequest)
        for name in unsupported_tools(body):
            context.telemetry.count_ignored_field(name)
        conversation = await context.bodies.work(
            request, partial(conversation_of, body, MediaReader(context.settings.media))
        )
        namespace = context.caller(request).namespace
        with await context.models.lease(body.model) as served:
            limit = served.responder.reasoning_limit
            budget = effective_budget(reasoning_budget_of(body), limit)
            # Count the whole conversation, even where the server is set to trim it.
            prompt = await served.responder.prepare_chat(
                for_budget(conversation, budget), overflow=Overflow.ERROR, namespace=namespace
            )
        scale = context.usage_scale(request, served.card.n_ctx)
        return json_response(TokenCount(input_tokens=scaled(len(prompt.tokens), scale)))

    routes.add(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        takes=[CountTokensRequest],
        gives=TokenCount,
        error=MessagesErrorBody,
    )
