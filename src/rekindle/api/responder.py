"""What the wire formats ask of `chat`: the part of its Responder that they use."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rekindle.chat.accounts.sessions import Sessions
from rekindle.chat.conversation import Conversation
from rekindle.chat.embeddings import EmbeddingInput, Embeddings
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import ReplyEvent, ReplyOptions
from rekindle.config import Overflow
from rekindle.generation.engine import PrefixStore
from rekindle.generation.request import Sampling
from rekindle.generation.status import EngineStatus, Forecast
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Miss


class ReplyStream(Protocol):
    """Ends after `ReplyDone`, or raises a RekindleError."""

    def __aiter__(self) -> AsyncIterator[ReplyEvent]: ...

    def close(self) -> None: ...


class Responder(Protocol):
    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def default_sampling(self) -> Sampling: ...

    @property
    def default_cache_prompt(self) -> bool: ...

    async def prepare_chat(
        self,
        conversation: Conversation,
        *,
        cache_prompt: bool = True,
        overflow: Overflow | None = None,
        namespace: str = "",
    ) -> Prompt: ...

    async def prepare_text(
        self, text: str, *, cache_prompt: bool = True, namespace: str = ""
    ) -> Prompt: ...

    async def prepare_tokens(self, tokens: Sequence[int], *, namespace: str = "") -> Prompt: ...

    async def look_up(self, prompt: Prompt, *, session: str) -> tuple[Forecast, Miss | None]: ...

    async def start(
        self, prompt: Prompt, options: ReplyOptions, *, request_id: str
    ) -> ReplyStream: ...

    async def embed(self, inputs: Sequence[EmbeddingInput], *, request_id: str) -> Embeddings: ...

    @property
    def store(self) -> PrefixStore: ...

    @property
    def sessions(self) -> Sessions: ...

    def status(self) -> EngineStatus: ...
