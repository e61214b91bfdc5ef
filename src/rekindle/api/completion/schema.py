"""Request types of llama-server's own completion endpoints, with every field we know.

A field without a mark is honoured. `docs/wire-apis.md` has the same list, and a test compares
the two.
"""

from typing import Annotated, Any

from pydantic import Field

from rekindle.api.body import Ignored, Items, Refused, WireModel
from rekindle.api.cache_controls import CommonFields
from rekindle.api.openai.schema import MAX_REPLIES, MAX_STOP_STRINGS
from rekindle.api.requests.json_values import Int64
from rekindle.api.requests.limits import MAX_OPTIONS, MAX_PARTS, Id, Stop
from rekindle.api.requests.sampling import MAX_N_PROBS, Count, SamplingFields

NReplies = Annotated[int, Field(ge=1, le=MAX_REPLIES)]
Milliseconds = Annotated[Int64, Field(ge=-1)]
# Texts and token ids in one list.
MixedList = Annotated[list[int | str], Field(fail_fast=True, min_length=1)]


class NativeFields(CommonFields, SamplingFields):
    """Fields that both endpoints share."""

    n_predict: Int64 | None = None
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    stop: (
        Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
    ) = None
    n_indent: Count | None = None
    t_max_predict_ms: Milliseconds | None = None
    n_cmpl: NReplies | None = None
    n: NReplies | None = None
    logprobs: Annotated[Int64, Field(ge=0, le=MAX_N_PROBS)] | None = None

    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[Id], Field(fail_fast=True, max_length=MAX_OPTIONS)] | None = (
        None
    )

    t_max_prompt_ms: Annotated[Int64 | None, Ignored()] = None  # llama-server ignores it too
    n_keep: Annotated[Int64 | None, Ignored()] = None  # the context is never shifted
    n_discard: Annotated[Int64 | None, Ignored()] = None
    n_cache_reuse: Annotated[Int64 | None, Ignored()] = None
    sse_ping_interval: Annotated[Int64 | None, Ignored()] = None
    preserved_tokens: Annotated[Any, Ignored()] = None
    verbose: Annotated[bool | None, Ignored()] = None


class PromptObject(WireModel):
    prompt_string: str | MixedList
    multimodal_data: Annotated[Any, Refused("The models of this server read text.")] = None


class NativeRequest(NativeFields):
    prompt: (
        str
        | PromptObject
        | Annotated[list[int | str | MixedList | PromptObject], Field(fail_fast=True, min_length=1)]
    )


class InfillChunk(WireModel):
    text: str
    filename: str = "tmp"


class InfillRequest(NativeFields):
    input_prefix: str | MixedList
    input_suffix: str | MixedList
    input_extra: Annotated[Items[InfillChunk], Field(max_length=MAX_PARTS)] | None = None
    prompt: str | None = None
