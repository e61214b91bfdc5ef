"""Ollama's two embeddings endpoints: the newer one for several texts, the older one for one."""

import asyncio
import time
from collections.abc import Sequence

from fastapi import Request, Response
from pydantic_core import to_json

from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import OllamaErrorBody
from rekindle.api.ollama.bodies import OllamaEmbedding, OllamaEmbeddings
from rekindle.api.ollama.keep_alive import Keeper
from rekindle.api.ollama.response import nanoseconds
from rekindle.api.ollama.schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from rekindle.api.openapi import Routes
from rekindle.api.requests.embedding import (
    check_dimensions,
    check_inputs,
    embed,
    numbers,
    shortened,
)
from rekindle.chat.embeddings import EmbeddingInput, Embeddings
from rekindle.chat.responder import Responder

NOTHING = Embeddings((), 0)


class OllamaEmbeddingsApi:
    def __init__(self, context: RequestContext, keeper: Keeper) -> None:
        self._models = context.models
        self._bodies = context.bodies
        self._keeper = keeper

    def add_routes(self, routes: Routes) -> None:
        error = OllamaErrorBody
        taken, given = [OllamaEmbedRequest], OllamaEmbeddings
        routes.add("POST", "/api/embed", self.embed, takes=taken, gives=given, error=error)
        routes.add(
            "POST",
            "/api/embeddings",
            self.embed_one,
            takes=[OllamaEmbeddingsRequest],
            gives=OllamaEmbedding,
            error=error,
        )

    async def embed(self, request: Request) -> Response:
        body = await self._bodies.read(request, OllamaEmbedRequest)
        inputs = _inputs(body.input)
        check_inputs(inputs)
        began = time.monotonic()
        with await self._models.lease(body.model) as served:
            load_seconds = time.monotonic() - began
            self._keeper.keep(request, body.model, body.keep_alive)
            check_dimensions(body.dimensions, served.responder, "dimensions")
            truncates = body.truncate is not False
            made = await _make(request, served.responder, inputs, truncates=truncates)
        total_seconds = time.monotonic() - began

        def reply() -> bytes:
            vectors = [shortened(vector, body.dimensions) for vector in made.vectors]
            return to_json(
                OllamaEmbeddings(
                    model=served.card.id,
                    embeddings=[numbers(vector) for vector in vectors],
                    total_duration=nanoseconds(total_seconds),
                    load_duration=nanoseconds(load_seconds),
                    prompt_eval_count=made.n_tokens,
                )
            )

        # In a thread: encoding thousands of vectors takes seconds.
        return Response(await asyncio.to_thread(reply), media_type="application/json")

    async def embed_one(self, request: Request) -> Response:
        body = await self._bodies.read(request, OllamaEmbeddingsRequest)
        inputs = [EmbeddingInput("prompt", body.prompt)] if body.prompt else []
        with await self._models.lease(body.model) as served:
            self._keeper.keep(request, body.model, body.keep_alive)
            made = await _make(request, served.responder, inputs, truncates=True)
        vector = numbers(made.vectors[0]) if made.vectors else []
        data = to_json(OllamaEmbedding(embedding=vector))
        return Response(data, media_type="application/json")


async def _make(
    request: Request, responder: Responder, inputs: Sequence[EmbeddingInput], *, truncates: bool
) -> Embeddings:
    """Make the vectors. Without inputs, the model was only to be loaded."""
    if not inputs:
        return NOTHING
    return await embed(request, responder, inputs, truncates=truncates)


def _inputs(given: str | Sequence[str] | None) -> list[EmbeddingInput]:
    if isinstance(given, str):
        return [EmbeddingInput("input", given)] if given else []
    return [EmbeddingInput(f"input.{index}", text) for index, text in enumerate(given or ())]
