"""The endpoints of stored responses: read, delete, list the input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from rekindle.api.errors import NotFound
from rekindle.api.http.context import RequestContext
from rekindle.api.http.query import whole_number
from rekindle.api.json import json_response
from rekindle.api.openapi import ERRORS, reply
from rekindle.api.responses.bodies import (
    DeletedResponse,
    InputItemList,
    ResponseBody,
)
from rekindle.api.responses.history import Kept, ResponseHistory
from rekindle.errors import InvalidRequest
from rekindle.generation.stored_responses import ResponseStore

# Types that OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (DeletedResponse, InputItemList)
MAX_ITEMS = 100  # of one page, OpenAI's limit


class StoredResponsesApi:
    def __init__(self, context: RequestContext, store: ResponseStore) -> None:
        self._context = context
        self._store = store

    def add_routes(self, app: FastAPI) -> None:
        for prefix in ("/v1", ""):
            one = f"{prefix}/responses/{{response_id}}"
            for path, endpoint, method, model in (
                (one, self.retrieve, "GET", ResponseBody),
                (one, self.delete, "DELETE", DeletedResponse),
                (f"{one}/input_items", self.input_items, "GET", InputItemList),
            ):
                app.add_api_route(
                    path, endpoint, methods=[method], responses=ERRORS | {200: reply(model)}
                )

    async def retrieve(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("`stream` is not supported for stored responses.", "stream")
        return json_response((await self._find(request, response_id)).response)

    async def delete(self, request: Request, response_id: str) -> Response:
        if not await self._history(request).delete(response_id):
            raise _unknown(response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))

    async def input_items(self, request: Request, response_id: str) -> Response:
        page = _page_wanted(request)
        kept = await self._find(request, response_id)
        return json_response(_page_of(kept.items, page))

    async def _find(self, request: Request, response_id: str) -> Kept:
        kept = await self._history(request).find(response_id)
        if kept is None:
            raise _unknown(response_id)
        return kept

    def _history(self, request: Request) -> ResponseHistory:
        return ResponseHistory(self._store, self._context.caller(request).namespace)


@dataclass(frozen=True, slots=True)
class _ItemPage:
    limit: int
    is_oldest_first: bool
    after: str | None


def _page_wanted(request: Request) -> _ItemPage:
    query = request.query_params
    limit = whole_number(request, "limit", default=20, least=1, most=MAX_ITEMS)
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("`order` should be `asc` or `desc`.", "order")
    return _ItemPage(limit, query.get("order") == "asc", query.get("after"))


def _page_of(items: Sequence[dict[str, Any]], page: _ItemPage) -> InputItemList:
    ordered = list(items if page.is_oldest_first else reversed(items))
    ids = [item["id"] for item in ordered]
    start = ids.index(page.after) + 1 if page.after in ids else 0
    data = ordered[start : start + page.limit]
    return InputItemList(
        object="list",
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=start + page.limit < len(ordered),
    )


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id}' not found.", "response_id")
