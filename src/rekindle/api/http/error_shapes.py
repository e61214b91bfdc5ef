"""The shape of errors in each wire format, chosen by the path of the request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict


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


class GoogleErrorDetail(TypedDict):
    code: int
    message: str
    status: str


class GoogleErrorBody(TypedDict):
    """An error in the shape of Google's APIs."""

    error: GoogleErrorDetail


class OllamaErrorBody(TypedDict):
    error: str


def _same(status: int) -> int:
    return status


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """How errors look below `roots`, and at paths that end in one of `verbs`."""

    name: str
    roots: tuple[str, ...]
    verbs: frozenset[str] = frozenset()
    body: Callable[[int, ErrorDetail, str], object]  # of status, detail and request id
    status: Callable[[int], int] = _same  # from ours

    def covers(self, path: str) -> bool:
        is_below = any(path == root or path.startswith(f"{root}/") for root in self.roots)
        return is_below or path.rpartition(":")[2] in self.verbs


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
    503: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}

GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _openai_body(_status: int, detail: ErrorDetail, _request_id: str) -> ErrorBody:
    return ErrorBody(error=detail)


def _anthropic_body(status: int, detail: ErrorDetail, request_id: str) -> MessagesErrorBody:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    inner = MessagesErrorDetail(type=kind, message=_anthropic_message(detail))
    return MessagesErrorBody(type="error", error=inner, request_id=request_id)


def _ollama_body(_status: int, detail: ErrorDetail, _request_id: str) -> OllamaErrorBody:
    return OllamaErrorBody(error=_ollama_message(detail))


def _ollama_message(detail: ErrorDetail) -> str:
    """Use Ollama's words for a long prompt, which clients look for."""
    if detail["code"] != "context_length_exceeded":
        return detail["message"]
    n_over = detail["n_prompt_tokens"] - detail["n_ctx"] + 1
    return f"prompt too long; exceeded max context length by {n_over} tokens"


def _anthropic_status(status: int) -> int:
    # Anthropic reserves 429 for a client's own rate limit. A full queue is 529.
    return 529 if status == 429 else status


def _anthropic_message(detail: ErrorDetail) -> str:
    """Use Anthropic's words for a long prompt: agents compact the conversation on reading them."""
    if detail["code"] != "context_length_exceeded":
        return detail["message"]
    return f"prompt is too long: {detail['n_prompt_tokens']} tokens > {detail['n_ctx'] - 1} maximum"


def _google_body(status: int, detail: ErrorDetail, _request_id: str) -> GoogleErrorBody:
    name = GOOGLE_STATUSES.get(status, "INVALID_ARGUMENT")
    inner = GoogleErrorDetail(code=status, message=_google_message(detail), status=name)
    return GoogleErrorBody(error=inner)


def _google_message(detail: ErrorDetail) -> str:
    """Use Google's words for a long prompt, which clients look for."""
    if detail["code"] != "context_length_exceeded":
        return detail["message"]
    return (
        f"The input token count ({detail['n_prompt_tokens']}) exceeds the maximum number of"
        f" tokens allowed ({detail['n_ctx'] - 1})."
    )


OPENAI = ErrorShape(name="openai", roots=(), body=_openai_body)  # everywhere else
ANTHROPIC = ErrorShape(
    name="anthropic", roots=("/v1/messages",), body=_anthropic_body, status=_anthropic_status
)
GOOGLE_VERBS = frozenset(
    {
        "generateContent",
        "streamGenerateContent",
        "countTokens",
        "embedContent",
        "batchEmbedContents",
    }
)
GOOGLE = ErrorShape(
    name="google",
    roots=("/v1beta", "/v1/cachedContents"),
    verbs=GOOGLE_VERBS,  # Google's SDKs use `/v1/models/NAME:VERB` as well
    body=_google_body,
)
OLLAMA = ErrorShape(name="ollama", roots=("/api",), body=_ollama_body)
SHAPES = (ANTHROPIC, GOOGLE, OLLAMA)


def shape_of(path: str) -> ErrorShape:
    return next((shape for shape in SHAPES if shape.covers(path)), OPENAI)
