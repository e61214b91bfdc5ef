"""Reply types of Ollama's endpoints. OpenAPI is made from these."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle
from rekindle.api.openai.bodies import TokenLogprob

DoneReason = Literal["stop", "length", "load", "unload"]


class OllamaCalledFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCallBody(TypedDict):
    id: str
    function: OllamaCalledFunction


class OllamaReplyMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCallBody]]


class OllamaEnding(TypedDict, total=False):
    """What the last object of a reply adds. Durations are in nanoseconds."""

    done_reason: DoneReason
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    rekindle: Rekindle


class OllamaReply(OllamaEnding):
    model: str
    created_at: str
    done: bool
    logprobs: NotRequired[list[TokenLogprob]]


class OllamaChat(OllamaReply):
    """A whole reply, or one line of a streamed one."""

    message: OllamaReplyMessage


class OllamaGeneration(OllamaReply):
    """A whole reply, or one line of a streamed one."""

    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]  # token ids of the prompt and the reply, at the end


class OllamaEmbeddings(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """Of the older endpoint."""

    embedding: list[float]


class OllamaVersion(TypedDict):
    version: str  # of Ollama, whose API this is
    rekindle: str  # of this server


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModelList(TypedDict):
    models: list[OllamaListedModel]


class OllamaRunningModel(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    context_length: int


class OllamaRunningList(TypedDict):
    models: list[OllamaRunningModel]


class OllamaModel(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


class OllamaStatus(TypedDict):
    status: str
