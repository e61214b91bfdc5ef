"""Reply types of the Responses endpoints. OpenAPI is made from these."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle
from rekindle.api.openai.bodies import PromptTokensDetails, Timings, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class ReasoningBody(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]  # always empty: there are no summaries
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class _Call(TypedDict):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]


class FunctionCallBody(_Call):
    type: Literal["function_call"]
    arguments: str


class CustomCallBody(_Call):
    type: Literal["custom_tool_call"]
    input: str


CallBody = FunctionCallBody | CustomCallBody
OutputItem = OutputMessage | ReasoningBody | FunctionCallBody | CustomCallBody


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(TypedDict):
    effort: str | None
    summary: str | None


class CacheMissDiagnostics(TypedDict):
    type: Literal["cache_miss"]
    reason: Literal["model_changed", "tools_changed", "input_changed"]
    cache_missed_tokens: int


class OtherDiagnostics(TypedDict):
    type: Literal["cache_hit", "comparison_response_not_found", "unavailable"]


class ResponseBody(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    # Only if the request names a response to compare with.
    prompt_cache_diagnostics: NotRequired[CacheMissDiagnostics | OtherDiagnostics]
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, Any]
    timings: NotRequired[Timings]
    rekindle: NotRequired[Rekindle]


class ResponseEvent(TypedDict):
    """An event of a stream. Its other fields depend on its type."""

    type: str
    sequence_number: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
