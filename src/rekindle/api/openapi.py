"""The OpenAPI document, built when it is first read.

Routes refer to types by name. FastAPI would build all schemas at the start, which took a tenth of
the start-up time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from rekindle.api.http.error_shapes import ErrorBody
from rekindle.api.sse import MEDIA_TYPE

JSON = "application/json"
REF = "#/components/schemas/{model}"


class Routes:
    """The routes of an app, and the types that they refer to by name."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._types: dict[type, None] = {}

    def add(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        *,
        takes: Sequence[type] = (),
        gives: type | None = None,
        streams: Sequence[type] = (),
        stream_type: str = MEDIA_TYPE,
        media: Mapping[str, Any] | None = None,
        error: type = ErrorBody,
        **options: Any,
    ) -> None:
        """Add a route that takes any one of `takes`.

        It replies with JSON (`gives`), events (`streams`) or other types (`media`, with their
        schemas). Without these three, FastAPI describes the reply. `options` are FastAPI's.
        """
        if takes:
            content = {JSON: self._any_of(takes)}
            options["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
        replies = dict(media or {})
        if gives:
            replies[JSON] = self._any_of([gives])
        if streams:
            replies[stream_type] = self._any_of(streams)
        responses: dict[int | str, Any] = {"default": {"content": {JSON: self._any_of([error])}}}
        if replies:
            responses[200] = {"content": replies}
        if replies and not gives:
            options["response_class"] = Response
        self._app.add_api_route(path, endpoint, methods=[method], responses=responses, **options)

    def document(self) -> dict[str, Any]:
        app = self._app
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = TypeAdapter.json_schemas(
            [(each, "validation", TypeAdapter(each)) for each in self._types], ref_template=REF
        )
        document["components"]["schemas"] |= definitions["$defs"]
        return document

    def _any_of(self, types: Sequence[type]) -> dict[str, Any]:
        self._types |= dict.fromkeys(types)
        refs = [{"$ref": REF.format(model=each.__name__)} for each in types]
        return {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
