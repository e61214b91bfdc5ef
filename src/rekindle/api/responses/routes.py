"""The Responses endpoints: each reads as the life of its request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json

from rekindle.api.body import read_body
from rekindle.api.cache_controls import openai_hints
from rekindle.api.errors import Failure, invalid
from rekindle.api.http.cache_header import cache_header
from rekindle.api.http.caller import Caller, Hints
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import CLIENT_CLOSED_REQUEST, ClientGone, unless_client_leaves
from rekindle.api.models import Lease
from rekindle.api.openapi import ERRORS, reply, request_body, whole_or_stream
from rekindle.api.replies import Replies, WantedReply, start_replies
from rekindle.api.responses.bodies import (
    DeletedResponse,
    InputItemList,
    ResponseBody,
    ResponseEvent,
)
from rekindle.api.responses.history import NotStored, ResponseHistory
from rekindle.api.responses.items import Placed, read_items
from rekindle.api.responses.output import Output
from rekindle.api.responses.request import (
    ENCRYPTED_REASONING,
    conversation_of,
    includes,
    marks_of,
    reply_options,
)
from rekindle.api.responses.response import Envelope, ended
from rekindle.api.responses.schema import CreateResponseRequest
from rekindle.api.responses.stream import ResponseEvents
from rekindle.api.responses.tools import toolbox_of
from rekindle.api.sse import EventStream
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyDone, ReplyEvent, ReplyProgress
from rekindle.config import Overflow
from rekindle.errors import InvalidRequest
from rekindle.generation.stored_responses import ResponseStore

# What OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (
    CreateResponseRequest,
    DeletedResponse,
    InputItemList,
    ResponseBody,
    ResponseEvent,
)
MAX_ITEMS = 100  # of one page, as OpenAI has it


class ResponsesApi:
    def __init__(self, context: RequestContext, store: ResponseStore) -> None:
        self._desk = context
        self._models = context.models
        self._telemetry = context.telemetry
        self._store = store

    def add_routes(self, app: FastAPI) -> None:
        for prefix in ("/v1", ""):
            app.add_api_route(
                f"{prefix}/responses",
                self.create,
                methods=["POST"],
                openapi_extra=request_body(CreateResponseRequest),
                responses=whole_or_stream(ResponseBody, ResponseEvent),
            )
            one = f"{prefix}/responses/{{response_id}}"
            for path, endpoint, method, model in (
                (one, self.retrieve, "GET", ResponseBody),
                (one, self.delete, "DELETE", DeletedResponse),
                (f"{one}/input_items", self.input_items, "GET", InputItemList),
            ):
                app.add_api_route(
                    path, endpoint, methods=[method], responses=ERRORS | {200: reply(model)}
                )

    async def create(self, request: Request) -> Response:
        body = await read_body(request, CreateResponseRequest, self._telemetry)
        caller = self._desk.caller(request, openai_hints(body))
        try:
            items = await self._history(caller.namespace).items_of(body)
        except NotStored as missing:
            return _not_stored(missing).response(request.scope)
        with await self._models.lease(body.model) as served:
            return await self._reply(request, body, items, caller, served)

    async def response_prompt(self, request: Request, served: Lease) -> Prompt:
        """For whoever wants to know what it would find."""
        body = await read_body(request, CreateResponseRequest, self._telemetry)
        caller = self._desk.caller(request, openai_hints(body))
        try:
            items = await self._history(caller.namespace).items_of(body)
        except NotStored as missing:
            raise InvalidRequest(f"'{missing.id}' is not stored here.", missing.param) from None
        toolbox = toolbox_of(body.tools or ())
        return await served.responder.prepare_chat(
            conversation_of(body, read_items(items).messages, toolbox),
            overflow=Overflow.TRIM if body.truncation == "auto" else None,
            namespace=caller.namespace,
        )

    def _history(self, namespace: str) -> ResponseHistory:
        return ResponseHistory(self._store, namespace)

    async def _reply(
        self,
        request: Request,
        body: CreateResponseRequest,
        items: Sequence[Placed],
        caller: Caller,
        served: Lease,
    ) -> Response:
        read = read_items(items)
        for kind in read.skipped:
            self._telemetry.count_ignored_field(f"input.{kind}")
        toolbox = toolbox_of(body.tools or ())
        conversation = conversation_of(body, read.messages, toolbox)
        self._desk.name_conversation(request, conversation)
        options = reply_options(
            body,
            toolbox,
            served.responder.default_sampling,
            default_cache_prompt=served.responder.default_cache_prompt,
        )
        prompt = await served.responder.prepare_chat(
            conversation,
            cache_prompt=options.cache_prompt,
            overflow=Overflow.TRIM if body.truncation == "auto" else None,
            namespace=caller.namespace,
        )
        marks = marks_of(body, read, conversation)
        options = await self._desk.with_terms(
            options, request, caller, body, marks, conversation, prompt
        )
        cache_options = body.prompt_cache_options
        compare_with = cache_options.comparison_response_id if cache_options else None
        envelope = Envelope(
            model=served.card.id,
            body=body,
            toolbox=toolbox,
            sampling=options.sampling,
            wants_diagnostics=compare_with is not None,
        )
        options = replace(options, reply_id=envelope.id, compare_with=compare_with)
        wanted = [WantedReply(prompt, options)]
        replies = await start_replies(served, wanted, self._telemetry, request=request)
        output = Output(
            envelope.key, toolbox, encrypts_reasoning=includes(body, ENCRYPTED_REASONING)
        )

        def keep(reply: ResponseBody) -> None:
            if envelope.is_stored:
                self._history(caller.namespace).keep(envelope, items, reply)

        if body.stream:
            events = ResponseEvents(envelope, output, keep)
            return EventStream(replies, events, keep_alive_seconds=self._desk.ping_seconds)
        try:
            done = await unless_client_leaves(request.receive, _collect(replies, output))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            replies.close()
        reply = ended(envelope, output.items, done)
        keep(reply)
        return _json(reply, cache_header(done.stats))

    async def retrieve(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("`stream` is not supported here.", "stream")
        kept = await self._history(self._namespace(request)).find(response_id)
        return _json(kept.response) if kept else _unknown(response_id).response(request.scope)

    async def delete(self, request: Request, response_id: str) -> Response:
        if not await self._history(self._namespace(request)).delete(response_id):
            return _unknown(response_id).response(request.scope)
        return _json(DeletedResponse(id=response_id, object="response", deleted=True))

    async def input_items(self, request: Request, response_id: str) -> Response:
        page = _page_wanted(request)
        kept = await self._history(self._namespace(request)).find(response_id)
        if kept is None:
            return _unknown(response_id).response(request.scope)
        return _json(_page_of(kept.items, page))

    def _namespace(self, request: Request) -> str:
        return self._desk.caller(request, Hints()).namespace


async def _collect(replies: Replies, output: Output) -> ReplyDone:
    ends: list[ReplyDone] = []

    async def add(_index: int, event: ReplyEvent) -> None:
        if isinstance(event, ReplyDone):
            ends.append(event)
            steps = output.finish(event.finish)
        elif isinstance(event, ReplyProgress):
            return
        else:
            steps = output.add(event)
        for _ in steps:
            pass

    await replies.pour(add)
    return ends[0]


@dataclass(frozen=True, slots=True)
class _ItemPage:
    limit: int
    is_oldest_first: bool
    after: str | None


def _page_wanted(request: Request) -> _ItemPage:
    query = request.query_params
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
        raise InvalidRequest(f"`limit` should be 1 to {MAX_ITEMS}.", "limit")
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("`order` should be `asc` or `desc`.", "order")
    return _ItemPage(int(limit), query.get("order") == "asc", query.get("after"))


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


def _not_stored(missing: NotStored) -> Failure:
    if missing.param == "previous_response_id":
        message = f"Previous response with id '{missing.id}' not found."
        code = "previous_response_not_found"
    else:
        message, code = f"Item with id '{missing.id}' not found.", "not_found"
    return invalid(message, status=404, param=missing.param, code=code)


def _unknown(response_id: str) -> Failure:
    message = f"Response with id '{response_id}' not found."
    return invalid(message, status=404, param="response_id", code="not_found")


def _json(value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)
