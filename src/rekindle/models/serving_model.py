"""A loaded model, the same for every engine, and the arguments of its factories.

`llama_model` and `vllm_model` are the factories: each returns a `ServingModel`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.responder import Responder
from rekindle.config.settings import Settings
from rekindle.generation.engine import Engine
from rekindle.generation.forgetting import Tombstones
from rekindle.models.card import ModelCard
from rekindle.observe.request_record import Observer


class ServingEngine(Engine, Protocol):
    """An engine with its life: started once on the event loop, shut down once."""

    def start(self) -> None: ...

    async def shut_down(self, grace_seconds: float) -> None:
        """Refuse new requests, and wait for running ones; cut them after `grace_seconds`."""
        ...

    def cut(self) -> None:
        """End every request now with ShuttingDown."""
        ...


@dataclass(frozen=True, slots=True)
class ServingModel:
    card: ModelCard
    responder: Responder
    engine: ServingEngine
    n_bytes: Callable[[], int]  # memory for the weights and for the rows of a full context
    close: Callable[[], None]  # stores what the slots hold, then frees everything; blocks


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Parts that all models of one server share."""

    settings: Settings
    accounts: Accounts
    observers: tuple[Observer, ...]
    forgotten: Tombstones


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Callbacks of a load. They run on the thread that loads."""

    on_weights: Callable[[float], bool]  # fraction read; False: give up
    on_digest: Callable[[int, int], None]  # bytes hashed, and bytes in all


SILENT = LoadProgress(on_weights=lambda _: True, on_digest=lambda _done, _total: None)
