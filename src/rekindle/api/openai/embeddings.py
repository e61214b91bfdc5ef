"""OpenAI's embeddings endpoint: texts or token ids to vectors."""

import asyncio
import secrets
from base64 import b64encode
from functools import partial

import numpy as np
from fastapi import Request, Response
from pydantic_core import to_json

from rekindle.api.body import fault
from rekindle.api.http.context import RequestContext
from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.api.openai.bodies import Embedding, EmbeddingList, EmbeddingUsage
from rekindle.api.openai.request import raw_inputs
from rekindle.api.openai.schema import EmbeddingsRequest
from rekindle.api.openapi import Routes
from rekindle.chat.embeddings import EmbeddingInput, Embeddings
from rekindle.chat.responder import Responder
from rekindle.errors import InvalidRequest

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingsApi:
    def __init__(self, context: RequestContext) -> None:
        self._models = context.models
        self._bodies = context.bodies

    def add_routes(self, routes: Routes, prefix: str) -> None:
        path, taken = f"{prefix}/embeddings", [EmbeddingsRequest]
        routes.add("POST", path, self.embeddings, takes=taken, gives=EmbeddingList)

    async def embeddings(self, request: Request) -> Response:
        body = await self._bodies.read(request, EmbeddingsRequest)
        with await self._models.lease(body.model) as served:
            _check_dimensions(body.dimensions, served.responder)
            # Clients choose request ids and may repeat one; the engine's must be unique.
            name = f"{request.scope['request_id']}.{secrets.token_hex(3)}"
            inputs = await self._bodies.work(request, partial(_inputs, body))
            work = served.responder.embed(inputs, request_id=name)
            made = await unless_client_leaves(request.receive, work)
        # In a thread: encoding thousands of vectors takes seconds.
        data = await asyncio.to_thread(_reply, made, body, served.card.id)
        return Response(data, media_type="application/json")


def _check_dimensions(dimensions: int | None, responder: Responder) -> None:
    status = responder.status().embedder
    if dimensions and status and dimensions > status.n_dimensions:
        raise InvalidRequest(
            f"`dimensions` is {dimensions}, but the embeddings of this model have"
            f" {status.n_dimensions}.",
            "dimensions",
        )


def _inputs(body: EmbeddingsRequest) -> list[EmbeddingInput]:
    if not body.input:
        raise fault("input", " must not be empty.")
    inputs = raw_inputs("input", body.input)
    if len(inputs) > MAX_INPUTS:
        message = f"`input` has {len(inputs)} items, but at most {MAX_INPUTS} are allowed."
        raise InvalidRequest(message, "input")
    return [EmbeddingInput(path, content) for path, content in inputs]


def _reply(made: Embeddings, body: EmbeddingsRequest, model: str) -> bytes:
    vectors = made.vectors
    if body.dimensions is not None:
        vectors = tuple(_shortened(vector, body.dimensions) for vector in vectors)
    is_base64 = body.encoding_format == "base64"
    return to_json(
        EmbeddingList(
            object="list",
            data=[
                Embedding(
                    object="embedding",
                    index=index,
                    embedding=b64encode(vector).decode() if is_base64 else _numbers(vector),
                )
                for index, vector in enumerate(vectors)
            ],
            model=model,
            usage=EmbeddingUsage(prompt_tokens=made.n_tokens, total_tokens=made.n_tokens),
        )
    )


def _shortened(vector: bytes, n_dimensions: int) -> bytes:
    """Keep the first dimensions, scaled to length 1."""
    kept = np.frombuffer(vector, "<f4")[:n_dimensions].astype(np.float64)
    return (kept / (np.linalg.norm(kept) or 1.0)).astype("<f4").tobytes()


def _numbers(vector: bytes) -> list[float]:
    numbers: list[float] = np.frombuffer(vector, "<f4").tolist()
    return numbers
