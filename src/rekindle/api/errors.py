"""Errors as clients see them, in OpenAI's shape or, on its paths, in Anthropic's."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NotRequired

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Scope
from typing_extensions import TypedDict

from rekindle.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RekindleError,
    RequestError,
    ShuttingDown,
    UpstreamFailed,
    UpstreamTimedOut,
)

logger = logging.getLogger(__name__)


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None
    # llama-server's additions for a prompt that is too long.
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class ErrorBody(TypedDict):
    error: ErrorDetail


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorBody(TypedDict):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


ANTHROPIC_ROOT = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
    503: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class NotFound(RequestError):
    """The client names something that does not exist."""

    def __init__(self, message: str, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    detail: ErrorDetail
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self, scope: Scope) -> bytes:
        """Encode the error in the shape that clients of the request's path expect."""
        if not is_anthropic(scope):
            return to_json(ErrorBody(error=self.detail))
        detail = MessagesErrorDetail(
            type=ANTHROPIC_TYPES.get(_anthropic_status(self), "invalid_request_error"),
            message=_anthropic_message(self.detail),
        )
        return to_json(
            MessagesErrorBody(type="error", error=detail, request_id=scope["request_id"])
        )

    def response(self, scope: Scope) -> Response:
        status = _anthropic_status(self) if is_anthropic(scope) else self.status
        return Response(
            self.body(scope), status, headers=self.headers, media_type="application/json"
        )


def is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == ANTHROPIC_ROOT or path.startswith(f"{ANTHROPIC_ROOT}/")


def failure_of(error: BaseException, scope: Scope) -> Failure:
    match error:
        case InvalidRequest():
            return invalid(error.message, param=error.param)
        case NotFound():
            return invalid(error.message, status=404, param=error.param, code=error.code)
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
            # Another server, or the one that replaces this one, can answer at once.
            return _server_error(503, error, "shutting_down", {"retry-after": "1"})
        case UpstreamTimedOut():
            return _server_error(504, error, "upstream_timed_out")
        case UpstreamFailed():
            return _server_error(502, error, "upstream_failed")
        case EngineError():
            return _server_error(500, error, "engine_error")
        case _:
            return internal_error(scope)


def internal_error(scope: Scope) -> Failure:
    message = f"Internal server error (request {scope['request_id']}). See the server log."
    return Failure(500, _detail(message, type="server_error", code="internal_error"))


def _server_error(
    status: int, error: RekindleError, code: str, headers: Mapping[str, str] | None = None
) -> Failure:
    return Failure(status, _detail(error.message, type="server_error", code=code), headers or {})


def invalid(
    message: str, *, status: int = 400, param: str | None = None, code: str | None = None
) -> Failure:
    return Failure(status, _detail(message, param=param, code=code))


async def answer_rekindle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RekindleError)
    if isinstance(error, EngineError | UpstreamFailed):
        logger.error("engine: request failed: %s", error.message)
    return failure_of(error, request.scope).response(request.scope)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer paths and methods that no route serves."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        failure = invalid(f"No route matches {where}.", status=404, code="not_found")
    elif error.status_code == 405:
        failure = invalid(
            f"{request.method} is not allowed at {request.url.path}.",
            status=405,
            code="method_not_allowed",
        )
    else:
        failure = invalid(error.detail, status=error.status_code)
    return Failure(failure.status, failure.detail, error.headers or {}).response(request.scope)


def _anthropic_status(failure: Failure) -> int:
    # Anthropic reserves 429 for a client's own rate limit. A full queue is 529.
    return 529 if failure.status == 429 else failure.status


def _anthropic_message(detail: ErrorDetail) -> str:
    """Use Anthropic's words for a long prompt: agents compact the conversation on reading them."""
    if detail["code"] != "context_length_exceeded":
        return detail["message"]
    return f"prompt is too long: {detail['n_prompt_tokens']} tokens > {detail['n_ctx'] - 1} maximum"


def _detail(
    message: str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> ErrorDetail:
    return ErrorDetail(message=message, type=type, param=param, code=code)
