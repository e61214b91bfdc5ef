"""Errors as the client sees them: one mapping from our tree to OpenAI's error shape."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from rekindle.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RekindleError,
    ShuttingDown,
)

logger = logging.getLogger(__name__)


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None
    # llama-server's additions to a prompt that does not fit.
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class ErrorBody(TypedDict):
    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        return to_json(ErrorBody(error=self.detail))

    def response(self) -> Response:
        return Response(self.body, self.status, headers=self.headers, media_type="application/json")


def failure_of(error: BaseException) -> Failure:
    match error:
        case InvalidRequest():
            return invalid(error.message, param=error.param)
        case PromptTooLong():
            detail = _detail(error.message, code="context_length_exceeded")
            detail["n_prompt_tokens"] = error.n_prompt
            detail["n_ctx"] = error.n_ctx
            return Failure(400, detail)
        case Overloaded():
            return Failure(
                429,
                _detail(error.message, type="rate_limit_error", code="queue_full"),
                {"retry-after": str(error.retry_after_seconds)},
            )
        case ShuttingDown():
            return Failure(503, _detail(error.message, type="server_error", code="shutting_down"))
        case EngineError():
            return Failure(500, _detail(error.message, type="server_error", code="engine_error"))
        case _:
            return INTERNAL


def invalid(
    message: str, *, status: int = 400, param: str | None = None, code: str | None = None
) -> Failure:
    return Failure(status, _detail(message, param=param, code=code))


async def answer_rekindle_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RekindleError)
    if isinstance(error, EngineError):
        logger.error("the engine failed: %s", error.message)
    return failure_of(error).response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette raises these for paths and methods that no route serves."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        failure = invalid(f"There is nothing at {where}.", status=404, code="not_found")
    elif error.status_code == 405:
        failure = invalid(f"{where} is not served.", status=405, code="method_not_allowed")
    else:
        failure = invalid(error.detail, status=error.status_code)
    return Failure(failure.status, failure.detail, error.headers or {}).response()


def _detail(
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> ErrorDetail:
    return ErrorDetail(message=message, type=type, param=param, code=code)


INTERNAL = Failure(
    500,
    _detail(
        "The server made a mistake. Its log has the details.",
        type="server_error",
        code="internal_error",
    ),
)
