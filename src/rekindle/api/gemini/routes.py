"""Gemini's endpoints that stream, count tokens, and keep contents."""

import asyncio
import time
from dataclasses import replace
from functools import partial

from fastapi import Request, Response

from rekindle.api.body import fault
from rekindle.api.gemini.bodies import (
    CachedContentBody,
    CachedContentList,
    Empty,
    GenerateContentBody,
    TotalTokens,
)
from rekindle.api.gemini.cached import (
    FOLDER,
    ID,
    CachedContents,
    CachedRecord,
    cached_content_format,
    life_seconds,
)
from rekindle.api.gemini.contents import read_contents, reasoning_budget_of
from rekindle.api.gemini.schema import (
    CachedContentRequest,
    CachedContentUpdate,
    CountContentRequest,
    CountedRequest,
    GenerateContentRequest,
)
from rekindle.api.gemini.tools import unsupported_tools
from rekindle.api.gemini.wire_format import JSON, MODEL, GeminiFormats, cached_of, model_of
from rekindle.api.http.caller import Hints
from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import GoogleErrorBody
from rekindle.api.http.query import whole_number
from rekindle.api.http.usage_window import scaled
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Pipeline
from rekindle.api.requests.media import MediaReader
from rekindle.api.requests.reasoning import effective_budget, for_budget
from rekindle.chat.conversation import Conversation
from rekindle.config.choices import Overflow
from rekindle.generation.stored_responses import ResponseStore

DEFAULT_PAGE, MAX_PAGE = 100, 1000  # cached contents; the most are Google's, the default is picked


class GeminiApi:
    def __init__(
        self,
        context: RequestContext,
        pipeline: Pipeline,
        formats: GeminiFormats,
        store: ResponseStore,
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._formats = formats
        self._store = store
        self._cached_content = cached_content_format(store)

    def add_routes(self, routes: Routes, prefix: str) -> None:
        add = partial(routes.add, error=GoogleErrorBody)
        add(
            "POST",
            f"{prefix}{MODEL}:streamGenerateContent",
            self.stream,
            takes=[GenerateContentRequest],
            streams=[GenerateContentBody],
            media={JSON: {"schema": {"type": "array", "items": {"type": "object"}}}},
        )
        counted, count = [CountContentRequest], f"{prefix}{MODEL}:countTokens"
        add("POST", count, self.count_tokens, takes=counted, gives=TotalTokens)
        contents, gives = f"{prefix}/{FOLDER}", CachedContentBody
        one = f"{contents}/{{content_id}}"
        add("POST", contents, self.create, takes=[CachedContentRequest], gives=gives)
        add("GET", contents, self.list_contents, gives=CachedContentList)
        add("GET", one, self.show, gives=gives)
        add("PATCH", one, self.update, takes=[CachedContentUpdate], gives=gives)
        add("DELETE", one, self.delete, gives=Empty)

    async def stream(self, request: Request) -> Response:
        return await self._pipeline.reply(request, self._formats.streamed(request))

    async def count_tokens(self, request: Request) -> Response:
        context = self._context
        sent = await context.bodies.read(request, CountContentRequest)
        body = sent.generate_content_request or sent
        namespace = self._namespace(request, body.cache_salt or sent.cache_salt)
        conversation = await context.bodies.work(
            request, partial(self._conversation, body, namespace), blocks=True
        )
        for name in unsupported_tools(body.tools or ()):
            context.telemetry.count_ignored_field(name)
        with await context.models.lease(model_of(body.model, request)) as served:
            asked = reasoning_budget_of(body.generation_config)
            budget = effective_budget(asked, served.responder.reasoning_limit)
            # Count the whole conversation, even where the server is set to trim it.
            prompt = await served.responder.prepare_chat(
                for_budget(conversation, budget), overflow=Overflow.ERROR, namespace=namespace
            )
        scale = context.usage_scale(request, served.card.n_ctx)
        return json_response(TotalTokens(totalTokens=scaled(len(prompt.tokens), scale)))

    async def create(self, request: Request) -> Response:
        return await self._pipeline.reply(request, self._cached_content)

    async def list_contents(self, request: Request) -> Response:
        size = whole_number(request, "pageSize", default=DEFAULT_PAGE, least=1, most=MAX_PAGE)
        after = request.query_params.get("pageToken", "")
        if after and not ID.fullmatch(after):
            raise fault("pageToken", " should be the `nextPageToken` of an earlier page.")
        return json_response(await asyncio.to_thread(self._contents(request).page, after, size))

    async def show(self, request: Request, content_id: str) -> Response:
        found = await asyncio.to_thread(self._contents(request).find, content_id)
        return _shown(content_id, found.record)

    async def update(self, request: Request, content_id: str) -> Response:
        """Change when a content expires. Requests that continue it pin its rows again."""
        body = await self._context.bodies.read(request, CachedContentUpdate)
        contents = self._contents(request, body.cache_salt)
        found = await asyncio.to_thread(contents.find, content_id)
        now = time.time()
        is_renewed = body.ttl is not None or body.expire_time is not None
        expires_at = now + life_seconds(body) if is_renewed else found.record.expires_at
        times = {"updated_at": now, "expires_at": expires_at}
        record = found.record.model_copy(update=times)
        await asyncio.to_thread(contents.keep, content_id, replace(found, record=record))
        return _shown(content_id, record)

    async def delete(self, request: Request, content_id: str) -> Response:
        await asyncio.to_thread(self._contents(request).delete, content_id)
        return json_response(Empty())

    def _contents(self, request: Request, salt: str | None = None) -> CachedContents:
        return CachedContents(self._store, self._namespace(request, salt))

    def _namespace(self, request: Request, salt: str | None) -> str:
        """Return the caller's namespace. `salt`: of the body."""
        return self._context.caller(request, Hints(cache_salt=salt)).namespace

    def _conversation(self, body: CountedRequest, namespace: str) -> Conversation:
        _, stored = cached_of(body, self._store, namespace)
        media = MediaReader(self._context.settings.media)
        return read_contents(body, media, stored).conversation


def _shown(content_id: str, record: CachedRecord) -> Response:
    return json_response(record.body(f"{FOLDER}/{content_id}"))
