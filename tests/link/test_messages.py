"""Every message arrives as it was sent."""

import dataclasses
import enum
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from rekindle import errors
from rekindle.errors import EngineError, InvalidRequest, RekindleError
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.link.encoding import decode_order, decode_report, encode, error_message, error_of
from rekindle.link.messages import Answer, Error, Order, Report

# Built with more than a message, so never by the engine process.
OF_THE_SERVER = {"PromptTooLong", "UnknownModel", "Overloaded", "EngineFailed"}


def filled(kind: Any, variant: int) -> Any:
    """Return a value of the type with every field set. Variants choose other union members."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        members = [arg for arg in args if arg is not type(None)]
        return filled(members[variant % len(members)], variant)
    if kind is Spans:
        return Spans((CachedSpan(CacheSource.DISK, 0, 5), CachedSpan(CacheSource.LIVE, 5, 9)))
    if origin is tuple:
        items = [args[0], args[0]] if len(args) == 2 and args[1] is ... else args
        return tuple(filled(item, variant + index) for index, item in enumerate(items))
    if origin is list:
        return [filled(args[0], index) for index in range(12)]
    if origin in (dict, Mapping):
        return {filled(args[0], variant): filled(args[1], variant)}
    if hasattr(kind, "__supertype__"):
        return filled(kind.__supertype__, variant)
    if issubclass(kind, enum.Enum):
        return list(kind)[variant % len(kind)]
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        names = (
            kind.__struct_fields__
            if issubclass(kind, msgspec.Struct)
            else [each.name for each in dataclasses.fields(kind)]
        )
        values = {name: filled(hints[name], variant) for name in names}
        return kind(**values)
    if issubclass(kind, Path):
        return Path("/a/b c.gguf")
    plain = {
        int: 7 + variant,
        float: 0.5 + variant,
        str: f"text é {variant}",
        bytes: b"\x00\xff",
        bool: True,
    }
    return plain[kind]


@pytest.mark.parametrize("variant", range(6))
@pytest.mark.parametrize("kind", get_args(Order), ids=lambda kind: kind.__name__)
def test_every_order_arrives_as_it_was_sent(kind: type, variant: int) -> None:
    order = filled(kind, variant)
    assert decode_order(encode(order)) == order


@pytest.mark.parametrize("variant", range(6))
@pytest.mark.parametrize(
    "kind",
    [each for each in get_args(Report) if each is not Answer],
    ids=lambda kind: kind.__name__,
)
def test_every_report_arrives_as_it_was_sent(kind: type, variant: int) -> None:
    report = filled(kind, variant)
    arrived = decode_report(encode(report))
    assert arrived == report
    assert repr(arrived) == repr(report), "equal values of another class"


def test_an_answer_arrives_encoded() -> None:
    report = decode_report(encode(Answer(3, msgspec.Raw(encode(("a", 1))))))
    assert isinstance(report, Answer)
    assert msgspec.msgpack.decode(report.value) == ["a", 1]


def error_classes() -> list[type[RekindleError]]:
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    return [each for each in classes if issubclass(each, RekindleError)]


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_class_and_its_message(kind: type[RekindleError]) -> None:
    if kind.__name__ in OF_THE_SERVER:
        told = Error(kind.__name__, "what happened")
        assert type(error_of(told)) is EngineError
        assert error_of(told).message == "what happened"
        return
    error = kind("what happened")
    assert type(error_of(error_message(error))) is kind
    assert error_of(error_message(error)).message == "what happened"


def test_an_invalid_request_keeps_the_field_it_names() -> None:
    arrived = error_of(error_message(InvalidRequest("no", "messages.0.role")))
    assert isinstance(arrived, InvalidRequest)
    assert arrived.param == "messages.0.role"


def test_an_unknown_error_is_an_engine_error_with_its_message() -> None:
    assert type(error_of(Error("Sequence", "what happened"))) is EngineError
    assert error_of(Error("NoSuchClass", "what happened")).message == "what happened"
