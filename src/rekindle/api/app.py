"""The HTTP application: middleware, error handlers, routes."""

import asyncio
from functools import cache
from typing import Any

from fastapi import FastAPI, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from rekindle import __version__
from rekindle.api.admission.body_deadline import BodyDeadline
from rekindle.api.admission.body_limit import BodyLimit
from rekindle.api.admission.content_type import ContentType
from rekindle.api.admission.head_checks import HeadChecks
from rekindle.api.admission.hosts import HostCheck
from rekindle.api.admission.keys import ApiKeys
from rekindle.api.admission.origins import AllowedOrigins, OriginCheck
from rekindle.api.anthropic.routes import add_token_count
from rekindle.api.anthropic.wire_format import MESSAGES
from rekindle.api.body import BodyReader
from rekindle.api.cache.routes import CacheApi
from rekindle.api.completion.wire_format import COMPLETION, INFILL
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.routes import DashboardApi
from rekindle.api.errors import answer_http_exception, answer_rekindle_error
from rekindle.api.gemini.embeddings import ContentEmbeddings
from rekindle.api.gemini.models import GeminiModelsApi
from rekindle.api.gemini.routes import GeminiApi
from rekindle.api.gemini.wire_format import PREFIXES, GeminiFormats
from rekindle.api.http.context import ApiSettings, RequestContext
from rekindle.api.http.drain import Drain, DrainGate
from rekindle.api.http.middleware import HeadAsGet, RequestScope
from rekindle.api.http.session_header import SESSION_HEADER
from rekindle.api.models import ForgetScope, Models
from rekindle.api.native.routes import NativeApi
from rekindle.api.native.slots import SlotsApi
from rekindle.api.native.vectors import VectorsApi
from rekindle.api.ollama.embeddings import OllamaEmbeddingsApi
from rekindle.api.ollama.keep_alive import Keeper
from rekindle.api.ollama.models import OllamaModelsApi
from rekindle.api.ollama.wire_format import ollama_formats
from rekindle.api.openai.embeddings import EmbeddingsApi
from rekindle.api.openai.models import ModelsApi
from rekindle.api.openai.token_counts import add_input_tokens
from rekindle.api.openai.wire_format import CHAT, COMPLETIONS
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Pipeline, WireFormat
from rekindle.api.responses.routes import StoredResponsesApi
from rekindle.api.responses.wire_format import responses_format
from rekindle.errors import RekindleError
from rekindle.generation.stored_responses import ResponseStore
from rekindle.observe.telemetry import Telemetry


def create_app(
    models: Models,
    settings: ApiSettings,
    telemetry: Telemetry,
    stored_responses: ResponseStore,
    feed: Feed,
    drain: Drain,
    forget: ForgetScope,
) -> FastAPI:
    app = FastAPI(
        title="Rekindle",
        version=__version__,
        openapi_url=None,  # served below; FastAPI's document lacks the request bodies
        redirect_slashes=False,
        middleware=_middleware(settings, telemetry, drain),
        exception_handlers={
            RekindleError: answer_rekindle_error,
            HTTPException: answer_http_exception,
        },
    )
    routes = Routes(app)
    context = RequestContext(models, telemetry, settings, BodyReader(telemetry))
    pipeline = Pipeline(context)
    responses = responses_format(stored_responses, telemetry, max_bytes=settings.body_limit_bytes)
    gemini = GeminiFormats(stored_responses)
    keeper = Keeper(context)
    formats: tuple[WireFormat[Any], ...]
    formats = (
        *(CHAT, COMPLETIONS, MESSAGES, responses, COMPLETION, INFILL, gemini.whole),
        *ollama_formats(keeper),
    )
    for wire_format in formats:
        pipeline.add_routes(routes, wire_format)
    NativeApi(context).add_routes(routes)
    SlotsApi(context).add_routes(routes)
    VectorsApi(context).add_routes(routes)
    # llama-server serves each path of OpenAI with and without the prefix.
    for prefix in ("/v1", ""):
        EmbeddingsApi(context).add_routes(routes, prefix)
        ModelsApi(context).add_routes(routes, prefix)
        StoredResponsesApi(context, stored_responses).add_routes(routes, prefix)
    add_token_count(routes, context)
    for counted in (CHAT, responses):
        add_input_tokens(routes, pipeline, counted)
    for prefix in PREFIXES:
        GeminiApi(context, pipeline, gemini, stored_responses).add_routes(routes, prefix)
        ContentEmbeddings(context).add_routes(routes, prefix)
    GeminiModelsApi(context).add_routes(routes)
    OllamaModelsApi(context).add_routes(routes)
    OllamaEmbeddingsApi(context, keeper).add_routes(routes)
    CacheApi(context, pipeline, formats, forget).add_routes(routes)
    DashboardApi(context, feed).add_routes(routes)

    @cache
    def document() -> bytes:
        return to_json(routes.document())

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        # In a thread: building it takes a fifth of a second.
        return Response(await asyncio.to_thread(document), media_type="application/json")

    return app


def _middleware(settings: ApiSettings, telemetry: Telemetry, drain: Drain) -> list[Middleware]:
    """List middleware from the outside in. Refusals need CORS headers, or browsers hide them."""
    origins = AllowedOrigins(settings.cors_origins)
    stack = [
        Middleware(HeadAsGet),
        Middleware(RequestScope, telemetry=telemetry),
        Middleware(HeadChecks, checks=[HostCheck(settings.server_names), OriginCheck(origins)]),
    ]
    if origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins.exact,
                allow_origin_regex=origins.pattern,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[
                    "x-request-id",
                    "request-id",
                    "retry-after",
                    "x-rekindle-cache",
                    SESSION_HEADER,
                ],
            )
        )
    stack.append(Middleware(ApiKeys, keys=settings.keys))
    stack.append(Middleware(ContentType))
    stack.append(Middleware(BodyDeadline, pause_seconds=settings.receive_seconds))
    stack.append(Middleware(BodyLimit, limit_bytes=settings.body_limit_bytes))
    stack.append(Middleware(DrainGate, drain=drain))
    return stack
