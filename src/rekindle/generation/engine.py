"""Protocols of an engine, as `chat` and `api` use it."""

from collections.abc import Sequence
from typing import Protocol

from rekindle.generation.events import Embedded, TokenStream
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.status import EngineStatus, Forecast, StoredBranch, StoredPrefix


class PrefixStore(Protocol):
    """Questions about stored prefixes, and changes to them."""

    async def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        """Return what a request with this prompt would find, without computing anything."""
        ...

    async def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        """List named prompts, then conversations, last used first."""
        ...

    async def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        """Return stored prefixes as a tree: parents first; beyond `limit`, the last used ones."""
        ...

    async def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        """Return all tokens up to the end of an entry, or None if there is no such entry."""
        ...

    async def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        """Pin an entry for `seconds`, or unpin it with 0. Return whether the entry exists."""
        ...

    async def forget(self, key: str | None, *, namespace: str) -> int:
        """Drop the entries that only this key needs, from every tier. Return how many were dropped.

        A key is that of a `StoredPrefix`, or a name. None drops every entry of the namespace.
        """
        ...


class Engine(PrefixStore, Protocol):
    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue the request. Raises PromptTooLong, Overloaded or ShuttingDown at once."""
        ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Compute embeddings. Raises Overloaded or ShuttingDown at once.

        Cancelling the call cancels the request.
        """
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile the grammar and keep it. Blocks. Raises InvalidRequest if it is not valid."""
        ...

    def status(self) -> EngineStatus: ...
