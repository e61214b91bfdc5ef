"""llama-server's own shapes of embeddings and scores."""

from typing import Any

import pytest

from tests.api.client import post
from tests.api.fakes import FakeResponder


def embedding(**fields: Any) -> Any:
    return post("/embedding", fields).json()


def norm(p: int, vector: list[float]) -> float:
    return float(sum(abs(each) ** p for each in vector) ** (1 / p))


def test_an_embedding_is_a_list_of_lists() -> None:
    [entry] = embedding(content="hi")
    assert entry["index"] == 0
    [vector] = entry["embedding"]
    assert vector == pytest.approx([0.6, 0.8, 0])
    assert [each["index"] for each in embedding(content=["a", "b"])] == [0, 1]
    assert len(embedding(input=[1, 2, 3], content="other")) == 1


@pytest.mark.parametrize("p", [1, 2, 3, 64])
def test_vectors_have_the_norm_that_the_client_asks_for(p: int) -> None:
    [[vector]] = [entry["embedding"] for entry in embedding(content="hi", embd_normalize=p)]
    assert norm(p, vector) == pytest.approx(1.0)


def test_norm_0_scales_the_largest_number() -> None:
    [[vector]] = [entry["embedding"] for entry in embedding(content="hi", embd_normalize=0)]
    assert vector == pytest.approx([24570, 32760, 0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "content"),
        ({"content": ""}, "content"),
        ({"content": []}, "content"),
        ({"content": [1.5]}, "content.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"content": "a", "embd_normalize": -1}, "embd_normalize"),
        ({"content": "a", "embd_normalize": 65}, "embd_normalize"),
    ],
)
def test_wrong_embedding_requests_are_errors(fields: dict[str, Any], param: str) -> None:
    reply = post("/embedding", fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def ranked(path: str = "/rerank", **fields: Any) -> Any:
    responder = FakeResponder()
    responder.ranks = True
    reply = post(path, {"query": "q", **fields}, responder)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_come_in_the_order_of_their_scores(path: str) -> None:
    assert ranked(path, documents=["a", "ccc", "bb"], model="any") == {
        "model": "tiny",
        "object": "list",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "results": [
            {"index": 1, "relevance_score": 3.0},
            {"index": 2, "relevance_score": 2.0},
            {"index": 0, "relevance_score": 1.0},
        ],
    }


def test_top_n_keeps_the_best() -> None:
    results = ranked(documents=["a", "ccc", "bb"], top_n=2)["results"]
    assert [each["index"] for each in results] == [1, 2]
    assert ranked(documents=["a"], top_n=9)["results"] == [{"index": 0, "relevance_score": 1.0}]


def test_texts_get_the_shape_of_tei() -> None:
    assert ranked(texts=["a", "bb"]) == [{"index": 1, "score": 2.0}, {"index": 0, "score": 1.0}]
    with_text = ranked(texts=["a", "bb"], return_text=True, top_n=1)
    assert with_text == [{"index": 1, "score": 2.0, "text": "bb"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": 1, "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "texts": []}, "texts"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": [1]}, "documents.0"),
        ({"query": "q", "documents": ["a"], "top_n": "1"}, "top_n"),
    ],
)
def test_wrong_rerank_requests_are_errors(fields: dict[str, Any], param: str) -> None:
    reply = post("/rerank", fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_model_that_does_not_rank_is_refused() -> None:
    reply = post("/rerank", {"query": "q", "documents": ["a"]})
    assert reply.status_code == 501
    assert reply.json()["error"]["type"] == "not_supported_error"
