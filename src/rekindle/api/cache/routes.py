"""The cache endpoints: what is stored, stays and goes, what would be found, who computed it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.body import parse_json, read_body
from rekindle.api.cache.bodies import (
    CLASSES,
    BranchEntry,
    CacheDeleted,
    CachedTokens,
    CachePinned,
    ExpectedTimes,
    Forest,
    Lookup,
    PinRequest,
    SessionEntry,
    SessionList,
    StoredEntry,
    StoredList,
    StoredText,
    TierUsage,
)
from rekindle.api.cache.wire_format import dialect_of, named_dialect
from rekindle.api.errors import invalid
from rekindle.api.http.caller import Hints
from rekindle.api.http.context import RequestContext
from rekindle.api.models import Lease
from rekindle.api.openai.response import miss_body
from rekindle.api.openapi import ERRORS, REF, reply, request_body
from rekindle.chat.accounts.sessions import Session
from rekindle.chat.prompt.prompt import Prompt
from rekindle.errors import InvalidRequest
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Miss

WIRE_TYPES = (
    PinRequest,
    CacheDeleted,
    CachePinned,
    Forest,
    Lookup,
    SessionList,
    StoredList,
    StoredText,
)
MAX_LISTED = 1000  # picked
MAX_BRANCHES = 10_000  # picked
MAX_POSITION = 10**8  # no context is as long
LOOKED_UP = (
    "ChatCompletionRequest",
    "CompletionRequest",
    "MessagesRequest",
    "CreateResponseRequest",
)


PromptOf = Callable[[Request, Lease], Awaitable[Prompt]]


class CacheApi:
    """`prompts` reads the prompt of a request, by its dialect."""

    def __init__(self, context: RequestContext, prompts: Mapping[str, PromptOf]) -> None:
        self._desk = context
        self._models = context.models
        self._prompts = prompts

    def add_routes(self, app: FastAPI) -> None:
        for method, path, endpoint, model in (
            ("GET", "/v1/cache", self.list_stored, StoredList),
            ("DELETE", "/v1/cache", self.delete_all, CacheDeleted),
            ("GET", "/v1/cache/forest", self.show_forest, Forest),
            # A path, because keys may have slashes.
            ("GET", "/v1/cache/{key:path}/text", self.read_text, StoredText),
            ("DELETE", "/v1/cache/{key:path}", self.delete, CacheDeleted),
            ("GET", "/v1/sessions", self.list_sessions, SessionList),
        ):
            app.add_api_route(
                path, endpoint, methods=[method], responses=ERRORS | {200: reply(model)}
            )
        app.add_api_route(
            "/v1/cache/lookup",
            self.look_up,
            methods=["POST"],
            openapi_extra=_any_request(),
            responses=ERRORS | {200: reply(Lookup)},
        )
        app.add_api_route(
            "/v1/cache/{key:path}/pin",
            self.pin,
            methods=["POST"],
            openapi_extra=request_body(PinRequest),
            responses=ERRORS | {200: reply(CachePinned)},
        )

    async def list_stored(self, request: Request) -> Response:
        limit = _limit(request, MAX_LISTED)
        with await self._models.lease(_model(request)) as served:
            store = served.responder.store
            stored = await store.list_stored(namespace=self._namespace(request), limit=limit)
            cache = served.responder.status().cache
        usage = [
            TierUsage(
                name=tier.name.value,
                entries=tier.n_entries,
                bytes=tier.n_bytes,
                budget_bytes=tier.budget_bytes,
            )
            for tier in (cache.tiers if cache is not None else ())
        ]
        return _json(StoredList(object="list", data=[_entry(each) for each in stored], usage=usage))

    async def show_forest(self, request: Request) -> Response:
        limit = _limit(request, MAX_BRANCHES)
        with await self._models.lease(_model(request)) as served:
            store = served.responder.store
            branches = await store.forest(namespace=self._namespace(request), limit=limit)
        return _json(Forest(object="list", data=[_branch(each) for each in branches]))

    async def read_text(self, request: Request, key: str) -> Response:
        start = _whole_number(request, "start", "0", most=MAX_POSITION)
        with await self._models.lease(_model(request)) as served:
            responder = served.responder
            tokens = await responder.store.stored_tokens(key, namespace=self._namespace(request))
            if tokens is None:
                return _not_there(request, key)
            own = tokens[start:]
            text = await asyncio.to_thread(_text, own, responder.tokenizer)
        stop = len(tokens)
        start = min(start, stop)
        return _json(StoredText(object="cache.text", key=key, start=start, stop=stop, text=text))

    async def pin(self, request: Request, key: str) -> Response:
        body = await read_body(request, PinRequest, self._desk.telemetry)
        with await self._models.lease(_model(request)) as served:
            is_there = await served.responder.store.pin(
                key, seconds=body.seconds, namespace=self._namespace(request)
            )
        if not is_there:
            return _not_there(request, key)
        return _json(CachePinned(object="cache.pinned", key=key, seconds=body.seconds))

    async def delete(self, request: Request, key: str) -> Response:
        n_deleted = await self._forget(request, key)
        if n_deleted == 0:
            return _not_there(request, key)
        return _json(CacheDeleted(object="cache.deleted", key=key, deleted=n_deleted))

    async def delete_all(self, request: Request) -> Response:
        n_deleted = await self._forget(request, None)
        return _json(CacheDeleted(object="cache.deleted", key=None, deleted=n_deleted))

    async def look_up(self, request: Request) -> Response:
        """Nothing is computed, and nothing changes."""
        body = parse_json(await request.body())
        named = request.query_params.get("dialect")
        dialect = dialect_of(body, request.headers) if named is None else named_dialect(named)
        model = body.get("model")
        with await self._models.lease(model if isinstance(model, str) else None) as served:
            prompt = await self._prompts[dialect](request, served)
            session = self._desk.caller(request, Hints()).session
            return _json(_lookup(*await served.responder.look_up(prompt, session=session)))

    async def list_sessions(self, request: Request) -> Response:
        with await self._models.lease(_model(request)) as served:
            sessions = served.responder.sessions.list(self._namespace(request))
        return _json(SessionList(object="list", data=[_session(each) for each in sessions]))

    async def _forget(self, request: Request, key: str | None) -> int:
        with await self._models.lease(_model(request)) as served:
            return await served.responder.store.forget(key, namespace=self._namespace(request))

    def _namespace(self, request: Request) -> str:
        return self._desk.caller(request, Hints()).namespace


def _model(request: Request) -> str | None:
    return request.query_params.get("model")


def _limit(request: Request, most: int) -> int:
    return _whole_number(request, "limit", "100", least=1, most=most)


def _whole_number(request: Request, name: str, default: str, *, most: int, least: int = 0) -> int:
    value = request.query_params.get(name, default)
    if not (
        value.isascii() and value.isdecimal() and len(value) < 10 and least <= int(value) <= most
    ):
        raise InvalidRequest(f"`{name}` should be {least} to {most}.", name)
    return int(value)


def _not_there(request: Request, key: str) -> Response:
    message = f"Nothing is cached under the key '{key}'."
    refusal = invalid(message, status=404, param="key", code="not_found")
    return refusal.response(request.scope)


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")


def _branch(branch: StoredBranch) -> BranchEntry:
    return {
        "key": branch.key,
        "parent": branch.parent,
        "start": branch.start,
        "stop": branch.stop,
        "bytes": branch.n_bytes,
        "names": list(branch.names),
        "session": branch.session,
        "class": CLASSES[branch.rank],
        "tiers": [source.value for source in branch.sources],
        "hits": branch.hits,
        "last_used": branch.used_at,
        "pinned_until": branch.pinned_until,
    }


def _entry(stored: StoredPrefix) -> StoredEntry:
    return {
        "key": stored.key,
        "name": stored.name,
        "session": stored.session,
        "class": CLASSES[stored.rank],
        "tokens": stored.n_tokens,
        "bytes": stored.n_bytes,
        "tiers": [source.value for source in stored.sources],
        "hits": stored.hits,
        "last_used": stored.used_at,
        "pinned_until": stored.pinned_until,
    }


def _session(session: Session) -> SessionEntry:
    ledger = session.ledger
    return SessionEntry(
        session=session.id,
        last_used=session.used_at,
        requests=ledger.requests,
        prompt_tokens=ledger.prompt_tokens,
        cached_tokens=ledger.cached_tokens,
        prefilled_tokens=ledger.prefilled_tokens,
        prefilled_twice_tokens=ledger.prefilled_twice_tokens,
    )


def _lookup(forecast: Forecast, miss: Miss | None) -> Lookup:
    restore, prefill = _ms(forecast.restore_seconds), _ms(forecast.prefill_seconds)
    total = None if restore is None or prefill is None else round(restore + prefill, 3)
    return Lookup(
        object="cache.lookup",
        prompt_tokens=forecast.n_prompt,
        cached=[
            CachedTokens(tier=source.value, tokens=n)
            for source, n in forecast.spans.by_source().items()
        ],
        prefilled=forecast.n_prompt - forecast.n_cached,
        expected_ms=ExpectedTimes(restore=restore, prefill=prefill, total=total),
        miss=miss_body(miss) if miss else None,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _any_request() -> dict[str, Any]:
    schema = {"anyOf": [{"$ref": REF.format(model=name)} for name in LOOKED_UP]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")
