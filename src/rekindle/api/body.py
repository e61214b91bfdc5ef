"""Validation of request bodies: a checked model, or a 400 that names the field.

The rules are the same for every wire format. Types are strict, unknown fields are ignored and
counted, and known fields without support are refused by name. Validation ends at the first fault
of a list: a million wrong items would make a million errors.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    RootModel,
    ValidationError,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, from_json

from rekindle.api.http.disconnect import unless_client_leaves
from rekindle.api.requests.json_values import JsonTexts
from rekindle.errors import InvalidRequest
from rekindle.json_size import check_size
from rekindle.observe.telemetry import OTHER, Telemetry

SMALL_BYTES = 32 * 2**10  # read on the event loop, in at most 0.05 s; picked
MAX_THREADS = 4  # they compete with the event loop for the interpreter's lock; picked
MAX_COUNTED_FIELDS = 100  # ignored fields that are counted by name; picked


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


T = TypeVar("T")
W = TypeVar("W", bound=BaseModel)  # a WireModel, or a RootModel of a list
Path = tuple[int | str, ...]
SHOULD_BE = "Input should be "
# Pydantic's words for these speak of Python.
WORDS = {
    "model_type": SHOULD_BE + "an object",
    "model_attributes_type": SHOULD_BE + "an object",
    "dict_type": SHOULD_BE + "an object",
}
LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}


def _let_others_run(value: T) -> T:
    """Return the value. A Python function call lets other threads have the interpreter's lock."""
    return value


# A list of models. Its validation is one long call of native code.
Items = Annotated[
    list[Annotated[T, BeforeValidator(_let_others_run)]],
    Field(fail_fast=True),
]


class BodyReader:
    """Reads bodies. The event loop does not wait for large ones: threads read them."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="body")

    async def read(self, request: Request, model: type[W]) -> W:
        data = await request.body()
        body, ignored = await self.work(request, partial(_checked, data, model))
        for name, count in ignored.items():
            self._telemetry.count_ignored_field(name, count)
        return body

    async def read_json(self, request: Request) -> dict[str, Any]:
        """Return the body before it is validated."""
        return await self.work(request, partial(_parse_json, await request.body()))

    async def work(self, request: Request, function: Callable[[], T], *, blocks: bool = False) -> T:
        """Return the result of work that takes longer the larger the request's body is.

        `blocks`: the work may also wait for a disk. Work that waits for a thread is dropped if the
        client leaves: ClientGone is raised.
        """
        is_small = len(await request.body()) <= SMALL_BYTES
        if is_small and not blocks:
            return function()
        # Reads of a slow disk must not keep the few threads from other bodies.
        threads = None if is_small else self._threads
        return await unless_client_leaves(request.receive, _in_thread(threads, function))


def fault(path: str, problem: str) -> InvalidRequest:
    """Refuse the field at `path`. `problem` continues the sentence that begins with the path."""
    return InvalidRequest(f"`{path}`{problem}", path)


def _parse_json(data: bytes) -> dict[str, Any]:
    value = _parse_any(data)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _parse_list(data: bytes) -> list[Any]:
    value = _parse_any(data)
    if not isinstance(value, list):
        raise InvalidRequest("The body must be a JSON array.")
    return value


def _parse_any(data: bytes) -> Any:
    check_size(data)
    try:
        # Stricter than the standard library: no NaN, no lone surrogates, bounded depth.
        # Looking for each value among the strings it has seen would double the time.
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


async def _in_thread(threads: ThreadPoolExecutor | None, function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, function)


def _checked(data: bytes, model: type[W]) -> tuple[W, Counter[str]]:
    """Return the body, and how often it has each field that is ignored."""
    parsed = _parse_list(data) if RootModel in model.__mro__ else _parse_json(data)
    try:
        body = model.model_validate(parsed, context=JsonTexts())
    except ValidationError as error:
        raise _first_fault(error.errors(include_url=False), parsed) from None
    ignored: Counter[str] = Counter()
    for part, path in _parts(body, ()):
        _refuse_unsupported(part, path)
        for name in part.model_extra or ():
            # The path without list indexes: `messages.annotations`.
            field = ".".join([*(step for step in path if isinstance(step, str)), name])
            is_named = len(ignored) < MAX_COUNTED_FIELDS or field in ignored
            ignored[field if is_named else OTHER] += 1
    return body, ignored


def _parts(part: BaseModel, path: Path) -> Iterator[tuple[WireModel, Path]]:
    if isinstance(part, WireModel):
        yield part, path
    for name, value in part.__dict__.items():
        if isinstance(value, WireModel):
            yield from _parts(value, (*path, name))
        elif isinstance(value, list) and value and isinstance(value[0], WireModel):
            for index, item in enumerate(value):
                if isinstance(item, WireModel):
                    yield from _parts(item, (*path, name, index))


def _refuse_unsupported(part: WireModel, path: Path) -> None:
    for name, mark in _refusals(type(part)):
        if name in part.model_fields_set and getattr(part, name):
            where = _dotted((*path, name))
            raise InvalidRequest(f"`{where}` is not supported. {mark.hint}".rstrip(), where)


@cache
def _refusals(model: type[WireModel]) -> list[tuple[str, Refused]]:
    return [
        (name, mark)
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Refused)
    ]


def _first_fault(faults: Sequence[ErrorDetails], data: Any) -> InvalidRequest:
    """Report the deepest fault within the first faulty field. A union has one fault per member."""
    paths = [_path_in(data, fault) for fault in faults]
    first = paths[0]
    deepest = max((path for path in paths if path[: len(first)] == first), key=len)
    found = [fault for fault, path in zip(faults, paths, strict=True) if path == deepest]
    param = _dotted(deepest)
    if found[0]["type"] == "missing":
        return fault(param, " is required.")
    for each in found:
        if each["type"] in LENGTHS:
            return fault(param, f" should have {_length(each)}.")
    messages = list(dict.fromkeys(WORDS.get(each["type"], each["msg"]) for each in found))
    # Prefer the message of a union member whose type fits and whose limit is exceeded.
    if limits := [message for message in messages if not message.startswith(SHOULD_BE)]:
        return fault(param, f": {limits[0]}.")
    wanted = " or ".join(message.removeprefix(SHOULD_BE) for message in messages)
    return fault(param, f" should be {wanted}.")


def _length(fault: ErrorDetails) -> str:
    words, key = LENGTHS[fault["type"]]
    limit = fault["ctx"][key]
    return f"{words} {limit} item{'' if limit == 1 else 's'}"


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
