"""Orders to the engine thread, and the events that it delivers."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.errors import RekindleError
from rekindle.generation.events import Embedded, TokenEvent
from rekindle.generation.model_state import StateTraits
from rekindle.generation.questions import Question
from rekindle.generation.request import EmbeddingRequest, GenerationRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask(Generic[T]):
    question: Question[T]
    number: int = 0  # names the question between processes; 0: none
    outcome: Future[T] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class FailAll:
    """Ends every request with the error, behind the tokens that were already sampled."""

    error: RekindleError


class Wake:
    """Makes the engine poll the cache: a transfer has finished, or there is room again."""


class Stop:
    pass


Order = GenerationRequest | EmbeddingRequest | Ask[Any] | Cancel | FailAll | Wake | Stop
OpenCache = Callable[[StateTraits, Callable[[], None]], PrefixCache]
Delivery = tuple[str, TokenEvent | Embedded | RekindleError]  # request id, event


class Outbox:
    """Events of the engine thread: collected during a step, delivered in one call."""

    def __init__(self, deliver: Callable[[list[Delivery]], None]) -> None:
        self._deliver = deliver
        self._deliveries: list[Delivery] = []

    def put(self, request_id: str, event: TokenEvent | Embedded | RekindleError) -> None:
        self._deliveries.append((request_id, event))

    def flush(self) -> None:
        if self._deliveries:
            self._deliver(self._deliveries)
            self._deliveries = []
