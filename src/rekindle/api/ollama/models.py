"""What Ollama's clients ask about models: a list, details, which are loaded; no management."""

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from fastapi import Request, Response

from rekindle import __version__
from rekindle.api.http.context import RequestContext
from rekindle.api.http.error_shapes import OllamaErrorBody
from rekindle.api.json import json_response
from rekindle.api.ollama.bodies import (
    OllamaDetails,
    OllamaListedModel,
    OllamaModel,
    OllamaModelList,
    OllamaRunningList,
    OllamaRunningModel,
    OllamaStatus,
    OllamaVersion,
)
from rekindle.api.ollama.keep_alive import wanted_model
from rekindle.api.ollama.response import time_text
from rekindle.api.ollama.schema import OllamaShowRequest
from rekindle.api.openapi import Routes
from rekindle.chat.responder import Responder
from rekindle.errors import InvalidRequest, UnknownModel
from rekindle.models.card import FileCard, ListedModel, ModelCard

API_VERSION = "0.13.0"  # of Ollama: some clients refuse to work with an old one
TAG = ":latest"
FOREVER_SECONDS = 100 * 365 * 86400.0  # until a model expires that stays loaded
SIZES = ((1e9, ".1f", "B"), (1e6, ".2f", "M"), (1e3, ".2f", "K"))
ELSEWHERE = {
    "push": "Models are not published from here.",
    "create": "Give the server a GGUF file: `rekindle serve FILE`.",
    "copy": "A model has the name of its file.",
    "delete": "Delete the file, and start the server without it.",
}
PULL = (
    "This server does not have `{name}`, and downloads a model only when it starts:"
    " `rekindle serve hf:owner/repo/file.gguf`."
)


class OllamaModelsApi:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._models = context.models

    def add_routes(self, routes: Routes) -> None:
        def add(method: str, path: str, endpoint: Callable[..., Any], gives: type) -> None:
            takes = [OllamaShowRequest] if method == "POST" else []
            routes.add(method, path, endpoint, takes=takes, gives=gives, error=OllamaErrorBody)

        add("GET", "/api/version", self.version, OllamaVersion)
        add("GET", "/api/tags", self.tags, OllamaModelList)
        add("GET", "/api/ps", self.running, OllamaRunningList)
        add("POST", "/api/show", self.show, OllamaModel)
        add("POST", "/api/pull", self.pull, OllamaStatus)
        add("POST", "/api/push", self.refuse, OllamaStatus)
        add("POST", "/api/create", self.refuse, OllamaStatus)
        add("POST", "/api/copy", self.refuse, OllamaStatus)
        add("POST", "/api/blobs/{digest}", self.refuse, OllamaStatus)
        add("DELETE", "/api/delete", self.refuse, OllamaStatus)

    async def version(self) -> Response:
        return json_response(OllamaVersion(version=API_VERSION, rekindle=__version__))

    async def tags(self) -> Response:
        models = [
            _listed(each, await self._models.file_card(each.id)) for each in self._models.listed()
        ]
        return json_response(OllamaModelList(models=models))

    async def running(self) -> Response:
        models = [
            _running(each, each.card) for each in self._models.listed() if each.card is not None
        ]
        return json_response(OllamaRunningList(models=models))

    async def show(self, request: Request) -> Response:
        """Describe a model. One that is not loaded is not loaded for this."""
        body = await self._context.bodies.read(request, OllamaShowRequest)
        model = wanted_model(self._models, body.model or body.name)
        card = await self._models.file_card(model.id)
        if model.card is None:
            return json_response(_model(model, card))
        with await self._models.lease(model.id) as served:
            shown = _model(model, card)
            _add_loaded(shown, served.card, served.responder)
            return json_response(shown)

    async def pull(self, request: Request) -> Response:
        """Succeed if the model is here already, as scripts expect that make sure of it."""
        body = await self._context.bodies.read(request, OllamaShowRequest)
        name = body.model or body.name or ""
        try:
            self._models.find(name)
        except UnknownModel:
            raise InvalidRequest(PULL.format(name=name), "model") from None
        return json_response(OllamaStatus(status="success"))

    async def refuse(self, request: Request) -> Response:
        task = request.url.path.split("/")[2]
        hint = ELSEWHERE.get(task, ELSEWHERE["create"])
        raise InvalidRequest(
            f"`/api/{task}` is not supported: this server manages no models. {hint}"
        )


def _listed(model: ListedModel, card: FileCard | None) -> OllamaListedModel:
    return OllamaListedModel(
        name=_tagged(model.id),
        model=_tagged(model.id),
        modified_at=time_text(model.created),
        size=card.size_bytes if card else 0,
        digest=_digest(model),
        details=_details(card),
    )


def _running(model: ListedModel, card: ModelCard) -> OllamaRunningModel:
    left = min(model.seconds_left, FOREVER_SECONDS)
    return OllamaRunningModel(
        name=_tagged(model.id),
        model=_tagged(model.id),
        size=card.size_bytes,
        digest=_digest(model),
        details=_details(card),
        expires_at=time_text(time.time() + left),
        context_length=card.n_ctx,
    )


def _model(model: ListedModel, card: FileCard | None) -> OllamaModel:
    """Describe a model as far as its file does."""
    shown = OllamaModel(
        modelfile=f"FROM {model.id}\n",
        parameters="",
        template=card.chat_template if card else "",
        details=_details(card),
        model_info={},
        # Templates without tools get them in the system prompt.
        capabilities=["completion", "tools"],
        modified_at=time_text(model.created),
    )
    if card is not None:
        shown["model_info"] = {
            "general.architecture": card.architecture,
            "general.parameter_count": card.n_params,
            f"{card.architecture}.context_length": card.n_ctx_train,
        }
    return shown


def _add_loaded(shown: OllamaModel, card: ModelCard, responder: Responder) -> None:
    """Add what is known of a loaded model only."""
    shown["parameters"] = f"num_ctx                        {card.n_ctx}"
    shown["modelfile"] += f"PARAMETER num_ctx {card.n_ctx}\n"
    # What a conversation may have, not what the model was trained for.
    shown["model_info"][f"{card.architecture}.context_length"] = card.n_ctx
    if _thinks(card, responder):
        shown["capabilities"].append("thinking")
    if (embedder := responder.status().embedder) is not None:
        shown["capabilities"].append("embedding")
        shown["model_info"][f"{card.architecture}.embedding_length"] = embedder.n_dimensions


def _thinks(card: ModelCard, responder: Responder) -> bool:
    """Return whether the template knows reasoning. Dialects read it of any model."""
    marks = responder.dialect_choice.dialect.reasoning
    if marks is None:
        return False
    return any(mark.strip() in card.chat_template for mark in (marks.opening, marks.closing))


def _details(card: FileCard | None) -> OllamaDetails:
    family = card.architecture if card else ""
    return OllamaDetails(
        parent_model="",
        format="gguf" if card and card.quantization else "",
        family=family,
        families=[family] if family else [],
        parameter_size=_parameter_size(card.n_params) if card else "",
        quantization_level=card.quantization if card else "",
    )


def _parameter_size(n_params: int) -> str:
    """Write a number as Ollama does: 8.0B, 134.52M."""
    for unit, places, letter in SIZES:
        if n_params >= unit:
            return f"{n_params / unit:{places}}{letter}"
    return str(n_params) if n_params else ""


def _tagged(name: str) -> str:
    return name if ":" in name else name + TAG


def _digest(model: ListedModel) -> str:
    """Identify what is known of a model: clients keep what they were shown under this key."""
    card = model.card
    known = (card.path, card.size_bytes, card.n_ctx) if card else ()
    return sha256(repr((model.id, *known)).encode()).hexdigest()
