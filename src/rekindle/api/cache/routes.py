"""The cache endpoints: list, read, pin and delete entries, look up a prompt, list sessions."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Request, Response

from rekindle.api.body import fault, parse_json, read_body
from rekindle.api.cache.bodies import (
    CacheDeleted,
    CachePinned,
    Forest,
    Lookup,
    PinRequest,
    SessionList,
    StoredList,
    StoredText,
)
from rekindle.api.cache.detect import detect
from rekindle.api.cache.views import (
    branch_entry,
    lookup_of,
    session_entry,
    stored_entry,
    tier_usage,
)
from rekindle.api.errors import NotFound
from rekindle.api.http.context import RequestContext
from rekindle.api.http.query import model_wanted, whole_number
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Pipeline, WireFormat
from rekindle.generation.tokenizer import Tokenizer

MAX_LISTED = 1000  # picked
MAX_BRANCHES = 10_000  # picked
MAX_POSITION = 10**8  # longer than any context


class CacheApi:
    def __init__(
        self,
        context: RequestContext,
        pipeline: Pipeline,
        formats: Iterable[WireFormat[Any]],
    ) -> None:
        self._context = context
        self._models = context.models
        self._pipeline = pipeline
        self._formats = {each.name: each for each in formats}

    def add_routes(self, routes: Routes) -> None:
        any_request = [each.schema for each in self._formats.values()]
        routes.add("GET", "/v1/cache", self.list_stored, gives=StoredList)
        routes.add("DELETE", "/v1/cache", self.delete_all, gives=CacheDeleted)
        routes.add("GET", "/v1/cache/forest", self.show_forest, gives=Forest)
        routes.add("POST", "/v1/cache/lookup", self.look_up, takes=any_request, gives=Lookup)
        # `path`, because keys may contain slashes.
        one = "/v1/cache/{key:path}"
        routes.add("GET", f"{one}/text", self.read_text, gives=StoredText)
        routes.add("POST", f"{one}/pin", self.pin, takes=[PinRequest], gives=CachePinned)
        routes.add("DELETE", one, self.delete, gives=CacheDeleted)
        routes.add("GET", "/v1/sessions", self.list_sessions, gives=SessionList)

    async def list_stored(self, request: Request) -> Response:
        namespace, limit = self._namespace(request), _limit(request, MAX_LISTED)
        with await self._models.lease(model_wanted(request)) as served:
            stored = await served.responder.ask(
                lambda store: store.list_stored(namespace=namespace, limit=limit)
            )
            cache = served.responder.status().cache
        usage = [tier_usage(tier) for tier in (cache.tiers if cache is not None else ())]
        return json_response(
            StoredList(object="list", data=[stored_entry(each) for each in stored], usage=usage)
        )

    async def show_forest(self, request: Request) -> Response:
        namespace, limit = self._namespace(request), _limit(request, MAX_BRANCHES)
        with await self._models.lease(model_wanted(request)) as served:
            branches = await served.responder.ask(
                lambda store: store.forest(namespace=namespace, limit=limit)
            )
        return json_response(Forest(object="list", data=[branch_entry(each) for each in branches]))

    async def read_text(self, request: Request, key: str) -> Response:
        namespace = self._namespace(request)
        start = whole_number(request, "start", default=0, most=MAX_POSITION)
        with await self._models.lease(model_wanted(request)) as served:
            responder = served.responder
            tokens = await responder.ask(
                lambda store: store.stored_tokens(key, namespace=namespace)
            )
            if tokens is None:
                raise _unknown(key)
            own = tokens[start:]
            text = await asyncio.to_thread(_text, own, responder.tokenizer)
        stop = len(tokens)
        start = min(start, stop)
        return json_response(
            StoredText(object="cache.text", key=key, start=start, stop=stop, text=text)
        )

    async def pin(self, request: Request, key: str) -> Response:
        body = await read_body(request, PinRequest, self._context.telemetry)
        namespace = self._namespace(request)
        with await self._models.lease(model_wanted(request)) as served:
            is_there = await served.responder.ask(
                lambda store: store.pin(key, seconds=body.seconds, namespace=namespace)
            )
        if not is_there:
            raise _unknown(key)
        return json_response(CachePinned(object="cache.pinned", key=key, seconds=body.seconds))

    async def delete(self, request: Request, key: str) -> Response:
        n_deleted = await self._forget(request, key)
        if n_deleted == 0:
            raise _unknown(key)
        return json_response(CacheDeleted(object="cache.deleted", key=key, deleted=n_deleted))

    async def delete_all(self, request: Request) -> Response:
        n_deleted = await self._forget(request, None)
        return json_response(CacheDeleted(object="cache.deleted", key=None, deleted=n_deleted))

    async def look_up(self, request: Request) -> Response:
        """Forecast what a request would find. Nothing is computed, and nothing changes."""
        name = request.query_params.get("dialect")
        if name is None:
            name = detect(parse_json(await request.body()), request.headers)
        elif name not in self._formats:
            allowed = ", ".join(f"`{each}`" for each in self._formats)
            raise fault("dialect", f" should be one of {allowed}.")
        forecast, miss = await self._pipeline.look_up(request, self._formats[name])
        return json_response(lookup_of(forecast, miss))

    async def list_sessions(self, request: Request) -> Response:
        with await self._models.lease(model_wanted(request)) as served:
            sessions = served.responder.sessions.list(self._namespace(request))
        return json_response(
            SessionList(object="list", data=[session_entry(each) for each in sessions])
        )

    async def _forget(self, request: Request, key: str | None) -> int:
        namespace = self._namespace(request)
        with await self._models.lease(model_wanted(request)) as served:
            return await served.responder.ask(lambda store: store.forget(key, namespace=namespace))

    def _namespace(self, request: Request) -> str:
        return self._context.caller(request).namespace


def _limit(request: Request, most: int) -> int:
    return whole_number(request, "limit", default=100, least=1, most=most)


def _unknown(key: str) -> NotFound:
    return NotFound(f"Nothing is cached under the key '{key}'.", "key")


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")
