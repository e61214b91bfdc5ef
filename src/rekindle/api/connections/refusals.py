"""Replies to requests that never reach the application."""

import secrets

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from rekindle.api.connections.limits import MAX_HEAD_BYTES, MAX_HEADERS
from rekindle.api.errors import Failure, failure

TOO_LARGE = failure(
    431,
    f"The request line and the headers are larger than {MAX_HEAD_BYTES} bytes.",
    "headers_too_large",
)
TOO_MANY = failure(431, f"The request has more than {MAX_HEADERS} headers.", "headers_too_large")
TOO_SLOW = failure(408, "The headers did not arrive in time.", "request_timeout")
MALFORMED = failure(400, "The request is not valid HTTP/1.1.", "invalid_http")
BUSY = failure(
    503,
    "The server has as many connections as `--max-connections` allows. Retry later.",
    "too_many_connections",
    headers={"retry-after": "1"},
)


def reply_of(refusal: Failure, path: str) -> bytes:
    """Encode a whole HTTP reply, in the wire format of `path`."""
    request_id = f"req-{secrets.token_hex(6)}"
    response = refusal.response({"path": path, "request_id": request_id})
    headers = [
        *response.raw_headers,
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
    ]
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
