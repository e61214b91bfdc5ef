"""Which wire format a body is written in."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from rekindle.errors import InvalidRequest

ANTHROPIC_BLOCKS = ("tool_use", "tool_result")  # a type may be anything, also not hashable


class WireFormat(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"


def named_dialect(name: str) -> WireFormat:
    try:
        return WireFormat(name)
    except ValueError:
        allowed = ", ".join(f"`{each}`" for each in WireFormat)
        raise InvalidRequest(f"`dialect` should be one of {allowed}.", "dialect") from None


def dialect_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> WireFormat:
    """By the fields that only one of them has."""
    if "prompt" in body:
        return WireFormat.COMPLETIONS
    if "input" in body:
        return WireFormat.RESPONSES
    if "anthropic-version" in headers or "system" in body or _has_anthropic_parts(body):
        return WireFormat.MESSAGES
    return WireFormat.CHAT


def _has_anthropic_parts(body: Mapping[str, Any]) -> bool:
    if any("input_schema" in tool for tool in _objects(body.get("tools"))):
        return True
    return any(
        block.get("type") in ANTHROPIC_BLOCKS
        for message in _objects(body.get("messages"))
        for block in _objects(message.get("content"))
    )


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Those in a list; nothing has been checked yet."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
