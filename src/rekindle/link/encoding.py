"""Messages to bytes and back: msgpack, typed by msgspec (why: docs/decisions/0030)."""

import os
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from rekindle import errors
from rekindle.errors import EngineError, InvalidRequest, RekindleError
from rekindle.generation.events import CachedSpan, Spans
from rekindle.generation.questions import Question
from rekindle.link.messages import Error, Order, Report

T = TypeVar("T")


def _from_wire(kind: type, value: Any) -> Any:
    if kind is Spans:
        return Spans(msgspec.convert(value, tuple[CachedSpan, ...]))
    if issubclass(kind, Path):
        return Path(os.fsdecode(value))
    raise NotImplementedError(kind)


def _to_wire(value: Any) -> Any:
    if isinstance(value, Path):
        return os.fsencode(value)  # not every path is text
    raise NotImplementedError(type(value))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_from_wire)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report, dec_hook=_from_wire)

_numbered = {each.__name__: each for each in get_args(Order) if "number" in each.__annotations__}

encode = _encoder.encode
decode_order = _orders.decode
decode_report = _reports.decode


def kind_and_number(message: bytes) -> tuple[type[Order] | None, int]:
    """Return class and number of an order that cannot be decoded; None: it has no number."""
    match msgspec.msgpack.decode(message):
        case [str(tag), int(number), *_]:
            return _numbered.get(tag), number
    return None, 0


def decode_answer(question: Question[T], value: msgspec.Raw) -> T:
    """Decode the answer as the type that the question's class names."""
    [kind] = get_args(type(question).__orig_bases__[0])  # type: ignore[attr-defined]
    answer: T = msgspec.msgpack.decode(value, type=kind, dec_hook=_from_wire)
    return answer


def error_message(error: RekindleError) -> Error:
    return Error(type(error).__name__, error.message, getattr(error, "param", None))


def error_of(error: Error) -> RekindleError:
    """Return the error as an instance of its class, or as an EngineError of the same text."""
    kind = getattr(errors, error.name, None)
    if kind is InvalidRequest:
        return InvalidRequest(error.message, error.param)
    if isinstance(kind, type) and issubclass(kind, RekindleError):
        try:
            return kind(error.message)
        except TypeError:  # it takes more arguments
            return EngineError(error.message)
    return EngineError(error.message)
