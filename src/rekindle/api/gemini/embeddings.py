"""Gemini's embeddings endpoints: contents to vectors."""

import asyncio
from collections.abc import Sequence

from fastapi import Request, Response

from rekindle.api.body import fault
from rekindle.api.gemini.bodies import BatchEmbedContentsBody, ContentEmbedding, EmbedContentBody
from rekindle.api.gemini.contents import text_of
from rekindle.api.gemini.schema import BatchEmbedContentsRequest, EmbedContentRequest
from rekindle.api.gemini.wire_format import MODEL, model_of
from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import GoogleErrorBody
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.requests.embedding import check_dimensions, embed, numbers, shortened
from rekindle.chat.embeddings import EmbeddingInput

DIMENSIONS = "outputDimensionality"


class ContentEmbeddings:
    def __init__(self, context: RequestContext) -> None:
        self._models = context.models
        self._bodies = context.bodies

    def add_routes(self, routes: Routes, prefix: str) -> None:
        one, error = EmbedContentRequest, GoogleErrorBody
        routes.add(
            "POST",
            f"{prefix}{MODEL}:embedContent",
            self.embed_one,
            takes=[one],
            gives=EmbedContentBody,
            error=error,
        )
        routes.add(
            "POST",
            f"{prefix}{MODEL}:batchEmbedContents",
            self.embed_all,
            takes=[BatchEmbedContentsRequest],
            gives=BatchEmbedContentsBody,
            error=error,
        )

    async def embed_one(self, request: Request) -> Response:
        body = await self._bodies.read(request, EmbedContentRequest)
        [embedding] = await self._embed(request, [body], [""])
        return json_response(EmbedContentBody(embedding=embedding))

    async def embed_all(self, request: Request) -> Response:
        body = await self._bodies.read(request, BatchEmbedContentsRequest)
        paths = [f"requests.{index}." for index in range(len(body.requests))]
        embeddings = await self._embed(request, body.requests, paths)
        # In a thread: encoding thousands of vectors takes seconds.
        return await asyncio.to_thread(json_response, BatchEmbedContentsBody(embeddings=embeddings))

    async def _embed(
        self, request: Request, bodies: Sequence[EmbedContentRequest], paths: Sequence[str]
    ) -> list[ContentEmbedding]:
        inputs = [_input(body, path) for body, path in zip(bodies, paths, strict=True)]
        with await self._models.lease(model_of(bodies[0].model, request)) as served:
            for body, path in zip(bodies, paths, strict=True):
                check_dimensions(body.output_dimensionality, served.responder, path + DIMENSIONS)
            made = await embed(request, served.responder, inputs)
        return await asyncio.to_thread(_embeddings, made.vectors, bodies)


def _input(body: EmbedContentRequest, path: str) -> EmbeddingInput:
    text = text_of(body.content, f"{path}content")
    if not text:
        raise fault(f"{path}content", " must not be empty.")
    return EmbeddingInput(f"{path}content", text)


def _embeddings(
    vectors: Sequence[bytes], bodies: Sequence[EmbedContentRequest]
) -> list[ContentEmbedding]:
    return [
        ContentEmbedding(values=numbers(shortened(vector, body.output_dimensionality)))
        for vector, body in zip(vectors, bodies, strict=True)
    ]
