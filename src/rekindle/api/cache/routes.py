"""The cache endpoints: list, read, pin and delete entries, look up a prompt, list sessions."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Request, Response

from rekindle.api.body import fault
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
    cache_deleted,
    lookup_of,
    session_entry,
    stored_entry,
    tier_usage,
)
from rekindle.api.errors import NotFound
from rekindle.api.http.caller import Caller
from rekindle.api.http.context import RequestContext
from rekindle.api.http.query import model_wanted, whole_number
from rekindle.api.json import json_response
from rekindle.api.models import ForgetScope
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Pipeline, WireFormat
from rekindle.generation.forgetting import Scope
from rekindle.generation.questions import (
    ForgetKey,
    ListBranches,
    ListStored,
    PinStored,
    ReadTokens,
)
from rekindle.generation.request import session_name
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
        forget: ForgetScope,
    ) -> None:
        self._forget = forget
        self._context = context
        self._models = context.models
        self._pipeline = pipeline
        self._formats = {each.name: each for each in formats}

    def add_routes(self, routes: Routes) -> None:
        any_request = [each.schema for each in self._formats.values()]
        routes.add("GET", "/v1/cache", self.list_stored, gives=StoredList)
        routes.add("DELETE", "/v1/cache", self.delete_scope, gives=CacheDeleted)
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
            stored = await served.responder.ask(ListStored(namespace=namespace, limit=limit))
            await self._models.refresh()
            cache = served.responder.status().cache
        usage = [tier_usage(tier) for tier in (cache.tiers if cache is not None else ())]
        return json_response(
            StoredList(object="list", data=[stored_entry(each) for each in stored], usage=usage)
        )

    async def show_forest(self, request: Request) -> Response:
        namespace, limit = self._namespace(request), _limit(request, MAX_BRANCHES)
        with await self._models.lease(model_wanted(request)) as served:
            branches = await served.responder.ask(ListBranches(namespace=namespace, limit=limit))
        return json_response(Forest(object="list", data=[branch_entry(each) for each in branches]))

    async def read_text(self, request: Request, key: str) -> Response:
        namespace = self._namespace(request)
        start = whole_number(request, "start", default=0, most=MAX_POSITION)
        with await self._models.lease(model_wanted(request)) as served:
            responder = served.responder
            tokens = await responder.ask(ReadTokens(key=key, namespace=namespace))
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
        self._context.require_admin(request, "Pinning a stored prompt")
        body = await self._context.bodies.read(request, PinRequest)
        namespace = self._namespace(request)
        with await self._models.lease(model_wanted(request)) as served:
            is_there = await served.responder.ask(
                PinStored(key=key, seconds=body.seconds, namespace=namespace)
            )
        if not is_there:
            raise _unknown(key)
        return json_response(CachePinned(object="cache.pinned", key=key, seconds=body.seconds))

    async def delete(self, request: Request, key: str) -> Response:
        caller = self._context.caller(request)
        with await self._models.lease(model_wanted(request)) as served:
            deleted = await served.responder.ask(
                ForgetKey(key=key, namespace=caller.namespace, at=caller.asked_at)
            )
        if not any(deleted.counts.values()):
            raise _unknown(key)
        return json_response(cache_deleted(key, deleted))

    async def delete_scope(self, request: Request) -> Response:
        """Delete a session, the caller's namespace, or everything, of all models."""
        caller = self._context.caller(request)
        scope = _scope(request, caller)
        if scope.namespace is None:
            self._context.require_admin(request, "Deleting every namespace")
        elif scope.session is None and self._context.is_shared:
            self._context.require_admin(request, "Deleting what several keys share")
        return json_response(cache_deleted(None, await self._forget(scope, caller.asked_at)))

    async def look_up(self, request: Request) -> Response:
        """Forecast what a request would find. Nothing is computed, and nothing changes."""
        name = request.query_params.get("dialect")
        if name is None:
            name = detect(await self._context.bodies.read_json(request), request.headers)
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

    def _namespace(self, request: Request) -> str:
        return self._context.caller(request).namespace


def _scope(request: Request, caller: Caller) -> Scope:
    query = request.query_params
    wanted, session = query.get("scope"), query.get("session")
    for name, value in query.multi_items():
        if name == "model":
            raise fault("model", " cannot be given: a deletion covers all models.")
        if name not in ("scope", "session"):
            raise fault(f"{name:.100}", " is not a parameter of a deletion: it would be ignored.")
        if query[name] != value:
            raise fault(name, " should be given once.")
    if wanted not in (None, "all"):
        raise fault("scope", " should be `all`, for every namespace.")
    if wanted is not None and session is not None:
        raise fault("scope", " and `session` cannot be given together.")
    if session is not None and not (session := session_name(session)):
        raise fault("session", " should not be empty.")
    return Scope() if wanted else Scope(namespace=caller.namespace, session=session)


def _limit(request: Request, most: int) -> int:
    return whole_number(request, "limit", default=100, least=1, most=most)


def _unknown(key: str) -> NotFound:
    return NotFound(f"Nothing is cached under the key '{key}'.", "key")


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")
