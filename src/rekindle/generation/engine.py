"""Protocol of an engine, as `chat` and `api` use it."""

from concurrent.futures import Future
from typing import Protocol, TypeVar

from rekindle.generation.events import Embedded, TokenStream
from rekindle.generation.questions import Question
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar
from rekindle.generation.status import EngineStatus

T = TypeVar("T")


class Engine(Protocol):
    # Whether a call under a grammar with a `landing` ends before its reply is cut off.
    finishes_calls: bool

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Queue the request. Raises PromptTooLong, Overloaded or ShuttingDown at once."""
        ...

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        """Compute embeddings. Raises Overloaded or ShuttingDown at once.

        Cancelling the call cancels the request.
        """
        ...

    async def ask(self, question: Question[T]) -> T:
        """Return the answer of the thread that owns the prefixes. Raises EngineError."""
        ...

    def check_grammar(self, grammar: Grammar) -> Future[None]:
        """Compile the grammar and keep it. The future has InvalidRequest if it is not valid.

        Any thread may call it. Cancelling the future drops the work.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits, apart from those in the background."""
        ...

    def status(self) -> EngineStatus:
        """Return what is known now. The numbers may be a second old; `refresh` renews them."""
        ...

    async def refresh(self) -> None: ...
