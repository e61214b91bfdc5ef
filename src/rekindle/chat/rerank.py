"""Scores of documents for a query, by a model that ranks. Prompts are llama-server's."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.chat.embeddings import EmbeddingInput, EmbeddingMaker
from rekindle.errors import InvalidRequest, NotSupported
from rekindle.generation.tokenizer import Tokenizer

QUERY, DOCUMENT = "{query}", "{document}"


@dataclass(frozen=True, slots=True)
class RerankFormat:
    """How a query and a document become one prompt."""

    template: str | None = None  # with `{query}` and `{document}`; None: the tokens below
    between: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranking:
    scores: tuple[float, ...]  # of the documents, in their order
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Reranker:
    maker: EmbeddingMaker
    tokenizer: Tokenizer
    format: RerankFormat

    async def rank(
        self, query: str, documents: Sequence[str], *, field: str, request_id: str
    ) -> Ranking:
        """Score the documents. Raise NotSupported if the model does not rank.

        `field` holds the documents in the request, for errors.
        """
        status = self.maker.engine.status().embedder
        if status is None or not status.ranks:
            raise NotSupported("This model does not rank: its file names no rank pooling.")
        inputs = await asyncio.to_thread(self._inputs, query, documents, field, status.n_ctx)
        made = await self.maker.compute(inputs, status.n_ctx, request_id=request_id)
        scores = [float(np.frombuffer(each, "<f4")[0]) for each in made.vectors]
        return Ranking(tuple(scores), made.n_tokens)

    def _inputs(
        self, query: str, documents: Sequence[str], field: str, n_ctx: int
    ) -> list[EmbeddingInput]:
        """Make the prompts. The first one that is too long ends the work."""
        _check_length(len(self.tokenizer.tokenize(query, parse_special=False)), n_ctx, "query")
        inputs = []
        for index, document in enumerate(documents):
            path = f"{field}.{index}"
            tokens = self._tokens(query, document)
            _check_length(len(tokens), n_ctx, path)
            inputs.append(EmbeddingInput(path, tokens))
        return inputs

    def _tokens(self, query: str, document: str) -> list[int]:
        template, tokenize = self.format.template, self.tokenizer.tokenize
        if template is None:
            bos = self.tokenizer.bos_token
            return [
                *([] if bos is None else [bos]),
                *tokenize(query, parse_special=False),
                *self.format.between,
                *tokenize(document, parse_special=False),
                *self.format.end,
            ]
        if not any(each in text for text in (query, document) for each in self._controls):
            # As llama-server does it: a token may lie across the edge of a text.
            whole = template.replace(QUERY, query).replace(DOCUMENT, document)
            return tokenize(whole, parse_special=True)
        tokens: list[int] = []
        before, _, behind = template.partition(QUERY)
        middle, _, after = behind.partition(DOCUMENT)
        for text, is_ours in (
            (before, True),
            (query, False),
            (middle, True),
            (document, False),
            (after, True),
        ):
            tokens += tokenize(text, parse_special=is_ours)
        return tokens

    @property
    def _controls(self) -> tuple[str, ...]:
        """Texts that would become control tokens, or a placeholder."""
        return (*self.tokenizer.special_strings, DOCUMENT)


def _check_length(n_tokens: int, n_ctx: int, path: str) -> None:
    if n_tokens > n_ctx:
        raise InvalidRequest(
            f"`{path}` makes a prompt of {n_tokens} tokens, but at most {n_ctx} can be scored.",
            path,
        )
