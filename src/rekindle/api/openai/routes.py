"""OpenAI's endpoints that generate nothing: embeddings, models."""

from fastapi import FastAPI

from rekindle.api.http.context import RequestContext
from rekindle.api.openai.bodies import EmbeddingList
from rekindle.api.openai.embeddings import EmbeddingsApi
from rekindle.api.openai.models import ModelsApi
from rekindle.api.openai.schema import EmbeddingsRequest

# Types that OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (EmbeddingsRequest, EmbeddingList)


def add_routes(app: FastAPI, context: RequestContext) -> None:
    # llama-server serves each path with and without the prefix.
    for prefix in ("/v1", ""):
        EmbeddingsApi(context.models, context.telemetry).add_routes(app, prefix)
        ModelsApi(context.models).add_routes(app, prefix)
