"""The OpenAPI document, built when it is first read.

Routes refer to types by name. FastAPI would build all schemas at the start, which took a tenth of
the start-up time.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from rekindle.api.body import WireModel
from rekindle.api.errors import ErrorBody

REF = "#/components/schemas/{model}"


def request_body(model: type[WireModel]) -> dict[str, Any]:
    """Describe a request body, for a route's `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {"application/json": _ref(model)}}}


def reply(model: type) -> dict[str, Any]:
    """Describe a reply, for one status in a route's `responses`."""
    return {"content": {"application/json": _ref(model)}}


def whole_or_stream(whole: type, chunk: type, error: type) -> dict[int | str, dict[str, Any]]:
    """Describe JSON or server-sent events, for a route's `responses`."""
    content = {"application/json": _ref(whole), "text/event-stream": _ref(chunk)}
    return {"default": reply(error), 200: {"content": content}}


def any_of(names: Iterable[str]) -> dict[str, Any]:
    return {"schema": {"anyOf": [{"$ref": REF.format(model=name)} for name in names]}}


def describe(app: FastAPI, types: Sequence[type]) -> dict[str, Any]:
    """Describe all routes. `types`: those that routes refer to by name."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = TypeAdapter.json_schemas(
        [(each, "validation", TypeAdapter(each)) for each in types], ref_template=REF
    )
    document["components"]["schemas"] |= definitions["$defs"]
    return document


def _ref(model: type) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(model=model.__name__)}}


ERRORS: dict[int | str, dict[str, Any]] = {"default": reply(ErrorBody)}
