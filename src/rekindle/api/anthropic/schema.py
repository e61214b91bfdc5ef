"""Request types of the Messages endpoints, with every field we know.

A field without a mark is honoured. `docs/wire-apis.md` has the same list, and a test compares
the two.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from rekindle.api.body import Ignored, Items, WireModel
from rekindle.api.cache_controls import CommonFields
from rekindle.api.http.caller import session_in_user_id
from rekindle.api.requests.json_values import Int64, JsonObject
from rekindle.api.requests.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Id, Share, Stop
from rekindle.config.declare import INT32_MAX

MAX_STOP_SEQUENCES = 64  # picked; every piece of a reply is searched for each


class CacheControl(WireModel):
    """A breakpoint. The cache pins the prompt up to it, and `usage` is divided there."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ResultBlock(WireModel):
    """Content of a tool result."""

    type: str
    text: str | None = None
    tool_name: str | None = None  # of a `tool_reference`
    source: Any = None  # of an `image` or a `document`
    title: Any = None
    context: Any = None
    citations: Annotated[Any, Ignored()] = None
    cache_control: CacheControl | None = None


class ContentBlock(WireModel):
    type: str
    text: str | None = None
    citations: Annotated[Any, Ignored()] = None

    source: Any = None  # of an `image` or a `document`
    title: Any = None
    context: Any = None
    file_id: Any = None  # of a `container_upload`

    thinking: str | None = None
    signature: Annotated[str | None, Ignored()] = None
    data: Annotated[str | None, Ignored()] = None  # of `redacted_thinking`

    id: Id = ""
    name: str | None = None
    input: JsonObject | None = None
    caller: Annotated[Any, Ignored()] = None

    tool_use_id: Id | None = None
    content: str | Annotated[Items[ResultBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None

    cache_control: CacheControl | None = None


class MessageEntry(WireModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[ContentBlock], Field(max_length=MAX_PARTS)]


class SystemBlock(WireModel):
    type: Literal["text"]
    text: str
    citations: Annotated[Any, Ignored()] = None
    cache_control: CacheControl | None = None


class MessagesTool(WireModel):
    """Anthropic's own tools have a `type` and no schema; all others are `custom`."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None
    strict: Annotated[bool | None, Ignored()] = None
    input_examples: Annotated[Any, Ignored()] = None
    allowed_callers: Annotated[Any, Ignored()] = None
    eager_input_streaming: Annotated[bool | None, Ignored()] = None


class MessagesToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(WireModel):
    type: str
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    display: Annotated[str | None, Ignored()] = None


class MessagesFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonObject = Field(alias="schema")


class OutputConfig(WireModel):
    effort: Id | None = None
    format: MessagesFormat | None = None


class MessagesMetadata(WireModel):
    user_id: Id | None = None


class DiagnosticsRequest(WireModel):
    previous_message_id: Id | None = None


class CountTokensRequest(WireModel):
    """The fields that make a prompt."""

    model: Id | None = None
    messages: Annotated[Items[MessageEntry], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[Items[SystemBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[Items[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: MessagesFormat | None = None
    cache_control: CacheControl | None = None

    betas: Annotated[Any, Ignored()] = None
    context_management: Annotated[Any, Ignored()] = None
    mcp_servers: Annotated[Any, Ignored()] = None


class MessagesRequest(CountTokensRequest, CommonFields):
    max_tokens: Annotated[Int64, Field(ge=0)]
    stop_sequences: (
        Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    overflow: Literal["error", "trim"] | None = None  # ours, as in chat completions
    metadata: MessagesMetadata | None = None
    diagnostics: DiagnosticsRequest | None = None

    service_tier: Annotated[str | None, Ignored()] = None
    container: Annotated[Any, Ignored()] = None

    @property
    def session_names(self) -> tuple[str | None, ...]:
        return (session_in_user_id(self.metadata.user_id if self.metadata else None),)
