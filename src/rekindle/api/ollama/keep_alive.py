"""`keep_alive`: how long a model stays loaded, and requests that only load or unload one."""

import math
import re
import time

from fastapi import Request, Response

from rekindle.api.body import fault
from rekindle.api.errors import Forbidden
from rekindle.api.http.context import RequestContext
from rekindle.api.json import json_response
from rekindle.api.models import Models
from rekindle.api.ollama.bodies import (
    DoneReason,
    OllamaChat,
    OllamaGeneration,
    OllamaReplyMessage,
)
from rekindle.api.ollama.response import time_text
from rekindle.api.ollama.schema import KeepAlive, OllamaChatRequest, OllamaFields
from rekindle.errors import ModelInUse
from rekindle.models.card import ListedModel

# Go's durations, such as `1h30m`.
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
TERM = re.compile(f"({NUMBER})({'|'.join(UNITS)})")
DURATION = re.compile(f"([+-]?)((?:{TERM.pattern})+|{NUMBER})", re.ASCII)


class Keeper:
    """Keeps models loaded as requests ask for it."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._models = context.models

    async def before_reply(self, body: OllamaFields, request: Request) -> Response | None:
        """Answer a request that has nothing to reply to."""
        if not body.is_empty:
            return None
        if seconds_of(body.keep_alive) == 0:
            return _answer(body, await self._unload(request, body.model), "unload")
        with await self._models.lease(body.model) as served:
            self.keep(request, body.model, body.keep_alive)
        return _answer(body, served.card.id, "load")

    def keep(self, request: Request, model: str | None, keep_alive: KeepAlive | None) -> None:
        """Keep the model for so long. Of clients that may not unload, the wish is ignored."""
        seconds = seconds_of(keep_alive)
        if seconds is None:
            return
        try:
            self._context.require_admin(request, "Unloading a model")
        except Forbidden:
            self._context.telemetry.count_ignored_field("keep_alive")
        else:
            self._models.keep_alive(model, seconds)

    async def _unload(self, request: Request, asked: str | None) -> str:
        self._context.require_admin(request, "Unloading a model")
        name = wanted_model(self._models, asked).id
        try:
            await self._models.unload(name)
        except ModelInUse:
            self._models.keep_alive(name, 0)  # it is unloaded after its last use
        return name

    def while_leased(self, body: OllamaFields, request: Request) -> None:
        self.keep(request, body.model, body.keep_alive)


def wanted_model(models: Models, name: str | None) -> ListedModel:
    """Find a model, loaded or not. A single one answers to every name. Raise UnknownModel."""
    listed = models.listed()
    if len(listed) == 1:
        return listed[0]
    if not name:
        raise fault("model", " is required.")
    return models.find(name)


def seconds_of(keep_alive: KeepAlive | None) -> float | None:
    """Return the seconds. Negative ones mean for ever. None: as the server is set."""
    if keep_alive is None or keep_alive == "":
        return None
    seconds = _parsed(keep_alive) if isinstance(keep_alive, str) else keep_alive
    return math.inf if seconds < 0 else seconds


def _parsed(duration: str) -> float:
    match = DURATION.fullmatch(duration.strip())
    if match is None:
        raise fault("keep_alive", ' should be a duration such as "5m", or a number of seconds.')
    terms = TERM.findall(match[2])
    seconds = sum(float(number) * UNITS[unit] for number, unit in terms)
    seconds = seconds if terms else float(match[2])
    return -seconds if match[1] == "-" else seconds


def _answer(body: OllamaFields, model: str, reason: DoneReason) -> Response:
    created_at = time_text(int(time.time()))
    if isinstance(body, OllamaChatRequest):
        message = OllamaReplyMessage(role="assistant", content="")
        return json_response(
            OllamaChat(
                model=model, created_at=created_at, message=message, done=True, done_reason=reason
            )
        )
    return json_response(
        OllamaGeneration(
            model=model, created_at=created_at, response="", done=True, done_reason=reason
        )
    )
