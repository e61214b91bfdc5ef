"""Endpoints that count the tokens of a prompt: OpenAI's for responses, llama-server's for chats."""

from typing import Any, Literal

from fastapi import Request, Response
from typing_extensions import TypedDict

from rekindle.api.json import json_response
from rekindle.api.openapi import Routes
from rekindle.api.pipeline import Pipeline, WireFormat


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


def add_input_tokens(routes: Routes, pipeline: Pipeline, wire_format: WireFormat[Any]) -> None:
    async def count(request: Request) -> Response:
        n_tokens = await pipeline.count_tokens(request, wire_format)
        return json_response(InputTokens(object="response.input_tokens", input_tokens=n_tokens))

    for path in wire_format.paths:
        routes.add(
            "POST",
            f"{path}/input_tokens",
            count,
            name=f"{wire_format.operation}_input_tokens",
            takes=[wire_format.schema],
            gives=InputTokens,
            error=wire_format.error,
        )
