"""The models endpoints: list, show, load, unload."""

from typing import Literal, NotRequired

from fastapi import Request, Response
from typing_extensions import TypedDict

from rekindle.api.gemini.models import is_google_client, model_body, model_list
from rekindle.api.http.context import RequestContext
from rekindle.api.json import body_from, json_response
from rekindle.api.openai.bodies import ModelMeta
from rekindle.api.openapi import Routes
from rekindle.models.card import ListedModel


class ModelBody(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: Literal["loaded", "loading", "unloaded"]
    # Only of loaded models. The context by the names of OpenRouter, vLLM and Anthropic.
    context_length: NotRequired[int]
    max_model_len: NotRequired[int]
    max_input_tokens: NotRequired[int]
    meta: NotRequired[ModelMeta]


class ModelDetails(TypedDict):
    parent_model: str
    format: Literal["gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class LlamaListedModel(TypedDict):
    """A model as llama-server lists it, in Ollama's form. What is not known is empty."""

    name: str
    model: str
    modified_at: str
    size: str
    digest: str
    type: Literal["model"]
    description: str
    tags: list[str]
    capabilities: list[str]
    parameters: str
    details: ModelDetails


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelBody]
    models: list[LlamaListedModel]  # the same ones, for clients of llama-server


class ModelsApi:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._models = context.models

    def add_routes(self, routes: Routes, prefix: str) -> None:
        routes.add("GET", f"{prefix}/models", self.models, gives=ModelList)
        # `path`, because names such as `owner/model` contain slashes.
        one = f"{prefix}/models/{{model_id:path}}"
        routes.add("POST", f"{one}/load", self.load)
        routes.add("POST", f"{one}/unload", self.unload)
        routes.add("GET", one, self.model, gives=ModelBody)

    async def models(self, request: Request) -> Response:
        listed = self._models.listed()
        if is_google_client(request.headers):
            return json_response(model_list(listed))
        data, named = [_body(each) for each in listed], [_named(each) for each in listed]
        return json_response(ModelList(object="list", data=data, models=named))

    async def model(self, request: Request, model_id: str) -> Response:
        model = self._models.find(model_id)
        is_google = is_google_client(request.headers)
        return json_response(model_body(model) if is_google else _body(model))

    async def load(self, model_id: str) -> ModelBody:
        await self._models.load(model_id)
        return _body(self._models.find(model_id))

    async def unload(self, request: Request, model_id: str) -> ModelBody:
        self._context.require_admin(request, "Unloading a model")
        await self._models.unload(model_id)
        return _body(self._models.find(model_id))


def _body(model: ListedModel) -> ModelBody:
    body = ModelBody(
        id=model.id,
        object="model",
        created=model.created,
        owned_by="rekindle",
        status=model.state.value,
    )
    if model.card is not None:
        n_ctx = model.card.n_ctx
        body["context_length"] = body["max_model_len"] = n_ctx
        body["max_input_tokens"] = n_ctx - 1  # one is for the reply
        body["meta"] = body_from(ModelMeta, model.card, size=model.card.size_bytes)
    return body


def _named(model: ListedModel) -> LlamaListedModel:
    family = model.card.architecture if model.card else ""
    return LlamaListedModel(
        name=model.id,
        model=model.id,
        modified_at="",
        size=str(model.card.size_bytes) if model.card else "",
        digest="",
        type="model",
        description="",
        tags=[""],
        capabilities=["completion"],
        parameters="",
        details=ModelDetails(
            parent_model="",
            format="gguf",
            family=family,
            families=[family],
            parameter_size=str(model.card.n_params) if model.card else "",
            quantization_level=model.card.quantization if model.card else "",
        ),
    )
