"""llama-server's own endpoints for vectors and scores: `/embedding` and `/rerank`."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request, Response
from pydantic_core import to_json

from rekindle.api.body import fault
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.api.json import json_response
from rekindle.api.native.vector_schema import (
    NativeEmbedding,
    NativeEmbeddingRequest,
    NativeEmbeddings,
    RankedDocument,
    RankedText,
    Reranking,
    RerankReply,
    RerankRequest,
)
from rekindle.api.openai.bodies import EmbeddingUsage
from rekindle.api.openai.request import raw_inputs
from rekindle.api.openapi import Routes
from rekindle.api.requests.embedding import check_inputs, embed, unique_id
from rekindle.chat.embeddings import EmbeddingInput
from rekindle.chat.rerank import Ranking
from rekindle.errors import InvalidRequest

RERANK_PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
EUCLIDEAN = 2
MAX_ABSOLUTE = 32760.0  # llama.cpp's, for the norm 0: numbers that fit into 16 bits


class VectorsApi:
    def __init__(self, context: RequestContext) -> None:
        self._models = context.models
        self._bodies = context.bodies

    def add_routes(self, routes: Routes) -> None:
        taken = [NativeEmbeddingRequest]
        routes.add("POST", "/embedding", self.embed, takes=taken, gives=NativeEmbeddings)
        for path in RERANK_PATHS:
            routes.add("POST", path, self.rerank, takes=[RerankRequest], gives=RerankReply)

    async def embed(self, request: Request) -> Response:
        body = await self._bodies.read(request, NativeEmbeddingRequest)
        inputs = await self._bodies.work(request, partial(_inputs, body))
        with await self._models.lease(body.model) as served:
            made = await embed(request, served.responder, inputs)
        norm = EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
        data = await asyncio.to_thread(_embeddings, made.vectors, norm)
        return Response(data, media_type="application/json")

    async def rerank(self, request: Request) -> Response:
        body = await self._bodies.read(request, RerankRequest)
        field, documents = _documents(body)
        with await self._models.lease(body.model) as served:
            work = served.responder.rank(
                body.query, documents, field=field, request_id=unique_id(request)
            )
            ranking = await unless_client_leaves(request.receive, work)
        return json_response(_reply(body, ranking, documents, model=served.card.id))


def _inputs(body: NativeEmbeddingRequest) -> list[EmbeddingInput]:
    name = "input" if body.input is not None else "content"
    value = body.input if body.input is not None else body.content
    if value is None:
        raise InvalidRequest("`input` or `content` must be provided.", "content")
    if not value:
        raise fault(name, " must not be empty.")
    inputs = [EmbeddingInput(path, content) for path, content in raw_inputs(name, value)]
    check_inputs(inputs, name)
    return inputs


def _documents(body: RerankRequest) -> tuple[str, Sequence[str]]:
    name = "documents" if body.documents is not None or body.texts is None else "texts"
    documents = body.texts if name == "texts" else body.documents
    if not documents:
        raise fault(name, " should be a list of texts that is not empty.")
    check_inputs(documents, name)
    return name, documents


def _embeddings(vectors: Sequence[bytes], norm: int) -> bytes:
    return to_json(
        [
            NativeEmbedding(index=index, embedding=[_normalised(vector, norm)])
            for index, vector in enumerate(vectors)
        ]
    )


def _normalised(data: bytes, norm: int) -> list[float]:
    """Scale a vector of length 1 so that llama.cpp's norm of that number is 1."""
    vector: Any = np.frombuffer(data, "<f4").astype(np.float64)
    sizes = np.abs(vector)
    if norm == 0:
        vector = vector * (MAX_ABSOLUTE / sizes.max())
    elif norm != EUCLIDEAN:
        most = sizes.max()
        vector = vector / (most * ((sizes / most) ** norm).sum() ** (1 / norm))
    numbers: list[float] = vector.astype("<f4").tolist()
    return numbers


def _reply(
    body: RerankRequest, ranking: Ranking, documents: Sequence[str], *, model: str
) -> Reranking | list[RankedText]:
    """Return the best documents first, in TEI's shape if the request has `texts`, else Jina's."""
    ranked = sorted(enumerate(ranking.scores), key=lambda each: -each[1])
    best = ranked if body.top_n is None else ranked[: max(body.top_n, 0)]
    if body.texts is not None:
        entries = [RankedText(index=index, score=score) for index, score in best]
        if body.return_text:
            for entry in entries:
                entry["text"] = documents[entry["index"]]
        return entries
    usage = EmbeddingUsage(prompt_tokens=ranking.n_tokens, total_tokens=ranking.n_tokens)
    results = [RankedDocument(index=index, relevance_score=score) for index, score in best]
    return Reranking(model=model, object="list", usage=usage, results=results)
