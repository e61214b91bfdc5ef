"""Our errors as HTTP replies: status, code, message."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import Scope

from rekindle.api.http.error_shapes import ErrorDetail, shape_of
from rekindle.errors import (
    EngineError,
    EngineFailed,
    InvalidRequest,
    ModelInUse,
    ModelLoadFailed,
    NotSupported,
    Overloaded,
    PromptDeleted,
    PromptTooLong,
    RekindleError,
    RequestError,
    ShuttingDown,
    TierFailed,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimedOut,
)

logger = logging.getLogger(__name__)

MAX_SHOWN = 1000  # characters of a message: clients send long names; picked


class NotFound(RequestError):
    """The client names something that does not exist."""

    def __init__(self, message: str, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Forbidden(RequestError):
    """Only the administrator may do this."""


@dataclass(frozen=True, slots=True)
class Failure:
    status: int
    detail: ErrorDetail
    headers: Mapping[str, str]

    def body(self, scope: Scope) -> bytes:
        """Encode the error in the shape that clients of the request's path expect."""
        shape = shape_of(scope["path"])
        return to_json(
            shape.body(shape.status(self.status), self.detail, scope.get("request_id", ""))
        )

    def response(self, scope: Scope) -> Response:
        return Response(
            self.body(scope),
            shape_of(scope["path"]).status(self.status),
            headers=self.headers,
            media_type="application/json",
        )


def failure_of(error: BaseException, scope: Scope) -> Failure:
    match error:
        case InvalidRequest():
            return failure(400, error.message, param=error.param)
        case Forbidden():
            return failure(403, error.message, "admin_key_required")
        case NotFound():
            return failure(404, error.message, error.code, param=error.param)
        case UnknownModel():
            return failure(404, error.message, "model_not_found", param="model")
        case ModelInUse():
            return failure(409, error.message, "model_in_use", param="model")
        case PromptDeleted():
            return failure(409, error.message, "prompt_deleted")
        case NotSupported():
            return failure(501, error.message, "not_supported")
        case PromptTooLong():
            failed = failure(400, error.message, "context_length_exceeded")
            # llama-server's type, on which its clients compact. The code is OpenAI's.
            failed.detail["type"] = "exceed_context_size_error"
            failed.detail["n_prompt_tokens"] = error.n_prompt
            failed.detail["n_ctx"] = error.n_ctx
            return failed
        case Overloaded():
            headers = {"retry-after": str(error.retry_after_seconds)}
            return failure(429, error.message, "queue_full", headers=headers)
        case EngineFailed():
            headers = {"retry-after": str(error.retry_after_seconds)}
            return failure(503, error.message, "engine_failed", headers=headers)
        case ShuttingDown():
            # Another server, or the one that replaces this one, can answer at once.
            return failure(503, error.message, "shutting_down", headers={"retry-after": "1"})
        case UpstreamTimedOut():
            return failure(504, error.message, "upstream_timed_out")
        case UpstreamFailed():
            return failure(502, error.message, "upstream_failed")
        case TierFailed():
            message = f"What is stored on this server cannot be used now: {error.message}."
            return failure(503, message, "storage_failed", headers={"retry-after": "5"})
        case ModelLoadFailed():
            return failure(500, error.message, "model_load_failed")
        case EngineError():
            return failure(500, error.message, "engine_error")
        case _:
            return internal_error(scope)


def internal_error(scope: Scope) -> Failure:
    message = f"Internal server error (request {scope['request_id']}). See the server log."
    return failure(500, message, "internal_error")


def failure(
    status: int,
    message: str,
    code: str | None = None,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Failure:
    message, param = _shortened(message), _shortened(param) if param else param
    type_ = "server_error" if status >= 500 else "invalid_request_error"
    if status == 429:
        type_ = "rate_limit_error"
    elif status == 501:
        type_ = "not_supported_error"
    detail = ErrorDetail(message=message, type=type_, param=param, code=code)
    return Failure(status, detail, headers or {})


async def answer_rekindle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RekindleError)
    is_logged = isinstance(error, ModelLoadFailed)  # by the pool of models
    if isinstance(error, EngineError | UpstreamFailed) and not is_logged:
        logger.error("engine: request failed: %s", error.message)
    return failure_of(error, request.scope).response(request.scope)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer paths and methods that no route serves."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    twice = " The base URL ends with /v1; leave that out." if path.startswith("/v1/v1/") else ""
    message, code = {
        404: (f"No route matches {method} {path}.{twice}", "not_found"),
        405: (f"{method} is not allowed at {path}.", "method_not_allowed"),
    }.get(error.status_code, (error.detail, None))
    failed = failure(error.status_code, message, code, headers=error.headers)
    return failed.response(request.scope)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
