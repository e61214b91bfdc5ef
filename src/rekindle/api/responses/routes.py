"""The endpoints of stored responses: read, delete, list the input."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from rekindle.api.body import fault
from rekindle.api.errors import NotFound
from rekindle.api.http.context import RequestContext
from rekindle.api.http.query import whole_number
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.responses.bodies import DeletedResponse, InputItemList, ResponseBody
from rekindle.api.responses.history import Kept, ResponseHistory
from rekindle.generation.stored_responses import ResponseStore

MAX_ITEMS = 100  # of one page, OpenAI's limit


class StoredResponsesApi:
    def __init__(self, context: RequestContext, store: ResponseStore) -> None:
        self._context = context
        self._store = store

    def add_routes(self, routes: Routes, prefix: str) -> None:
        one = f"{prefix}/responses/{{response_id}}"
        routes.add("GET", one, self.retrieve, gives=ResponseBody)
        routes.add("DELETE", one, self.delete, gives=DeletedResponse)
        routes.add("GET", f"{one}/input_items", self.input_items, gives=InputItemList)

    async def retrieve(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise fault("stream", " is not supported for stored responses.")
        return json_response((await self._find(request, response_id)).response)

    async def delete(self, request: Request, response_id: str) -> Response:
        if not await asyncio.to_thread(self._history(request).delete, response_id):
            raise _unknown(response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))

    async def input_items(self, request: Request, response_id: str) -> Response:
        query = request.query_params
        limit = whole_number(request, "limit", default=20, least=1, most=MAX_ITEMS)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise fault("order", " should be `asc` or `desc`.")
        items = (await self._find(request, response_id)).items  # oldest first
        ordered = items if order == "asc" else items[::-1]
        return json_response(_page(ordered, limit, query.get("after")))

    async def _find(self, request: Request, response_id: str) -> Kept:
        kept = await asyncio.to_thread(self._history(request).find, response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept

    def _history(self, request: Request) -> ResponseHistory:
        context = self._context
        return ResponseHistory(
            self._store,
            context.caller(request).namespace,
            context.telemetry,
            max_bytes=context.settings.body_limit_bytes,
        )


def _page(items: Sequence[dict[str, Any]], limit: int, after: str | None) -> InputItemList:
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    data = list(items[start : start + limit])
    return InputItemList(
        object="list",
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=start + limit < len(items),
    )


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", "response_id")
