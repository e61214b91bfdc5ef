"""JSON as the wire formats write it."""

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii

from fastapi import Response
from pydantic_core import to_json


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), media_type="application/json", headers=headers)


def quoted(text: str) -> bytes:
    """Encode a string as an ASCII JSON string, for use inside a server-sent event.

    Some clients split lines as `str.splitlines` does, and would cut at a raw U+2028.
    """
    return encode_basestring_ascii(text).encode("ascii")
