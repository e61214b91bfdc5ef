"""Gemini's models endpoints: list and show."""

from collections.abc import Mapping, Sequence

from fastapi import Response

from rekindle import __version__
from rekindle.api.admission.keys import GOOGLE_HEADER
from rekindle.api.gemini.bodies import GeminiModelBody, GeminiModelList
from rekindle.api.gemini.wire_format import MODEL
from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import GoogleErrorBody
from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.models.card import ListedModel

METHODS = (
    *("generateContent", "streamGenerateContent", "countTokens", "createCachedContent"),
    *("embedContent", "batchEmbedContents"),
)


class GeminiModelsApi:
    def __init__(self, context: RequestContext) -> None:
        self._models = context.models

    def add_routes(self, routes: Routes) -> None:
        listed, error = "/v1beta/models", GoogleErrorBody
        routes.add("GET", listed, self.models, gives=GeminiModelList, error=error)
        routes.add("GET", f"/v1beta{MODEL}", self.model, gives=GeminiModelBody, error=error)

    async def models(self) -> Response:
        return json_response(model_list(self._models.listed()))

    async def model(self, model_id: str) -> Response:
        return json_response(model_body(self._models.find(model_id)))


def is_google_client(headers: Mapping[str, str]) -> bool:
    """Tell whether one of Google's SDKs sent a request. OpenAI's list of models has their path."""
    return any(name in headers for name in (GOOGLE_HEADER, "x-goog-api-client"))


def model_list(models: Sequence[ListedModel]) -> GeminiModelList:
    return GeminiModelList(models=[model_body(each) for each in models])


def model_body(model: ListedModel) -> GeminiModelBody:
    body = GeminiModelBody(
        name=f"models/{model.id}",
        baseModelId=model.id,
        version=__version__,
        displayName=model.id,
        description=f"Served by Rekindle, {model.state}.",
        supportedGenerationMethods=list(METHODS),
    )
    if model.card is not None:
        body["inputTokenLimit"] = model.card.n_ctx
        body["outputTokenLimit"] = model.card.n_ctx
    return body
