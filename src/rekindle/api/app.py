"""The HTTP application: middleware, error answers, routes. No logic of its own."""

from dataclasses import dataclass
from functools import cache

from fastapi import FastAPI, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from rekindle import __version__
from rekindle.api.anthropic import routes as anthropic
from rekindle.api.cache import routes as cache_routes
from rekindle.api.dashboard import routes as dashboard
from rekindle.api.dashboard.feed import Feed
from rekindle.api.dashboard.history import HourHistory
from rekindle.api.errors import ErrorBody, answer_http_exception, answer_rekindle_error
from rekindle.api.http.context import RequestContext
from rekindle.api.http.drain import Drain, DrainGate
from rekindle.api.http.head import HeadAsGet
from rekindle.api.http.middleware import ApiKeys, BodyLimit, RequestScope
from rekindle.api.http.session_header import SESSION_HEADER
from rekindle.api.models import Models, answer_model_error
from rekindle.api.native import routes as native
from rekindle.api.openai import routes as openai
from rekindle.api.openapi import describe
from rekindle.api.responses import routes as responses
from rekindle.config import NamespaceBy
from rekindle.errors import ModelInUse, ModelLoadFailed, RekindleError, UnknownModel
from rekindle.generation.stored_responses import ResponseStore
from rekindle.observe.telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    api_keys: tuple[str, ...] = ()  # none: everyone is let in
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers at all
    body_limit_bytes: int = 32 * 2**20
    ping_seconds: float = 10.0
    namespace_by: NamespaceBy = NamespaceBy.NONE
    explains: bool = False


def create_app(
    models: Models,
    settings: ApiSettings,
    telemetry: Telemetry,
    stored_responses: ResponseStore,
    feed: Feed | None = None,  # None: its own, which hears of no request
    drain: Drain | None = None,  # None: it lets everyone in until its end
) -> FastAPI:
    app = FastAPI(
        title="Rekindle",
        version=__version__,
        openapi_url=None,  # served below; FastAPI's own would lack the request bodies
        redirect_slashes=False,
        middleware=_middleware(settings, telemetry, drain or Drain()),
        exception_handlers={
            RekindleError: answer_rekindle_error,
            UnknownModel: answer_model_error,
            ModelInUse: answer_model_error,
            ModelLoadFailed: answer_model_error,
            HTTPException: answer_http_exception,
        },
    )
    context = RequestContext(
        models=models,
        telemetry=telemetry,
        ping_seconds=settings.ping_seconds,
        namespace_by=settings.namespace_by,
        explains=settings.explains,
    )
    openai_api = openai.OpenAiApi(context)
    responses_api = responses.ResponsesApi(context, stored_responses)
    anthropic_api = anthropic.AnthropicApi(context)
    prompts = {
        "chat": openai_api.chat_prompt,
        "completions": openai_api.completion_prompt,
        "messages": anthropic_api.message_prompt,
        "responses": responses_api.response_prompt,
    }
    native.NativeApi(models, telemetry).add_routes(app)
    cache_api = cache_routes.CacheApi(context, prompts)
    dashboard_api = dashboard.DashboardApi(context, feed or Feed(models, HourHistory()))
    for api in (openai_api, responses_api, anthropic_api, cache_api, dashboard_api):
        api.add_routes(app)

    @cache
    def document() -> bytes:
        return to_json(
            describe(
                app,
                (
                    ErrorBody,
                    *native.WIRE_TYPES,
                    *openai.WIRE_TYPES,
                    *anthropic.WIRE_TYPES,
                    *responses.WIRE_TYPES,
                    *cache_routes.WIRE_TYPES,
                    *dashboard.WIRE_TYPES,
                ),
            )
        )

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    return app


def _middleware(settings: ApiSettings, telemetry: Telemetry, drain: Drain) -> list[Middleware]:
    """From the outside in: a refusal must carry CORS headers, or a browser hides it."""
    stack = [Middleware(HeadAsGet), Middleware(RequestScope, telemetry=telemetry)]
    if settings.cors_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
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
    if settings.api_keys:
        stack.append(Middleware(ApiKeys, keys=settings.api_keys))
    stack.append(Middleware(BodyLimit, limit_bytes=settings.body_limit_bytes))
    stack.append(Middleware(DrainGate, drain=drain))
    return stack
