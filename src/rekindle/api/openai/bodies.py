"""Reply types of the OpenAI endpoints. OpenAPI is made from these."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int  # computed and kept


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(TypedDict):
    """llama-server's timings, which local clients read."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: NotRequired[int]  # absent: nothing was drafted
    draft_n_accepted: NotRequired[int]


class PromptProgress(TypedDict):
    total: int
    cache: int
    processed: int
    time_ms: int


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCallBody(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None  # null: only tool calls
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish


class _Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _Chunk(_Head):
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    rekindle: NotRequired[Rekindle]
    prompt_progress: NotRequired[PromptProgress]


class ChatCompletion(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    rekindle: Rekindle


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A piece of a call. The first has id, type and name; the others have arguments only."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None  # null in all but the last chunk of a stream


class Completion(_Chunk):
    """A whole reply or a chunk of one. OpenAI gives both the same shape."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelMeta(TypedDict):
    vocab_type: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_params: int
    size: int


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # or base64 of little-endian float32


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
