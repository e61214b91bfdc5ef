"""Detection of the wire format of a request body."""

from collections.abc import Iterator, Mapping
from typing import Any

ANTHROPIC_BLOCKS = (
    "tool_use",
    "tool_result",
    "image",
    "document",
)  # a tuple: a type may be unhashable

OLLAMA_KEYS = ("options", "keep_alive", "think")


def detect(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Name the format by the fields that no other format has."""
    if "contents" in body:
        return "gemini"
    if any(key in body for key in OLLAMA_KEYS):
        return "ollama_generate" if "prompt" in body else "ollama_chat"
    if "input_prefix" in body or "input_suffix" in body:
        return "infill"
    if "prompt" in body:
        return "completion" if _is_native(body["prompt"]) else "completions"
    if "input" in body:
        return "responses"
    if "anthropic-version" in headers or "system" in body or _has_anthropic_parts(body):
        return "messages"
    return "chat"


def _is_native(prompt: object) -> bool:
    """Return whether only llama-server takes such a prompt: an object, or a mixed list."""
    kinds = {type(each) for each in prompt} if isinstance(prompt, list) else {type(prompt)}
    return dict in kinds or len(kinds) > 1


def _has_anthropic_parts(body: Mapping[str, Any]) -> bool:
    if any("input_schema" in tool for tool in _objects(body.get("tools"))):
        return True
    return any(
        block.get("type") in ANTHROPIC_BLOCKS
        for message in _objects(body.get("messages"))
        for block in _objects(message.get("content"))
    )


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list. The body has not been validated yet."""
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
