"""Reply types of the Messages endpoints. OpenAPI is made from these."""

from typing import Any, Literal, NotRequired

from pydantic import RootModel
from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheCreation(TypedDict):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(TypedDict):
    """The three counts of input add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ChangeMiss(TypedDict):
    type: Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]
    cache_missed_input_tokens: int


class UnknownMiss(TypedDict):
    type: Literal["previous_message_not_found", "unavailable"]


class Diagnostics(TypedDict):
    cache_miss_reason: ChangeMiss | UnknownMiss


class MessageBody(TypedDict):
    """A whole reply. In `message_start` of a stream it has no content and no stop reason."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    # Only if the request has `diagnostics`. Null: the cache missed nothing.
    diagnostics: NotRequired[Diagnostics | None]
    rekindle: NotRequired[Rekindle]


class TokenCount(TypedDict):
    input_tokens: int


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageBody


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ThinkingBlock | TextBlock | ToolUseBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class Ending(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: Ending
    usage: MessageUsage
    rekindle: Rekindle


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class Ping(TypedDict):
    type: Literal["ping"]


class MessageEvent(
    RootModel[
        MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
    ]
):
    """The data of one stream event. Its `type` is also the event's name."""
