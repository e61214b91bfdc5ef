"""Request types of `/v1/responses`, with every field we know.

A field without a mark is honoured. Items and tools of unknown types are never refused, because
agents send types that their vendor has added.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from rekindle.api.body import Ignored, Items, Refused, WireModel
from rekindle.api.cache_controls import OpenAiFields
from rekindle.api.content import ContentPart, TextPart
from rekindle.api.requests.json_values import (
    ArgumentsText,
    Int64,
    JsonObject,
    check_arguments,
    check_json,
    texts_of,
)
from rekindle.api.requests.limits import (
    MAX_MESSAGES,
    MAX_OPTIONS,
    MAX_PARTS,
    MAX_TOOLS,
    Id,
    check_id,
)
from rekindle.api.requests.reasoning import ReasoningBudget

MAX_TOP_LOGPROBS = 20
CALLED_WITH = ("action", "operation", "arguments")  # what unknown calls name their arguments

Unused = Annotated[str | None, Ignored()]


class ItemPart(ContentPart):
    image_url: Any = None
    file_url: Any = None
    file_data: Any = None
    file_id: Any = None
    filename: Any = None
    input_audio: Any = None
    detail: Unused = None


TextParts = Annotated[Items[TextPart], Field(max_length=MAX_PARTS)]
ItemParts = Annotated[Items[ItemPart], Field(max_length=MAX_PARTS)]


class MessageItem(WireModel):
    type: Literal["message"] = "message"
    id: Id | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ItemParts
    status: Unused = None
    phase: Unused = None


class CallItem(WireModel):
    id: Id | None = None
    call_id: Id
    name: str
    namespace: str | None = None
    status: Unused = None


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: ArgumentsText


class CustomCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class CallOutputItem(WireModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: Id | None = None
    call_id: Id
    output: str | ItemParts
    status: Unused = None


class ReasoningItem(WireModel):
    type: Literal["reasoning"]
    id: Id | None = None
    summary: TextParts | None = None
    content: TextParts | None = None
    encrypted_content: str | None = None
    status: Unused = None


class ReferenceItem(WireModel):
    type: Literal["item_reference"] = "item_reference"
    id: Id


class OtherItem(WireModel):
    """An item of an unknown type. `items.py` shows calls and outputs, and omits the rest."""

    type: str
    id: Id | None = None

    @model_validator(mode="after")
    def _check_unknown_fields(self, info: ValidationInfo) -> Self:
        extra = check_json(self.model_extra) or {}
        check_id(extra.get("call_id"))
        for key in CALLED_WITH:
            if isinstance(source := extra.get(key), str):
                check_arguments(source, texts_of(info))
        return self


# A tag becomes part of a fault's path, so no tag may equal a field name.
_ITEM_TAGS = {
    "message": "MessageItem",
    "function_call": "FunctionCallItem",
    "custom_tool_call": "CustomCallItem",
    "function_call_output": "CallOutputItem",
    "custom_tool_call_output": "CallOutputItem",
    "reasoning": "ReasoningItem",
    "item_reference": "ReferenceItem",
}


def _tagged(
    tags: Mapping[str, str], other: str, default_kind: Callable[[Mapping[str, Any]], str]
) -> Callable[[Any], str]:
    """Make a discriminator that finds the class of a value by its `type`."""

    def tag(value: Any) -> str:
        if isinstance(value, WireModel):
            return type(value).__name__
        fields = value if isinstance(value, Mapping) else {}
        kind = fields.get("type")
        if kind is None:
            kind = default_kind(fields)
        return tags.get(kind, other) if isinstance(kind, str) else other

    return tag


def _default_item(fields: Mapping[str, Any]) -> str:
    return "item_reference" if "id" in fields and "role" not in fields else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[CustomCallItem, Tag("CustomCallItem")]
    | Annotated[CallOutputItem, Tag("CallOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[ReferenceItem, Tag("ReferenceItem")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_tagged(_ITEM_TAGS, "OtherItem", _default_item)),
]


class FunctionTool(WireModel):
    type: Literal["function"] = "function"
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Annotated[bool | None, Ignored()] = None


class CustomFormat(WireModel):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(WireModel):
    type: Literal["custom"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(WireModel):
    """A tool that runs on the vendor's servers."""

    type: str


_MEMBER_TAGS = {"function": "FunctionTool", "custom": "CustomTool"}
_TOOL_TAGS = {**_MEMBER_TAGS, "namespace": "NamespaceTool"}

MemberTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(_tagged(_MEMBER_TAGS, "OtherTool", lambda _: "function")),
]


class NamespaceTool(WireModel):
    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[Items[MemberTool], Field(max_length=MAX_TOOLS)]


ToolEntry = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[OtherTool, Tag("OtherTool")],
    Discriminator(_tagged(_TOOL_TAGS, "OtherTool", lambda _: "function")),
]


class ResponseToolReference(WireModel):
    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class ResponseToolChoice(WireModel):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[Items[ResponseToolReference], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonObject | None = Field(default=None, alias="schema")
    name: Unused = None
    description: Unused = None
    strict: Annotated[bool | None, Ignored()] = None


class TextConfig(WireModel):
    format: TextFormat | None = None
    verbosity: Unused = None


class ReasoningConfig(WireModel):
    effort: Id | None = None
    max_tokens: ReasoningBudget | None = None
    summary: Unused = None
    generate_summary: Unused = None


class CreateResponseRequest(OpenAiFields):
    input: str | Annotated[Items[InputItem], Field(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None

    tools: Annotated[Items[ToolEntry], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None

    max_output_tokens: Annotated[Int64, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None

    include: Annotated[list[str], Field(fail_fast=True, max_length=MAX_OPTIONS)] | None = None
    store: bool | None = None
    metadata: JsonObject | None = None

    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[Int64 | None, Ignored()] = None
    safety_identifier: Unused = None
    service_tier: Unused = None
    client_metadata: Annotated[JsonObject | None, Ignored()] = None
    stream_options: Annotated[JsonObject | None, Ignored()] = None

    background: Annotated[Any, Refused("Wait for the reply, or use `stream`.")] = None
    prompt: Annotated[Any, Refused("Send the text itself, as `instructions` and `input`.")] = None
    conversation: Annotated[Any, Refused("Use `previous_response_id`.")] = None
