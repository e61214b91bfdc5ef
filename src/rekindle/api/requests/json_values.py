"""JSON that a request passes on: schemas, arguments of calls, values for the template.

Code that reads such a value recurses, and some of it computes with its numbers. So depth and
numbers are bounded where the value arrives.
"""

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from rekindle.json_size import is_too_large

MAX_DEPTH = 64  # objects and arrays within each other; picked
# JSON in a string of a request, where the bounds of a body do not see it. All are picked: agents'
# calls have about ten values each.
MAX_TEXT_MEMBERS = 20_000  # objects, arrays and keys of one text
MAX_TEXT_VALUES = 100_000  # items and members of one text
MAX_ALL_VALUES = 500_000  # in all texts of a request
MAX_NUMBER = int(sys.float_info.max)

V = TypeVar("V")


def _whole(value: object) -> object:
    """Return 40.0 as 40: Google's SDK and some clients of Ollama send it for an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Whole = Annotated[V, BeforeValidator(_whole)]


@dataclass(slots=True)
class JsonTexts:
    """The JSON in the strings of one request, as far as it has been read."""

    n_values: int = 0


def check_json(value: V) -> V:
    """Return the value. Raise a fault for one that is nested too deeply or has a huge number."""
    _check(value)
    return value


def _check(value: object) -> int:
    """Return how many values there are, with the inner ones."""
    n_values = 0
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is dict:
                inner += each.values()
            elif kind is list:
                inner += each
            elif (kind is int or kind is float) and abs(each) > MAX_NUMBER:
                raise PydanticCustomError(
                    "number_too_large", "This JSON has a number beyond the range of a double"
                )
        n_values += len(level)
        if not inner:
            return n_values
        level = inner
    raise _too_deep()


def check_arguments(source: str, texts: JsonTexts) -> None:
    """Check the arguments of a call. Text that is no JSON is shown to the model as it is."""
    if is_too_large(source.encode("utf-8", "replace"), MAX_TEXT_MEMBERS, MAX_TEXT_VALUES):
        raise PydanticCustomError(
            "json_too_large",
            "This JSON has more than {members} objects, arrays and keys, or more than {values}"
            " values",
            {"members": f"{MAX_TEXT_MEMBERS:,}", "values": f"{MAX_TEXT_VALUES:,}"},
        )
    try:
        value = json.loads(source)  # as the template and the memory of turns read it
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return
    texts.n_values += _check(value)
    if texts.n_values > MAX_ALL_VALUES:
        raise PydanticCustomError(
            "json_too_large",
            "The arguments of all calls have more than {values} values",
            {"values": f"{MAX_ALL_VALUES:,}"},
        )


def _checked_arguments(source: str, info: ValidationInfo) -> str:
    check_arguments(source, texts_of(info))
    return source


def texts_of(info: ValidationInfo) -> JsonTexts:
    """Return the texts of the request that is being validated."""
    return info.context if isinstance(info.context, JsonTexts) else JsonTexts()


JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]
ArgumentsText = Annotated[str, AfterValidator(_checked_arguments)]


def _too_deep() -> PydanticCustomError:
    return PydanticCustomError(
        "nested_too_deeply",
        "This JSON has more than {depth} objects and arrays within each other",
        {"depth": MAX_DEPTH},
    )
