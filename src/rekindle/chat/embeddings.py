"""The text side of an embedding request: texts and token ids become the engine's inputs.

Control tokens are not parsed and turns are not remembered, so equal texts have equal vectors.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import InvalidRequest, RekindleError
from rekindle.generation.engine import Engine
from rekindle.generation.request import EmbeddingRequest
from rekindle.generation.tokenizer import Tokenizer

_log = logging.getLogger("rekindle.request")


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    path: str  # of the field in the request, for errors
    content: str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Embeddings:
    vectors: tuple[bytes, ...]  # as in generation.Embedded
    n_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingMaker:
    engine: Engine
    tokenizer: Tokenizer
    end_token: int | None  # added to every text

    async def make(
        self, inputs: Sequence[EmbeddingInput], *, request_id: str, truncates: bool = False
    ) -> Embeddings:
        status = self.engine.status().embedder
        if status is None:
            raise InvalidRequest("This server makes no embeddings.")
        if status.ranks:
            raise InvalidRequest("This model is a reranker and makes no embeddings.")
        return await self.compute(inputs, status.n_ctx, request_id=request_id, truncates=truncates)

    async def compute(
        self,
        inputs: Sequence[EmbeddingInput],
        n_ctx: int,
        *,
        request_id: str,
        truncates: bool = False,
    ) -> Embeddings:
        """Compute what the model's file says: vectors, or scores. `n_ctx`: the longest input."""
        tokens = await asyncio.to_thread(
            lambda: tuple(self._tokens(each, n_ctx, truncates=truncates) for each in inputs)
        )
        n_tokens = sum(map(len, tokens))
        began = time.monotonic()
        outcome = "cancelled"
        try:
            embedded = await self.engine.embed(EmbeddingRequest(id=request_id, inputs=tokens))
            outcome = "done"
        except RekindleError as error:
            outcome = f"failed: {error.message}"
            raise
        finally:
            _log.info(
                "request=%s inputs=%d tokens=%d ms=%.0f finish=%s",
                request_id,
                len(inputs),
                n_tokens,
                (time.monotonic() - began) * 1e3,
                outcome,
            )
        return Embeddings(embedded.vectors, n_tokens)

    def _tokens(self, one: EmbeddingInput, n_ctx: int, *, truncates: bool) -> tuple[int, ...]:
        content = one.content
        limit = n_ctx if truncates else None
        tokens = self._from_text(content, one.path, limit) if isinstance(content, str) else content
        if not content or not tokens:
            raise InvalidRequest(f"`{one.path}` must not be empty.", one.path)
        if len(tokens) > n_ctx:  # before millions of ids are checked
            raise InvalidRequest(
                f"`{one.path}` has {len(tokens)} tokens, but an embedding is made of at most"
                f" {n_ctx}.",
                one.path,
            )
        if tokens is content:  # the client's own ids
            self._check(tokens, one.path)
        return tuple(tokens)

    def _from_text(self, text: str, path: str, limit: int | None) -> list[int]:
        try:
            tokens = self.tokenizer.tokenize(text, parse_special=False)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, path) from error
        start, end = (
            [] if token is None else [token] for token in (self.tokenizer.bos_token, self.end_token)
        )
        if limit is not None:
            del tokens[max(limit - len(start) - len(end), 0) :]
        return [*start, *tokens, *end]

    def _check(self, tokens: Sequence[int], path: str) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self.tokenizer.n_vocab:
                where = f"{path}.{index}"
                raise InvalidRequest(f"`{where}`: {token} is not a token of this model.", where)
