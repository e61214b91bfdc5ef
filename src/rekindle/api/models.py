"""The models of this server as endpoints see them: leased by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fastapi import Request, Response
from starlette.types import Scope

from rekindle.api.errors import Failure, failure_of, invalid
from rekindle.chat.responder import Responder
from rekindle.errors import EngineError, RequestError
from rekindle.generation.status import EngineStatus
from rekindle.models.card import ModelCard

MAX_NAMES_SHOWN = 20  # in an error message; picked


class UnknownModel(RequestError):
    def __init__(self, name: str, known: Sequence[str]) -> None:
        shown = ", ".join(f"`{each}`" for each in known[:MAX_NAMES_SHOWN])
        more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
        super().__init__(f"The model `{name:.200}` is not served here; there is {shown}{more}.")


class ModelInUse(RequestError):
    pass


class ModelLoadFailed(EngineError):
    pass


class ModelState(StrEnum):
    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"


@dataclass(frozen=True, slots=True)
class ListedModel:
    id: str
    created: int  # seconds since the epoch
    state: ModelState
    card: ModelCard | None  # None: not loaded


class Uses(Protocol):
    """Counter of a model's uses."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Lease:
    """One use of a model, which stays loaded until the lease ends. Ending it twice is harmless."""

    def __init__(self, responder: Responder, card: ModelCard, uses: Uses) -> None:
        self.responder = responder
        self.card = card
        self._uses = uses
        self._is_over = False
        uses.begin()

    def share(self) -> "Lease":
        """Return another lease on the same model, which ends separately."""
        return Lease(self.responder, self.card, self._uses)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._uses.end()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Models(Protocol):
    async def lease(self, name: str | None) -> Lease:
        """Lease a model, and load it first if necessary. None: the default model.

        Raise UnknownModel, ModelLoadFailed or ShuttingDown.
        """
        ...

    def listed(self) -> Sequence[ListedModel]: ...

    def find(self, name: str) -> ListedModel:
        """Raise UnknownModel if there is none."""
        ...

    async def load(self, name: str) -> None:
        """Load a model. Raise UnknownModel, ModelLoadFailed or ShuttingDown."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a model. Raise UnknownModel, or ModelInUse while it is in use or loading."""
        ...

    def status(self, name: str | None) -> EngineStatus | None:
        """Return the engine's status, or None if the model is not loaded. Raise UnknownModel."""
        ...


async def answer_model_error(request: Request, error: Exception) -> Response:
    return _failure_of(error, request.scope).response(request.scope)


def _failure_of(error: Exception, scope: Scope) -> Failure:
    match error:
        case UnknownModel():
            return invalid(error.message, status=404, param="model", code="model_not_found")
        case ModelInUse():
            return invalid(error.message, status=409, param="model", code="model_in_use")
        case _:
            failed = failure_of(error, scope)
            return Failure(failed.status, {**failed.detail, "code": "model_load_failed"})
