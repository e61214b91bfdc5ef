"""A loaded model in the process of its engine: backend, embedder, and what the server must know."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.cache.fingerprint import Identity
from rekindle.engine.backend import Backend, Embedder
from rekindle.generation.model_state import StateTraits
from rekindle.link.messages import LoadedModel


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    backend: Backend
    embedder: Embedder
    about: LoadedModel
    queue_size: int
    # Of stored states, from the ids of the weights and of the adapters.
    identity: Callable[[str, tuple[str, ...], StateTraits], Identity]
