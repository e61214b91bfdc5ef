"""The OpenAPI document. Routes that read their bodies themselves name their models here."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from rekindle.api.body import Wire
from rekindle.api.errors import ErrorBody

REF = "#/components/schemas/{model}"
ERRORS: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody}}


def request_body(model: type[Wire]) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {"application/json": _ref(model)}}}


def whole_or_stream(whole: type, chunk: type) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: JSON, or server-sent events where `stream` asks for them."""
    return ERRORS | {200: {"model": whole, "content": {"text/event-stream": _ref(chunk)}}}


def describe(app: FastAPI, types: Sequence[type]) -> dict[str, Any]:
    """All routes; `types` are those that only `request_body` and `whole_or_stream` name."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = TypeAdapter.json_schemas(
        [(each, "validation", TypeAdapter(each)) for each in types], ref_template=REF
    )
    document["components"]["schemas"] |= definitions["$defs"]
    return document


def _ref(model: type) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(model=model.__name__)}}
