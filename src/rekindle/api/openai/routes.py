"""OpenAI's endpoints: chat completions, completions, embeddings, models."""

from fastapi import FastAPI

from rekindle.api.http.context import RequestContext
from rekindle.api.openai.bodies import EmbeddingList
from rekindle.api.openai.embeddings import EmbeddingsApi
from rekindle.api.openai.models import ModelsApi
from rekindle.api.openai.schema import EmbeddingsRequest
from rekindle.api.openai.wire_format import CHAT, COMPLETIONS
from rekindle.api.pipeline import Pipeline

# Types that OpenAPI cannot find by itself: see `openapi.describe`.
WIRE_TYPES = (*CHAT.wire_types, *COMPLETIONS.wire_types, EmbeddingsRequest, EmbeddingList)


def add_routes(app: FastAPI, context: RequestContext, pipeline: Pipeline) -> None:
    embeddings = EmbeddingsApi(context.models, context.telemetry)
    models = ModelsApi(context.models)
    # llama-server serves each of these with and without the prefix.
    for prefix in ("/v1", ""):
        pipeline.add_route(app, f"{prefix}/chat/completions", CHAT, name="chat_completions")
        pipeline.add_route(app, f"{prefix}/completions", COMPLETIONS, name="completions")
        embeddings.add_routes(app, prefix)
        models.add_routes(app, prefix)
