"""Reply types of Gemini's API. OpenAPI is made from these."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rekindle.api.cache.bodies import Rekindle

GeminiFinish = Literal["STOP", "MAX_TOKENS"]


class CalledGeminiFunction(TypedDict):
    id: str
    name: str
    args: dict[str, Any]


class ReplyPartBody(TypedDict):
    """Text, a thought, or a call."""

    text: NotRequired[str]
    thought: NotRequired[Literal[True]]
    functionCall: NotRequired[CalledGeminiFunction]


class ReplyContent(TypedDict):
    parts: list[ReplyPartBody]
    role: Literal["model"]


class LogprobsCandidate(TypedDict):
    token: str
    tokenId: int
    logProbability: float


class TopCandidates(TypedDict):
    candidates: list[LogprobsCandidate]


class LogprobsResult(TypedDict):
    topCandidates: list[TopCandidates]
    chosenCandidates: list[LogprobsCandidate]


class ReplyCandidate(TypedDict):
    content: ReplyContent
    finishReason: NotRequired[GeminiFinish]  # of a whole reply, and of its last chunk
    index: int
    avgLogprobs: NotRequired[float]  # of a whole reply
    logprobsResult: NotRequired[LogprobsResult]


class UsageMetadata(TypedDict):
    """`totalTokenCount` is the sum of prompt, candidates and thoughts."""

    promptTokenCount: int
    cachedContentTokenCount: int
    candidatesTokenCount: int
    thoughtsTokenCount: NotRequired[int]
    totalTokenCount: int


class GenerateContentBody(TypedDict):
    """A whole reply, or a chunk of a stream. The last chunk has the usage."""

    candidates: list[ReplyCandidate]
    modelVersion: str
    responseId: str
    usageMetadata: NotRequired[UsageMetadata]
    rekindle: NotRequired[Rekindle]


class TotalTokens(TypedDict):
    totalTokens: int


class GeminiModelBody(TypedDict):
    name: str
    baseModelId: str
    version: str
    displayName: str
    description: str
    supportedGenerationMethods: list[str]
    inputTokenLimit: NotRequired[int]  # of loaded models
    outputTokenLimit: NotRequired[int]


class GeminiModelList(TypedDict):
    models: list[GeminiModelBody]


class ContentEmbedding(TypedDict):
    values: list[float]


class EmbedContentBody(TypedDict):
    embedding: ContentEmbedding


class BatchEmbedContentsBody(TypedDict):
    embeddings: list[ContentEmbedding]


class CachedUsage(TypedDict):
    totalTokenCount: int


class CachedContentBody(TypedDict):
    name: str
    model: str
    displayName: NotRequired[str]
    createTime: str
    updateTime: str
    expireTime: str
    usageMetadata: CachedUsage


class CachedContentList(TypedDict):
    cachedContents: list[CachedContentBody]
    nextPageToken: NotRequired[str]  # for `pageToken`, if there are more


class Empty(TypedDict):
    """Nothing: what Google returns for a deletion."""
