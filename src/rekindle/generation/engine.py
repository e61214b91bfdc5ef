"""Protocols of an engine, as `chat` and `api` use it."""

from collections.abc import Sequence
from typing import Protocol

from rekindle.generation.events import Embedded, TokenStream
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.status import EngineStatus, Forecast, StoredBranch, StoredPrefix


class PrefixStore(Protocol):
    """What is stored, for whoever looks at it."""

    async def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        """What a request with this prompt would find. Nothing changes, and nothing is computed."""
        ...

    async def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        """Names first, then conversations, the last used first."""
        ...

    async def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        """What is stored, as a tree of shared prefixes; parents first, of many the last used."""
        ...

    async def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        """All tokens up to the end of an entry; None: it is not there."""
        ...

    async def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        """Keeps what is stored for a while; 0: no longer. Whether it is there."""
        ...

    async def forget(self, key: str | None, *, namespace: str) -> int:
        """Drops what only this one needs, from every tier; None: everything. How many went.

        A key is one of `StoredPrefix`, or a name.
        """
        ...


class Engine(PrefixStore, Protocol):
    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queues the request. Raises PromptTooLong, Overloaded or ShuttingDown at once."""
        ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Raises Overloaded or ShuttingDown at once. Whoever stops waiting cancels the request."""
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Compiles (and keeps) the grammar; blocking. Raises InvalidRequest if it is not valid."""
        ...

    def status(self) -> EngineStatus: ...
