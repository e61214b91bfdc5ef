"""Stored responses, which a request can continue or refer to.

All functions block: they read from disk, and a conversation may have megabytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from rekindle.api.body import fault
from rekindle.api.errors import NotFound
from rekindle.api.replies import Envelope
from rekindle.api.requests.limits import MAX_REFERENCES
from rekindle.api.responses.bodies import ResponseBody
from rekindle.api.responses.items import Placed
from rekindle.api.responses.known_fields import known_fields
from rekindle.api.responses.schema import (
    CreateResponseRequest,
    InputItem,
    MessageItem,
    ReferenceItem,
)
from rekindle.errors import InvalidRequest
from rekindle.generation.forgetting import Owner
from rekindle.generation.stored_responses import ResponseStore, StoredResponse
from rekindle.observe.telemetry import Telemetry

KEY_CHARACTERS = 32
ID_PREFIXES = {"reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
# Each response is stored with all items before it, so references read the same items again.
MAX_READS = 8  # bytes of responses that references may read, in sizes of the largest body; picked
ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


@dataclass(frozen=True, slots=True)
class ListedItem:
    """An input item as stored JSON, with a type and an id, which OpenAI always lists."""

    object_source: bytes
    new_id_prefix: str | None  # None: the client gave it an id

    def source(self, key: str, index: int) -> bytes:
        if self.new_id_prefix is None:
            return self.object_source
        new_id = f"{self.new_id_prefix}_{key}i{index:04x}"
        return self.object_source[:-1] + f',"id":"{new_id}"}}'.encode()


def list_item(item: InputItem) -> ListedItem:
    fields = known_fields(item)
    kind = fields["type"] = fields.get("type") or "message"
    if fields.get("id"):
        return ListedItem(to_json(fields), None)
    fields.pop("id", None)
    return ListedItem(to_json(fields), ID_PREFIXES.get(kind, "msg"))


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response and all its input items, as JSON. Items of earlier responses come first."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    n_bytes: int

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return [*self.items, *self.response["output"]]


@dataclass(frozen=True, slots=True)
class ResponseHistory:
    """The stored responses of one namespace."""

    store: ResponseStore
    namespace: str
    telemetry: Telemetry
    max_bytes: int  # of the stored items in a conversation: those of the largest body

    def items_of(self, body: CreateResponseRequest) -> list[Placed]:
        """List the items of the whole conversation: stored ones, then those of the request."""
        placed = list(self._previous(body.previous_response_id))
        if isinstance(body.input, str):
            return [*placed, Placed(MessageItem(role="user", content=body.input), "input")]
        items = body.input or ()
        wanted = {
            item.id: f"input.{index}.id"
            for index, item in reversed(list(enumerate(items)))
            if isinstance(item, ReferenceItem)
        }
        found = self._referenced(wanted)
        n_bytes = 0
        for index, item in enumerate(items):
            path = f"input.{index}"
            if isinstance(item, ReferenceItem):
                item, n_item_bytes = found[item.id]
                n_bytes += n_item_bytes
                if n_bytes > self.max_bytes:
                    raise self._too_large(path)
            placed.append(Placed(item, path))
        return placed

    def find(self, id: str) -> Kept | None:
        """Return a stored response. A damaged one is counted, and not found."""
        if "/" in id:  # an id of another namespace
            return None
        stored = self.store.get(self._key(id))
        if stored is None:
            return None
        kept = _decoded(stored.data)
        if kept is None:
            self.telemetry.count_damaged_response()
        return kept

    def keep(
        self, envelope: Envelope, items: Sequence[ListedItem], body: ResponseBody, owner: Owner
    ) -> None:
        listed = b",".join(item.source(envelope.key, index) for index, item in enumerate(items))
        data = b'{"response":%s,"items":[%s]}' % (to_json(body), listed)
        self.store.put(StoredResponse(self._key(envelope.id), envelope.created, data, owner))

    def delete(self, id: str) -> bool:
        return "/" not in id and self.store.delete(self._key(id))

    def _key(self, id: str) -> str:
        return f"{self.namespace}/{id}" if self.namespace else id

    def _previous(self, id: str | None) -> Iterator[Placed]:
        if id is None:
            return
        param = "previous_response_id"
        kept = self.find(id)
        if kept is not None and kept.n_bytes > self.max_bytes:
            raise self._too_large(param)
        items = [self._read(item) for item in kept.conversation] if kept else [None]
        for item in items:
            if item is None:
                message = f"Previous response with id '{id:.100}' not found."
                raise NotFound(message, param, code="previous_response_not_found")
            yield Placed(item, param)

    def _read(self, item: dict[str, Any]) -> InputItem | None:
        """Validate a stored item. A damaged one is counted."""
        try:
            return ITEM.validate_python(item)
        except ValidationError:
            self.telemetry.count_damaged_response()
            return None

    def _referenced(self, wanted: Mapping[str, str]) -> dict[str, tuple[InputItem, int]]:
        """Return items by their ids, each with its size. Read each response once.

        `wanted`: the path of a reference to each id.
        """
        if len(wanted) > MAX_REFERENCES:
            raise fault("input", f" has more than {MAX_REFERENCES:,} references.")
        found: dict[str, tuple[InputItem, int]] = {}
        n_bytes_read = 0
        for response_id in dict.fromkeys(map(_response_id, wanted)):
            kept = self.find(response_id)
            if kept is None:
                continue
            n_bytes_read += kept.n_bytes
            if n_bytes_read > MAX_READS * self.max_bytes:
                raise self._too_large("input")
            for stored in kept.conversation:
                id = stored["id"]
                if id in wanted and id not in found and (item := self._read(stored)) is not None:
                    found[id] = item, len(to_json(stored))
        for id, path in wanted.items():
            if id not in found:
                raise NotFound(f"Item with id '{id:.100}' not found.", path)
        return found

    def _too_large(self, param: str) -> InvalidRequest:
        return InvalidRequest(
            f"`{param}` refers to more than {self.max_bytes:,} bytes of stored items. Send a"
            " shorter conversation, or start the server with a larger --body-limit.",
            param,
        )


def _response_id(item_id: str) -> str:
    return f"resp_{item_id.partition('_')[2][:KEY_CHARACTERS]}"


def _decoded(data: bytes) -> Kept | None:
    try:
        value = from_json(data)
        kept = Kept(value["response"], value["items"], len(data))
        is_whole = all(isinstance(item["id"], str) for item in kept.conversation)
    except (ValueError, TypeError, KeyError):  # not UTF-8, not JSON, or of another shape
        return None
    return kept if is_whole else None
