"""The models of this server as the wire formats see them: asked for by name, held while used."""

from collections.abc import Sequence
from typing import Protocol

from fastapi import Request, Response

from rekindle.api.errors import Failure, failure_of, invalid
from rekindle.api.responder import Responder
from rekindle.errors import ModelInUse, UnknownModel
from rekindle.generation.status import EngineStatus
from rekindle.models.card import Lease as ModelLease
from rekindle.models.card import ListedModel

Lease = ModelLease[Responder]


class Models(Protocol):
    async def lease(self, name: str | None) -> Lease:
        """Loads the model first where it must. None: the default.

        Raises UnknownModel, ModelLoadFailed or ShuttingDown.
        """
        ...

    def listed(self) -> Sequence[ListedModel]: ...

    def find(self, name: str) -> ListedModel:
        """Raises UnknownModel."""
        ...

    async def load(self, name: str) -> None:
        """Raises UnknownModel, ModelLoadFailed or ShuttingDown."""
        ...

    async def unload(self, name: str) -> None:
        """Raises UnknownModel, or ModelInUse while it answers a request or is being loaded."""
        ...

    def status(self, name: str | None) -> EngineStatus | None:
        """None: the model is not loaded. Raises UnknownModel."""
        ...


async def answer_model_error(request: Request, error: Exception) -> Response:
    return _failure_of(error).response(request.scope)


def _failure_of(error: Exception) -> Failure:
    match error:
        case UnknownModel():
            return invalid(error.message, status=404, param="model", code="model_not_found")
        case ModelInUse():
            return invalid(error.message, status=409, param="model", code="model_in_use")
        case _:
            failed = failure_of(error)
            return Failure(failed.status, {**failed.detail, "code": "model_load_failed"})
