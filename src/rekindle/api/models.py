"""The models of this server as endpoints see them: leased by name."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rekindle.chat.responder import Responder
from rekindle.generation.forgetting import Deleted, Scope
from rekindle.generation.status import EngineStatus
from rekindle.models.card import FileCard, ListedModel
from rekindle.models.card import Lease as ModelLease

Lease = ModelLease[Responder]
# Deletes a scope of every model, if the request had arrived by that time (seconds since the epoch).
ForgetScope = Callable[[Scope, float], Awaitable[Deleted]]


class Models(Protocol):
    async def lease(self, name: str | None) -> Lease:
        """Lease a model, and load it first if necessary. None: the default model.

        Raise UnknownModel, ModelLoadFailed or ShuttingDown.
        """
        ...

    def listed(self) -> Sequence[ListedModel]: ...

    def find(self, name: str) -> ListedModel:
        """Find a model by its name, with or without `:latest`. Raise UnknownModel."""
        ...

    async def file_card(self, name: str) -> FileCard | None:
        """Return what the file of a model says, loaded or not; None: that is not known.

        Raise UnknownModel.
        """
        ...

    async def load(self, name: str) -> None:
        """Load a model. Raise UnknownModel, ModelLoadFailed or ShuttingDown."""
        ...

    async def unload(self, name: str) -> None:
        """Unload a model. Raise UnknownModel, or ModelInUse while it is in use or loading."""
        ...

    def keep_alive(self, name: str | None, seconds: float) -> None:
        """Unload the model after so many idle seconds, from its next use on. inf: never.

        Holds until the model is unloaded, or until the next call. Raise UnknownModel.
        """
        ...

    def status(self, name: str | None) -> EngineStatus | None:
        """Return the engine's status, or None if the model is not loaded. Raise UnknownModel.

        The numbers may be a second old: `refresh` renews them.
        """
        ...

    async def refresh(self) -> None:
        """Ask every engine for its status, and wait a moment for the answers."""
        ...
