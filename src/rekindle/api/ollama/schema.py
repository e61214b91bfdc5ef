"""Request types of Ollama's endpoints, with every field and option we know.

A field without a mark is honoured. `docs/wire-apis.md` has the same list, and a test compares
the two.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from rekindle.api.body import Ignored, Items, Refused, WireModel
from rekindle.api.cache_controls import CommonFields
from rekindle.api.openai.schema import (
    MAX_STOP_STRINGS,
    MAX_TOP_LOGPROBS,
    TokenIds,
    ToolEntry,
)
from rekindle.api.requests.json_values import ArgumentsText, Int64, JsonObject, Whole
from rekindle.api.requests.limits import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Id,
    Penalty,
    Share,
    Stop,
)

MAX_DURATION_CHARS = 64  # picked


Images = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PARTS)]
KeepAlive = float | Annotated[str, Field(max_length=MAX_DURATION_CHARS)]


class OllamaOptions(WireModel):
    num_predict: Whole[Int64] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[Whole[Int64], Field(ge=-1)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    repeat_last_n: Annotated[Whole[Int64], Field(ge=-1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Whole[Int64] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: Whole[Int64] | None = None
    stop: (
        Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None
    ) = None
    draft_num_predict: Whole[Int64] | None = None

    num_ctx: Annotated[Any, Ignored()] = None
    num_keep: Annotated[Any, Ignored()] = None
    num_batch: Annotated[Any, Ignored()] = None
    num_gpu: Annotated[Any, Ignored()] = None
    num_thread: Annotated[Any, Ignored()] = None
    main_gpu: Annotated[Any, Ignored()] = None
    numa: Annotated[Any, Ignored()] = None
    low_vram: Annotated[Any, Ignored()] = None
    f16_kv: Annotated[Any, Ignored()] = None
    logits_all: Annotated[Any, Ignored()] = None
    vocab_only: Annotated[Any, Ignored()] = None
    embedding_only: Annotated[Any, Ignored()] = None
    use_mmap: Annotated[Any, Ignored()] = None
    use_mlock: Annotated[Any, Ignored()] = None
    penalize_newline: Annotated[Any, Ignored()] = None
    tfs_z: Annotated[Any, Ignored()] = None


class OllamaFields(CommonFields):
    """Fields that chat and generate share."""

    options: OllamaOptions | None = None
    format: Literal["", "json"] | JsonObject | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    truncate: bool | None = None
    shift: Annotated[bool | None, Ignored()] = None

    @property
    def speculates(self) -> bool:
        is_off = self.options is not None and self.options.draft_num_predict == 0
        return super().speculates and not (is_off and self.speculative is None)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to reply to: the model is only loaded or unloaded."""
        raise NotImplementedError


class OllamaFunction(WireModel):
    name: str
    arguments: JsonObject | ArgumentsText | None = None
    index: Annotated[Any, Ignored()] = None


class OllamaCall(WireModel):
    id: Id = ""
    type: Annotated[str | None, Ignored()] = None
    function: OllamaFunction


class OllamaMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[Items[OllamaCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: Id | None = None


class OllamaChatRequest(OllamaFields):
    messages: Annotated[Items[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Items[ToolEntry], Field(max_length=MAX_TOOLS)] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaFields):
    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    raw: bool | None = None
    context: TokenIds | None = None
    suffix: str | None = None

    template: Annotated[
        Any, Refused("The model's own is used. Send a finished prompt with `raw`.")
    ] = None
    width: Annotated[Any, Ignored()] = None
    height: Annotated[Any, Ignored()] = None
    steps: Annotated[Any, Ignored()] = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.images and not self.fills_in

    @property
    def fills_in(self) -> bool:
        """Whether the reply is the text between `prompt` and `suffix`. A raw prompt has none."""
        return bool(self.suffix) and not self.raw


class OllamaEmbedRequest(WireModel):
    model: Id | None = None
    input: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[Whole[Int64], Field(ge=1)] | None = None
    keep_alive: KeepAlive | None = None
    options: Annotated[Any, Ignored()] = None


class OllamaEmbeddingsRequest(WireModel):
    model: Id | None = None
    prompt: str | None = None
    keep_alive: KeepAlive | None = None
    options: Annotated[Any, Ignored()] = None


class OllamaShowRequest(WireModel):
    model: Id | None = None
    name: Id | None = None
    verbose: Annotated[bool | None, Ignored()] = None
    system: Annotated[Any, Ignored()] = None
    template: Annotated[Any, Ignored()] = None
    options: Annotated[Any, Ignored()] = None
