"""The embeddings endpoint, on a fake: shapes, encodings, refusals."""

import base64
import struct
from typing import Any

import httpx
import openai
import pytest
from pydantic import TypeAdapter

from rekindle.api.openai.bodies import EmbeddingList
from rekindle.chat.embeddings import EmbeddingInput
from rekindle.errors import EngineError, Overloaded, RekindleError, ShuttingDown
from tests.api.client import post, serving
from tests.api.fakes import FakeResponder, Wait

N_FLOATS = 3


def embed(responder: FakeResponder | None = None, **fields: Any) -> httpx.Response:
    return post("/v1/embeddings", {"input": "hi", "model": "any", **fields}, responder)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_the_reply_has_openais_shape(path: str) -> None:
    body = {"input": ["hi", "you"], "model": "text-embedding-3-small", "user": "me"}
    reply = post(path, body).json()
    TypeAdapter(EmbeddingList).validate_python(reply, extra="forbid")
    assert reply["model"] == "tiny"
    assert reply["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [each["index"] for each in reply["data"]] == [0, 1]
    assert reply["data"][0]["embedding"] == pytest.approx([0.6, 0.8, 0])


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hi", [EmbeddingInput("input", "hi")]),
        (["hi"], [EmbeddingInput("input.0", "hi")]),
        (["a", "b"], [EmbeddingInput("input.0", "a"), EmbeddingInput("input.1", "b")]),
        ([1, 2], [EmbeddingInput("input", [1, 2])]),
        ([[1, 2], [3]], [EmbeddingInput("input.0", [1, 2]), EmbeddingInput("input.1", [3])]),
    ],
)
def test_inputs_come_in_four_forms(given: object, inputs: list[EmbeddingInput]) -> None:
    responder = FakeResponder()
    assert embed(responder, input=given).status_code == 200
    assert responder.embedded == [inputs]


def test_base64_is_little_endian_floats() -> None:
    numbers = embed(encoding_format="float").json()["data"][0]["embedding"]
    text = embed(encoding_format="base64").json()["data"][0]["embedding"]
    assert struct.unpack(f"<{N_FLOATS}f", base64.b64decode(text)) == tuple(numbers)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_fewer_dimensions_are_the_first_ones_at_length_one(encoding_format: str) -> None:
    reply = embed(input=["a", "b"], dimensions=2, encoding_format=encoding_format).json()
    for each in reply["data"]:
        vector = each["embedding"]
        if encoding_format == "base64":
            vector = struct.unpack("<2f", base64.b64decode(vector))
        assert vector == pytest.approx([0.6, 0.8])
    assert embed(dimensions=N_FLOATS).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": N_FLOATS + 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[1, 2], [3, "a"]]}, "input.1.1"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"text": "a"}}, "input"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    responder = FakeResponder()
    reply = embed(responder, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not responder.embedded


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("Full.", retry_after_seconds=7), 429),
        (ShuttingDown("Bye."), 503),
        (EngineError("llama.cpp gave up."), 500),
    ],
)
def test_failures_have_their_status(error: RekindleError, status: int) -> None:
    reply = embed(FakeResponder((error,)))
    assert reply.status_code == status
    assert reply.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)


def test_a_client_that_leaves_cancels_its_request() -> None:
    responder = FakeResponder((Wait(),))
    with serving(responder) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/embeddings", json={"input": "hi"}, timeout=3)
        assert responder.embedding_left.wait(10)


def test_the_official_sdk_reads_both_encodings() -> None:
    with (
        serving(FakeResponder()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        by_default = client.embeddings.create(model="any", input=["a", "b"])  # base64
        as_floats = client.embeddings.create(model="any", input="a", encoding_format="float")
        by_ids = client.embeddings.create(model="any", input=[[1, 2, 3]], dimensions=2)
    assert by_default.data[0].embedding == as_floats.data[0].embedding
    assert by_default.data[1].index == 1
    assert by_default.usage.total_tokens == 2
    assert by_ids.data[0].embedding == pytest.approx([0.6, 0.8])
