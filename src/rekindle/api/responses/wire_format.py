"""The Responses API as a wire format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from rekindle.api.http.caller import Caller
from rekindle.api.pipeline import Exchange, WireFormat
from rekindle.api.replies import Envelope, Reply
from rekindle.api.requests.media import MediaReader
from rekindle.api.responses.bodies import ResponseBody, ResponseEvent
from rekindle.api.responses.history import ListedItem, ResponseHistory, list_item
from rekindle.api.responses.items import read_items
from rekindle.api.responses.output import Output
from rekindle.api.responses.request import (
    conversation_of,
    marks_of,
    reasoning_budget_of,
    reply_options,
)
from rekindle.api.responses.response import ResponseHead, ended
from rekindle.api.responses.schema import CreateResponseRequest
from rekindle.api.responses.stream import ResponseEvents
from rekindle.api.responses.tools import Toolbox, toolbox_of
from rekindle.config.choices import Overflow
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_responses import ResponseStore
from rekindle.observe.telemetry import Telemetry


def responses_format(
    store: ResponseStore, telemetry: Telemetry, *, max_bytes: int
) -> WireFormat[CreateResponseRequest]:
    """Make the format. `max_bytes`: of the stored items that a request continues."""
    history = partial(ResponseHistory, store, telemetry=telemetry, max_bytes=max_bytes)
    return WireFormat(
        name="responses",
        operation="create",
        paths=("/v1/responses", "/responses"),
        schema=CreateResponseRequest,
        body=ResponseBody,
        event=ResponseEvent,
        id_prefix="resp_",
        begins_too_long=True,  # Codex
        read=partial(_read, history),
        blocks=True,
    )


def _read(
    history_of: Callable[[str], ResponseHistory],
    body: CreateResponseRequest,
    caller: Caller,
    _: Mapping[str, str],
    media: MediaReader,
) -> Exchange:
    history = history_of(caller.namespace)
    items = history.items_of(body)
    read = read_items(items, media)
    listed = [] if body.store is False else [list_item(placed.item) for placed in items]
    toolbox = toolbox_of(body.tools or ())
    conversation = conversation_of(body, read.messages, toolbox)
    writer = _ResponseWriter(body, toolbox, history, listed, caller.owner)
    return Exchange(
        prompt=conversation,
        marks=marks_of(body, read, conversation),
        overflow=Overflow.TRIM if body.truncation == "auto" else None,
        ignored=[f"input.{kind}" for kind in read.skipped],
        media_omitted=media.omitted,
        reasoning_budget=reasoning_budget_of(body.reasoning),
        options=partial(reply_options, body, toolbox),
        encoder=writer.encoder,
        whole=writer.whole,
    )


@dataclass(frozen=True, slots=True)
class _ResponseWriter:
    """Writes the response to one request, and stores it unless the client declines."""

    body: CreateResponseRequest
    toolbox: Toolbox
    history: ResponseHistory
    items: Sequence[ListedItem]
    owner: Owner

    def encoder(self, envelope: Envelope) -> ResponseEvents:
        head = ResponseHead(envelope, self.body, self.toolbox)
        return ResponseEvents(head, on_end=partial(self._store, envelope))

    def whole(self, envelope: Envelope, replies: Sequence[Reply]) -> ResponseBody:
        [reply] = replies
        head = ResponseHead(envelope, self.body, self.toolbox)
        output = Output(head)
        steps = chain(*map(output.add, reply.parts), output.finish(reply.done.finish))
        for _ in steps:
            pass
        response = ended(head, output.items, reply.done)
        self._store(envelope, response)
        return response

    def _store(self, envelope: Envelope, response: ResponseBody) -> None:
        if response["store"]:
            self.history.keep(envelope, self.items, response, self.owner)
