"""Request types of the completion endpoints, with every field we know.

A field without a mark is honoured. `docs/wire-apis.md` has the same list, and a test compares
the two.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from rekindle.api.body import Ignored, Items, Refused, WireModel
from rekindle.api.cache_controls import OpenAiFields
from rekindle.api.content import ContentPart
from rekindle.api.requests.json_values import ArgumentsText, Int64, JsonObject
from rekindle.api.requests.limits import (
    MAX_CALLS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_OPTIONS,
    MAX_PARTS,
    MAX_TOOLS,
    Id,
    Stop,
)
from rekindle.api.requests.reasoning import ReasoningBudget
from rekindle.api.requests.sampling import SamplingFields

MAX_STOP_STRINGS = 16
MAX_REPLIES = 16
MAX_PROMPTS = 128  # picked; each is a separate engine request
MAX_TOP_LOGPROBS = 20

TokenIds = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(WireModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Ignored()] = None


class JsonSchemaFormat(WireModel):
    name: Annotated[str | None, Ignored()] = None
    description: Annotated[str | None, Ignored()] = None
    json_schema: JsonObject = Field(alias="schema")
    strict: Annotated[bool | None, Ignored()] = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    # llama-server's shorthand: {"type": "json_object", "schema": {...}}
    object_schema: JsonObject | None = Field(default=None, alias="schema")


class GenerationFields(OpenAiFields, SamplingFields):
    """Fields that both completion endpoints share."""

    max_tokens: Int64 | None = None
    n_predict: Int64 | None = None
    stop: (
        Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
    ) = None
    n: Annotated[int, Field(ge=1, le=MAX_REPLIES)] | None = None

    response_format: ResponseFormat | None = None

    stream_options: StreamOptions | None = None
    return_progress: bool | None = None

    timings_per_token: Annotated[bool | None, Ignored()] = None
    metadata: Annotated[JsonObject | None, Ignored()] = None
    store: Annotated[bool | None, Ignored()] = None
    service_tier: Annotated[str | None, Ignored()] = None
    safety_identifier: Annotated[str | None, Ignored()] = None


class FunctionCall(WireModel):
    name: str
    arguments: ArgumentsText | JsonObject | None = None


class ToolCallEntry(WireModel):
    id: Id = ""
    type: str = "function"
    function: FunctionCall | None = None


class ChatPart(ContentPart):
    image_url: Any = None
    video_url: Any = None
    audio_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[Items[ChatPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Annotated[Any, Ignored()] = None
    tool_calls: Annotated[Items[ToolCallEntry], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Id | None = None
    function_call: Annotated[Any, Refused("Use `tool_calls`.")] = None
    audio: dict[str, Any] | None = None


# A plain dict, because templates show all keys of a definition but `strict` to the model.
FunctionDefinition = Annotated[
    JsonObject,
    WithJsonSchema(
        {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean", "description": "Accepted without effect."},
            },
        }
    ),
]


class ToolEntry(WireModel):
    type: str = "function"
    function: FunctionDefinition | None = None


class FunctionName(WireModel):
    name: str


class ToolReference(WireModel):
    type: Literal["function"] = "function"
    function: FunctionName | None = None
    name: str | None = None  # as in the Responses API, without `function`


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolReference], Field(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceEntry(WireModel):
    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None


class ChatReasoning(WireModel):
    """OpenRouter's."""

    max_tokens: ReasoningBudget | None = None
    effort: Id | None = None
    enabled: bool | None = None
    exclude: Annotated[bool | None, Ignored()] = None


class ChatCompletionRequest(GenerationFields):
    messages: Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int64 | None = None

    tools: Annotated[Items[ToolEntry], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceEntry | None = None
    parallel_tool_calls: bool | None = None
    overflow: Literal["error", "trim"] | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Id | None = None
    reasoning: ChatReasoning | None = None
    reasoning_budget: ReasoningBudget | None = None
    reasoning_budget_tokens: ReasoningBudget | None = None
    thinking_budget_tokens: ReasoningBudget | None = None
    documents: Annotated[Items[JsonObject], Field(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    modalities: Annotated[list[str], Field(fail_fast=True, max_length=MAX_OPTIONS)] | None = None
    verbosity: Annotated[str | None, Ignored()] = None
    functions: Annotated[Any, Refused("Use `tools`.")] = None
    function_call: Annotated[Any, Refused("Use `tool_choice`.")] = None
    audio: Annotated[Any, Refused()] = None
    prediction: Annotated[Any, Refused()] = None
    web_search_options: Annotated[Any, Refused()] = None
    moderation: Annotated[Any, Refused()] = None


class CompletionRequest(GenerationFields):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Int64 | None = None
    suffix: str | None = None


class EmbeddingsRequest(WireModel):
    model: Id | None = None
    input: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Int64, Field(ge=1)] | None = None
    user: Annotated[str | None, Ignored()] = None
