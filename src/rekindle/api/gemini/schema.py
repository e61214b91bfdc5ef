"""Request types of Gemini's API, with every field we know.

A field without a mark is honoured. `docs/wire-apis.md` has the same list, and a test compares
the two. Protobuf's JSON has two spellings of each field, `topK` and `top_k`: both are read.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rekindle.api.body import Ignored, Items, WireModel
from rekindle.api.cache_controls import CacheSalt, CommonFields
from rekindle.api.requests.json_values import Int64, JsonObject, Whole
from rekindle.api.requests.limits import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Id,
    Penalty,
    Share,
    Stop,
)
from rekindle.api.requests.reasoning import ReasoningBudget

MAX_CANDIDATES = 16  # as `n` of chat completions
MAX_STOP_SEQUENCES = 16  # picked; Gemini allows 5
MAX_TOP_LOGPROBS = 20

T = TypeVar("T")


def _listed(value: object) -> object:
    """One object stands for a list of one, as in Google's examples."""
    return [value] if isinstance(value, dict) else value


Listed = Annotated[Items[T], BeforeValidator(_listed)]
Ttl = Annotated[str, Field(pattern=r"^[0-9]{1,10}(\.[0-9]{1,9})?s$")]


class GeminiModel(WireModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )


class InlineData(GeminiModel):
    mime_type: str | None = None
    data: str | None = None
    display_name: str | None = None


class FileData(GeminiModel):
    mime_type: str | None = None
    file_uri: str | None = None
    display_name: str | None = None


class FunctionCall(GeminiModel):
    id: Id | None = None
    name: str
    args: JsonObject | None = None


class ResponsePart(GeminiModel):
    """Media of a function's response."""

    inline_data: InlineData | None = None
    file_data: FileData | None = None


class FunctionResponse(GeminiModel):
    id: Id | None = None
    name: str
    response: JsonObject | None = None
    parts: Annotated[Listed[ResponsePart], Field(max_length=MAX_PARTS)] | None = None
    will_continue: Annotated[bool | None, Ignored()] = None
    scheduling: Annotated[str | None, Ignored()] = None


class ExecutableCode(GeminiModel):
    code: str = ""
    language: Annotated[str | None, Ignored()] = None
    id: Annotated[Id | None, Ignored()] = None


class CodeExecutionResult(GeminiModel):
    output: str = ""
    outcome: Annotated[str | None, Ignored()] = None
    id: Annotated[Id | None, Ignored()] = None


class GeminiPart(GeminiModel):
    text: str | None = None
    thought: bool | None = None
    thought_signature: Annotated[str | None, Ignored()] = None
    inline_data: InlineData | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None
    video_metadata: Annotated[Any, Ignored()] = None
    media_resolution: Annotated[Any, Ignored()] = None
    part_metadata: Annotated[Any, Ignored()] = None


class GeminiContent(GeminiModel):
    role: Literal["user", "model", "function", "tool", "system"] | None = None
    parts: Annotated[Listed[GeminiPart], Field(max_length=MAX_PARTS)] | None = None


class InstructionPart(GeminiModel):
    text: str = ""


class SystemInstruction(GeminiModel):
    parts: Annotated[Listed[InstructionPart], Field(max_length=MAX_PARTS)] | None = None
    role: Annotated[str | None, Ignored()] = None


Contents = Annotated[Listed[GeminiContent], Field(max_length=MAX_MESSAGES)]


class FunctionDeclaration(GeminiModel):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    parameters_json_schema: JsonObject | None = None
    response: Annotated[Any, Ignored()] = None
    response_json_schema: Annotated[Any, Ignored()] = None
    behavior: Annotated[str | None, Ignored()] = None


class GeminiTool(GeminiModel):
    """Functions of the client. The other tools run on Google's servers."""

    function_declarations: (
        Annotated[Listed[FunctionDeclaration], Field(max_length=MAX_TOOLS)] | None
    ) = None
    google_search: Annotated[Any, Ignored()] = None
    google_search_retrieval: Annotated[Any, Ignored()] = None
    google_maps: Annotated[Any, Ignored()] = None
    code_execution: Annotated[Any, Ignored()] = None
    url_context: Annotated[Any, Ignored()] = None
    file_search: Annotated[Any, Ignored()] = None
    computer_use: Annotated[Any, Ignored()] = None
    mcp_servers: Annotated[Any, Ignored()] = None


class FunctionCallingConfig(GeminiModel):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: (
        Annotated[list[str], Field(fail_fast=True, max_length=MAX_TOOLS)] | None
    ) = None
    stream_function_call_arguments: Annotated[bool | None, Ignored()] = None


class ToolConfig(GeminiModel):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: Annotated[Any, Ignored()] = None
    include_server_side_tool_invocations: Annotated[bool | None, Ignored()] = None


class GeminiThinking(GeminiModel):
    thinking_budget: Whole[ReasoningBudget] | None = None
    thinking_level: Id | None = None
    include_thoughts: bool | None = None


class GenerationConfig(GeminiModel):
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Whole[Annotated[Int64, Field(ge=-1)]] | None = None
    candidate_count: Whole[Annotated[int, Field(ge=1, le=MAX_CANDIDATES)]] | None = None
    max_output_tokens: Whole[Annotated[Int64, Field(ge=0)]] | None = None
    stop_sequences: (
        Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    seed: Whole[Int64] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_mime_type: Literal["", "text/plain", "application/json", "text/x.enum"] | None = None
    response_schema: JsonObject | None = None
    response_json_schema: JsonObject | None = None
    response_logprobs: bool | None = None
    logprobs: Whole[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]] | None = None
    thinking_config: GeminiThinking | None = None
    response_modalities: Annotated[list[str], Field(fail_fast=True, max_length=8)] | None = None
    speech_config: Annotated[Any, Ignored()] = None
    image_config: Annotated[Any, Ignored()] = None
    media_resolution: Annotated[Any, Ignored()] = None


class PromptFields(GeminiModel):
    """The fields that make a prompt."""

    contents: Contents | None = None
    system_instruction: SystemInstruction | None = None
    tools: Annotated[Listed[GeminiTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_config: ToolConfig | None = None


class CountedRequest(PromptFields):
    """The request whose tokens are counted."""

    model: Id | None = None
    generation_config: GenerationConfig | None = None
    cached_content: Id | None = None
    cache_salt: CacheSalt | None = None


class GenerateContentRequest(CountedRequest, CommonFields):
    overflow: Literal["error", "trim"] | None = None  # ours, as in chat completions
    stream: Annotated[bool | None, Ignored()] = None  # the path decides
    safety_settings: Annotated[Any, Ignored()] = None
    labels: Annotated[Any, Ignored()] = None
    store: Annotated[Any, Ignored()] = None
    service_tier: Annotated[Any, Ignored()] = None

    @property
    def config(self) -> GenerationConfig:
        return self.generation_config or GenerationConfig()


class CountContentRequest(CountedRequest):
    generate_content_request: CountedRequest | None = None


class CachedContentRequest(PromptFields, CommonFields):
    """A prompt to compute and keep under a name."""

    display_name: Id | None = None
    ttl: Ttl | None = None
    expire_time: Id | None = None
    stream: Annotated[bool | None, Ignored()] = None
    cache_key: Annotated[str | None, Ignored()] = None  # the name of the content
    name: Annotated[Any, Ignored()] = None  # the server chooses it

    @property
    def primes(self) -> bool:
        return True


class CachedContentUpdate(GeminiModel):
    ttl: Ttl | None = None
    expire_time: Id | None = None
    cache_salt: CacheSalt | None = None


class EmbedContentRequest(GeminiModel):
    model: Id | None = None
    content: GeminiContent
    output_dimensionality: Whole[Annotated[Int64, Field(ge=1)]] | None = None
    task_type: Annotated[Any, Ignored()] = None
    title: Annotated[Any, Ignored()] = None


class BatchEmbedContentsRequest(GeminiModel):
    requests: Annotated[Listed[EmbedContentRequest], Field(min_length=1, max_length=2048)]
