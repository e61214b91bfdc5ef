"""The text side of a request: from a conversation to a prompt, from a prompt to a reply."""

import asyncio
from collections.abc import Sequence
from functools import partial

from rekindle.chat.conversation import Conversation
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.embeddings import EmbeddingInput, EmbeddingMaker, Embeddings
from rekindle.chat.prompt import Prompt, PromptBuilder
from rekindle.chat.reply import ReplyOptions
from rekindle.chat.reply_stream import ReplyReader, ReplyStream
from rekindle.chat.rewarm import Rewarmer
from rekindle.chat.tool_use import ToolUses, control_tokens
from rekindle.config import Overflow
from rekindle.errors import PromptTooLong
from rekindle.generation import Engine, EngineStatus, GenerationRequest, Sampling, Tokenizer


class Responder:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        dialect: Dialect,
        default_sampling: Sampling,
        *,
        default_cache_prompt: bool = True,
        default_overflow: Overflow = Overflow.ERROR,
        rewarmer: Rewarmer | None = None,
        embedding_end_token: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling
        self.default_cache_prompt = default_cache_prompt
        self._default_overflow = default_overflow
        self._engine = engine
        self._prompts = prompts
        self._dialect = dialect
        self._rewarmer = rewarmer
        self._tool_uses = ToolUses(dialect, tokenizer, engine.check_grammar)
        self._embeddings = EmbeddingMaker(engine, tokenizer, end_token=embedding_end_token)
        self._marks = _mark_bytes(tokenizer, self._tool_uses.marks())

    async def prepare_chat(
        self,
        conversation: Conversation,
        *,
        cache_prompt: bool = True,
        overflow: Overflow | None = None,  # None: as the settings say
    ) -> Prompt:
        if (overflow or self._default_overflow) is Overflow.TRIM:
            build = partial(self._prompts.from_trimmed, n_ctx=self._engine.status().n_ctx)
        else:
            build = partial(self._prompts.from_conversation)
        return await asyncio.to_thread(build, conversation, recalls=cache_prompt)

    async def prepare_text(self, text: str, *, cache_prompt: bool = True) -> Prompt:
        return await asyncio.to_thread(self._prompts.from_text, text, recalls=cache_prompt)

    async def prepare_tokens(self, tokens: Sequence[int]) -> Prompt:
        n_ctx = self._engine.status().n_ctx
        if len(tokens) >= n_ctx:  # before anyone looks at millions of ids
            raise PromptTooLong(n_prompt=len(tokens), n_ctx=n_ctx)
        return await asyncio.to_thread(self._prompts.from_tokens, tokens)

    async def start(self, prompt: Prompt, options: ReplyOptions, *, request_id: str) -> ReplyStream:
        """Everything that can be refused is refused here, before anything is streamed."""
        use = await asyncio.to_thread(self._tool_uses.plan, prompt, options)
        tokens = self._engine.submit(
            GenerationRequest(
                id=request_id,
                prompt=prompt.tokens,
                boundaries=prompt.boundaries,
                sampling=use.sampling,
                max_tokens=options.max_tokens,
                n_top_logprobs=options.n_top_logprobs,
                cache_prompt=options.cache_prompt,
            )
        )
        is_chat = prompt.conversation is not None
        return ReplyStream(
            request_id,
            prompt,
            tokens,
            self.tokenizer,
            stop=options.stop,
            reader=ReplyReader(
                self._dialect, use.schemas, prompt.begins_in_reasoning, self._bytes_of
            )
            if is_chat
            else None,
            is_remembered=options.cache_prompt,
            on_end=self._rewarmer.after if self._rewarmer and options.cache_prompt else None,
        )

    async def embed(self, inputs: Sequence[EmbeddingInput], *, request_id: str) -> Embeddings:
        return await self._embeddings.make(inputs, request_id=request_id)

    def status(self) -> EngineStatus:
        return self._engine.status()

    def _bytes_of(self, token: int) -> bytes:
        return self._marks.get(token) or self.tokenizer.piece(token)


def _mark_bytes(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[int, bytes]:
    """Control tokens that the dialect is written with; all others are shown to nobody."""
    return {
        token: text.encode()
        for text, token in control_tokens(tokenizer).items()
        if any(text in mark for mark in marks)
    }
