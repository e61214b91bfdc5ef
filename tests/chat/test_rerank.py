"""Prompts of a query with a document, and their scores."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rekindle.chat.embeddings import EmbeddingInput, EmbeddingMaker
from rekindle.chat.rerank import Ranking, Reranker, RerankFormat
from rekindle.errors import InvalidRequest, NotSupported
from rekindle.generation.events import Embedded
from rekindle.generation.request import EmbeddingRequest
from rekindle.generation.status import EngineStatus
from tests.chat.test_embeddings import EmbeddingEngine
from tests.chat.test_responder import ByteTokenizer

TEMPLATE = "<end>Q: {query} D: {document}<end>"


class Marking(ByteTokenizer):
    """Parses its control token, and begins prompts with byte 1."""

    bos_token = 1

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if not parse_special:
            return list(text.encode())
        before, mark, after = text.partition("<end>")
        rest = [256, *self.tokenize(after, parse_special=True)] if mark else []
        return [*before.encode(), *rest]


class RankingEngine(EmbeddingEngine):
    """Scores a text by its length."""

    ranks = True

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        self.embedded.append(request)
        return Embedded(tuple(np.array([len(each)], "<f4").tobytes() for each in request.inputs))

    def status(self) -> EngineStatus:
        status = super().status()
        assert status.embedder is not None
        return replace(status, embedder=replace(status.embedder, n_ctx=64, ranks=self.ranks))


def rank(engine: RankingEngine, form: RerankFormat, query: str = "q", *documents: str) -> Ranking:
    tokenizer = Marking()
    reranker = Reranker(EmbeddingMaker(engine, tokenizer, end_token=None), tokenizer, form)
    work = reranker.rank(query, documents or ("d",), field="documents", request_id="id")
    return asyncio.run(work)


def test_scores_have_the_order_of_the_documents() -> None:
    engine = RankingEngine()
    ranking = rank(engine, RerankFormat(None, (2, 3), (2,)), "q", "dd", "d")
    assert engine.embedded[0].inputs == ((1, *b"q", 2, 3, *b"dd", 2), (1, *b"q", 2, 3, *b"d", 2))
    assert ranking == Ranking((7.0, 6.0), 13)


def test_the_files_template_surrounds_the_texts() -> None:
    engine = RankingEngine()
    rank(engine, RerankFormat(TEMPLATE), "q", "d")
    assert engine.embedded[0].inputs == ((256, *b"Q: q D: d", 256),)


@pytest.mark.parametrize(
    ("query", "document", "text"),
    [
        ("<end>", "d", b"Q: <end> D: d"),
        ("q", "<end>", b"Q: q D: <end>"),
        ("{document}", "d", b"Q: {document} D: d"),
        ("q", "{query}", b"Q: q D: {query}"),
    ],
)
def test_control_strings_and_placeholders_in_texts_stay_text(
    query: str, document: str, text: bytes
) -> None:
    engine = RankingEngine()
    rank(engine, RerankFormat(TEMPLATE), query, document)
    assert engine.embedded[0].inputs == ((256, *text, 256),)


def test_a_document_that_is_too_long_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        rank(RankingEngine(), RerankFormat(), "q", "d", "d" * 64)
    assert refused.value.param == "documents.1"


def test_a_model_without_rank_pooling_is_refused() -> None:
    engine = RankingEngine()
    engine.ranks = False
    with pytest.raises(NotSupported):
        rank(engine, RerankFormat())


def test_a_reranker_makes_no_embeddings() -> None:
    maker = EmbeddingMaker(RankingEngine(), Marking(), end_token=None)
    with pytest.raises(InvalidRequest, match="reranker"):
        asyncio.run(maker.make([EmbeddingInput("input", "a")], request_id="id"))
