"""Validation of request bodies: a checked model, or a 400 that names the field.

The rules are the same for every wire format. Types are strict, unknown fields are ignored and
counted, and known fields without support are refused by name.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json

from rekindle.errors import InvalidRequest
from rekindle.observe.telemetry import Telemetry


class WireModel(BaseModel):
    """Base of all request types. Unknown fields are kept, so that they can be counted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


@dataclass(frozen=True, slots=True)
class Ignored:
    """Mark of a field that is accepted without effect."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"description": "Accepted without effect."}


@dataclass(frozen=True, slots=True)
class Refused:
    """Mark of a field that is not supported. Empty values are accepted."""

    hint: str = ""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema) | {"description": f"Not supported, refused. {self.hint}".rstrip()}


W = TypeVar("W", bound=WireModel)
Path = tuple[int | str, ...]
SHOULD_BE = "Input should be "


def fault(path: str, problem: str) -> InvalidRequest:
    """Refuse the field at `path`. `problem` continues the sentence that begins with the path."""
    return InvalidRequest(f"`{path}`{problem}", path)


async def read_body(request: Request, model: type[W], telemetry: Telemetry) -> W:
    data = parse_json(await request.body())
    try:
        body = model.model_validate(data)
    except ValidationError as error:
        raise _first_fault(error.errors(include_url=False), data) from None
    for part, path in _parts(body, ()):
        _refuse_unsupported(part, path)
        for name in part.model_extra or ():
            # The path without list indexes: `messages.annotations`.
            steps = [step for step in path if isinstance(step, str)]
            telemetry.count_ignored_field(".".join([*steps, name]))
    return body


def parse_json(data: bytes) -> dict[str, Any]:
    try:
        # Stricter than the standard library: no NaN, no lone surrogates, bounded depth.
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _parts(value: object, path: Path) -> Iterator[tuple[WireModel, Path]]:
    if isinstance(value, WireModel):
        yield value, path
        for name in value.model_fields_set & type(value).model_fields.keys():
            yield from _parts(getattr(value, name), (*path, name))
    elif isinstance(value, list) and value and isinstance(value[0], WireModel | list):
        for index, item in enumerate(value):
            yield from _parts(item, (*path, index))


def _refuse_unsupported(part: WireModel, path: Path) -> None:
    fields = type(part).model_fields
    for name in part.model_fields_set & fields.keys():
        for mark in fields[name].metadata:
            if isinstance(mark, Refused) and getattr(part, name):
                where = _dotted((*path, name))
                raise InvalidRequest(f"`{where}` is not supported. {mark.hint}".rstrip(), where)


def _first_fault(faults: Sequence[ErrorDetails], data: dict[str, Any]) -> InvalidRequest:
    """Report the deepest fault within the first faulty field. A union has one fault per member."""
    paths = [_path_in(data, fault) for fault in faults]
    first = paths[0]
    deepest = max((path for path in paths if path[: len(first)] == first), key=len)
    found = [fault for fault, path in zip(faults, paths, strict=True) if path == deepest]
    param = _dotted(deepest)
    if found[0]["type"] == "missing":
        return fault(param, " is required.")
    messages = list(dict.fromkeys(fault["msg"] for fault in found))
    # Prefer the message of a union member whose type fits and whose limit is exceeded.
    if limits := [message for message in messages if not message.startswith(SHOULD_BE)]:
        return fault(param, f": {limits[0]}.")
    wanted = " or ".join(message.removeprefix(SHOULD_BE) for message in messages)
    return fault(param, f" should be {wanted}.")


def _path_in(data: Any, fault: ErrorDetails) -> Path:
    """Return the path as the client wrote it. Pydantic's path also names union members."""
    path: list[int | str] = []
    for position, step in enumerate(fault["loc"], start=1):
        if fault["type"] == "missing" and position == len(fault["loc"]):
            path.append(step)
        elif step in _keys(data):
            path.append(step)
            data = data[step]
    return tuple(path)


def _dotted(path: Path) -> str:
    return ".".join(str(step) for step in path)


def _keys(data: object) -> Collection[int | str]:
    if isinstance(data, list):
        return range(len(data))
    return data.keys() if isinstance(data, dict) else ()
