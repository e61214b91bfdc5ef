"""Query parameters that several endpoints read."""

from fastapi import Request

from rekindle.api.body import fault


def model_wanted(request: Request) -> str | None:
    return request.query_params.get("model")


def whole_number(request: Request, name: str, *, default: int, least: int = 0, most: int) -> int:
    value = request.query_params.get(name, str(default))
    # The length is checked first: converting a very long number is slow.
    is_number = value.isascii() and value.isdecimal() and len(value) < 10
    if not is_number or not least <= int(value) <= most:
        raise fault(name, f" should be {least} to {most}.")
    return int(value)
