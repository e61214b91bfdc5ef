"""OpenAI's embeddings endpoint: texts or token ids to vectors."""

import asyncio
from base64 import b64encode
from functools import partial

from fastapi import Request, Response
from pydantic_core import to_json

from rekindle.api.body import fault
from rekindle.api.http.context import RequestContext
from rekindle.api.openai.bodies import Embedding, EmbeddingList, EmbeddingUsage
from rekindle.api.openai.request import raw_inputs
from rekindle.api.openai.schema import EmbeddingsRequest
from rekindle.api.openapi import Routes
from rekindle.api.requests.embedding import (
    check_dimensions,
    check_inputs,
    embed,
    numbers,
    shortened,
)
from rekindle.chat.embeddings import EmbeddingInput, Embeddings


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
            check_dimensions(body.dimensions, served.responder, "dimensions")
            inputs = await self._bodies.work(request, partial(_inputs, body))
            made = await embed(request, served.responder, inputs)
        # In a thread: encoding thousands of vectors takes seconds.
        data = await asyncio.to_thread(_reply, made, body, served.card.id)
        return Response(data, media_type="application/json")


def _inputs(body: EmbeddingsRequest) -> list[EmbeddingInput]:
    if not body.input:
        raise fault("input", " must not be empty.")
    inputs = [EmbeddingInput(path, content) for path, content in raw_inputs("input", body.input)]
    check_inputs(inputs)
    return inputs


def _reply(made: Embeddings, body: EmbeddingsRequest, model: str) -> bytes:
    vectors = [shortened(vector, body.dimensions) for vector in made.vectors]
    is_base64 = body.encoding_format == "base64"
    return to_json(
        EmbeddingList(
            object="list",
            data=[
                Embedding(
                    object="embedding",
                    index=index,
                    embedding=b64encode(vector).decode() if is_base64 else numbers(vector),
                )
                for index, vector in enumerate(vectors)
            ],
            model=model,
            usage=EmbeddingUsage(prompt_tokens=made.n_tokens, total_tokens=made.n_tokens),
        )
    )
