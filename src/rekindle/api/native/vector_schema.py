"""Request and reply types of `/embedding` and `/rerank`."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field, RootModel
from typing_extensions import TypedDict

from rekindle.api.body import Ignored, WireModel
from rekindle.api.openai.bodies import EmbeddingUsage
from rekindle.api.openai.schema import TokenIds
from rekindle.api.requests.json_values import Int64
from rekindle.api.requests.limits import Id

MAX_NORM = 64  # of `embd_normalize`; picked

Texts = Annotated[list[str], Field(fail_fast=True)]
Inputs = str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


class NativeEmbeddingRequest(WireModel):
    model: Id | None = None
    content: Inputs | None = None
    input: Inputs | None = None
    # llama-server's -1, no norm, is missing: vectors have length 1 before they are scaled.
    embd_normalize: Annotated[int, Field(ge=0, le=MAX_NORM)] | None = None


class NativeEmbedding(TypedDict):
    index: int
    embedding: list[list[float]]  # one vector


class NativeEmbeddings(RootModel[list[NativeEmbedding]]):
    """The vectors of all inputs."""


class RerankRequest(WireModel):
    model: Id | None = None
    query: str
    documents: Texts | None = None
    texts: Texts | None = None
    top_n: Int64 | None = None
    return_text: bool | None = None
    return_documents: Annotated[bool | None, Ignored()] = None


class RankedDocument(TypedDict):
    index: int
    relevance_score: float


class Reranking(TypedDict):
    """Jina's shape."""

    model: str
    object: Literal["list"]
    usage: EmbeddingUsage
    results: list[RankedDocument]


class RankedText(TypedDict):
    """TEI's shape."""

    index: int
    score: float
    text: NotRequired[str]


class RerankReply(RootModel[Reranking | list[RankedText]]):
    """A list if the request has `texts`."""
