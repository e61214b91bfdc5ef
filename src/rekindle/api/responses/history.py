"""Stored responses, which a request can continue or refer to."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from rekindle.api.body import WireModel
from rekindle.api.errors import NotFound
from rekindle.api.replies import Envelope
from rekindle.api.responses.bodies import ResponseBody
from rekindle.api.responses.items import Placed
from rekindle.api.responses.schema import (
    CreateResponseRequest,
    InputItem,
    MessageItem,
    ReferenceItem,
)
from rekindle.generation.stored_responses import ResponseStore, StoredResponse

KEY_CHARACTERS = 32
ID_PREFIXES = {"reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response and all its input items, as JSON. Items of earlier responses come first."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class ResponseHistory:
    """The stored responses of one namespace."""

    def __init__(self, store: ResponseStore, namespace: str) -> None:
        self._store = store
        self._prefix = f"{namespace}/" if namespace else ""

    async def items_of(self, body: CreateResponseRequest) -> list[Placed]:
        """List the items of the whole conversation: stored ones, then those of the request."""
        placed: list[Placed] = []
        if body.previous_response_id is not None:
            id, param = body.previous_response_id, "previous_response_id"
            kept = await self.find(id)
            if kept is None:
                message = f"Previous response with id '{id}' not found."
                raise NotFound(message, param, code="previous_response_not_found")
            for item in ITEMS.validate_python([*kept.items, *kept.response["output"]]):
                placed.append(Placed(item, param))
        if isinstance(body.input, str):
            placed.append(Placed(MessageItem(role="user", content=body.input), "input"))
            return placed
        for index, item in enumerate(body.input or ()):
            path = f"input.{index}"
            if isinstance(item, ReferenceItem):
                item = await self._resolve(item.id, f"{path}.id")
            placed.append(Placed(item, path))
        return placed

    async def find(self, id: str) -> Kept | None:
        if "/" in id:  # an id of another namespace
            return None
        stored = await asyncio.to_thread(self._store.get, self._prefix + id)
        if stored is None:
            return None
        value = from_json(stored.data)
        return Kept(value["response"], value["items"])

    def keep(self, envelope: Envelope, items: Sequence[Placed], body: ResponseBody) -> None:
        listed = [_with_id(placed.item, envelope.key, index) for index, placed in enumerate(items)]
        data = to_json({"response": body, "items": listed})
        self._store.put(StoredResponse(self._prefix + envelope.id, envelope.created, data))

    async def delete(self, id: str) -> bool:
        if "/" in id:
            return False
        return await asyncio.to_thread(self._store.delete, self._prefix + id)

    async def _resolve(self, id: str, param: str) -> InputItem:
        key = id.partition("_")[2][:KEY_CHARACTERS]
        kept = await self.find(f"resp_{key}")
        for item in [*kept.items, *kept.response["output"]] if kept else ():
            if item["id"] == id:
                return ITEMS.validate_python([item])[0]
        raise NotFound(f"Item with id '{id}' not found.", param)


def _with_id(item: WireModel, key: str, index: int) -> dict[str, Any]:
    """Return the item as it was sent, with an id and a type, which OpenAI always lists."""
    fields = item.model_dump(mode="json", by_alias=True, exclude_unset=True)
    kind = fields.get("type") or "message"
    new_id = f"{ID_PREFIXES.get(kind, 'msg')}_{key}i{index:04x}"
    return fields | {"type": kind, "id": fields.get("id") or new_id}
