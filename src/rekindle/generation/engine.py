"""Protocols of an engine, as `chat` and `api` use it."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rekindle.generation.events import Embedded, TokenStream
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.status import EngineStatus, Forecast, StoredBranch, StoredPrefix

T = TypeVar("T")


class PrefixStore(Protocol):
    """Questions about live and stored prefixes, and changes to them. Asked with `Engine.ask`."""

    def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        """Return what a request with this prompt would find, without computing anything."""
        ...

    def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        """List named prompts, then conversations, last used first."""
        ...

    def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        """Return stored prefixes as a tree: parents first; beyond `limit`, the last used ones."""
        ...

    def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        """Return all tokens up to the end of an entry, or None if there is no such entry."""
        ...

    def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        """Pin an entry for `seconds`, or unpin it with 0. Return whether the entry exists."""
        ...

    def forget(self, key: str | None, *, namespace: str) -> int:
        """Drop the entries that only this key needs, from every tier. Return how many were dropped.

        A key is that of a `StoredPrefix`, or a name. None drops every entry of the namespace.
        """
        ...


class Engine(Protocol):
    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue the request. Raises PromptTooLong, Overloaded or ShuttingDown at once."""
        ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Compute embeddings. Raises Overloaded or ShuttingDown at once.

        Cancelling the call cancels the request.
        """
        ...

    async def ask(self, question: Callable[[PrefixStore], T]) -> T:
        """Call `question` on the thread that owns the prefixes. Return its answer."""
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile the grammar and keep it. Blocks. Raises InvalidRequest if it is not valid."""
        ...

    def status(self) -> EngineStatus: ...
