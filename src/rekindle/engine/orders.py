"""What the engine thread is told to do, and what it says back."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.inquiries import Answer, Question
from rekindle.errors import RekindleError
from rekindle.generation.events import Embedded, TokenEvent
from rekindle.generation.model_state import StateTraits
from rekindle.generation.request import EmbeddingRequest, GenerationRequest


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Embed:
    request: EmbeddingRequest


@dataclass(frozen=True, slots=True)
class Ask:
    id: str
    question: Question


@dataclass(frozen=True, slots=True)
class Answered:
    answer: Answer


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class FailAll:
    error: RekindleError


class Wake:
    """Something to poll: bytes have arrived, or room has."""


class Stop:
    pass


Order = Submit | Embed | Ask | Cancel | FailAll | Wake | Stop
OpenCache = Callable[[StateTraits, Callable[[], None]], PrefixCache]
# The id of a request or a question, and what became of it.
Delivery = tuple[str, TokenEvent | Embedded | Answered | RekindleError]
