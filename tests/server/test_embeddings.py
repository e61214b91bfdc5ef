"""Embeddings of the real server: they never cost a conversation its cache."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import mul
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import TinyModels
from tests.support.clear_replies import COUNTING
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client, assistant, prose, system, user

N_TRIES = 5  # a stream without a core ends after the embeddings
TEXTS = ["A cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose again."]


def vectors(client: openai.OpenAI, inputs: Any, **fields: Any) -> list[list[float]]:
    reply = client.embeddings.create(model="any", input=inputs, **fields)
    return [each.embedding for each in reply.data]


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_a_batch_gives_the_same_embeddings_as_single_texts_in_both_encodings(
    client: openai.OpenAI,
) -> None:
    together = vectors(client, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        [alone] = vectors(client, text, encoding_format="float")
        assert difference(alone, vector) < 1e-5
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    cat, kitten, rates = together
    assert sum(map(mul, cat, kitten)) > sum(map(mul, cat, rates))
    assert difference(cat, kitten) > 1e-3


def test_token_ids_give_the_same_embedding_as_their_text(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    reply = httpx.post(f"{server.url}/tokenize", json={"content": TEXTS[0], "add_special": True})
    tokens = reply.json()["tokens"]
    [from_text] = vectors(client, TEXTS[0])
    assert vectors(client, tokens) == vectors(client, [tokens]) == [from_text]
    [short] = vectors(client, tokens, dimensions=10)
    assert len(short) == 10
    assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
    counted = client.embeddings.create(model="any", input=tokens).usage
    assert counted.prompt_tokens == counted.total_tokens == len(tokens)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["fine", ""], "`input.1` must not be empty"),
        (["fine", "word " * 9000], r"`input.1` has 9\d\d\d tokens, .* at most 8192"),
        ([[1, 2], [10**7]], "`input.1.0`: 10000000 is not a token"),
    ],
)
def test_an_input_that_cannot_be_embedded_is_named_in_the_error(
    client: openai.OpenAI, given: Any, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        vectors(client, given)


def test_the_log_has_a_line_for_each_request(client: openai.OpenAI, server: ServerProcess) -> None:
    client.embeddings.create(model="any", input=TEXTS, extra_headers={"x-request-id": "mine"})
    [line] = [line for line in server.log.splitlines() if "request=mine." in line]
    assert "inputs=3 tokens=" in line
    assert line.endswith("finish=done")


def second_turn(*arguments: str, between: list[Any]) -> tuple[object, ...]:
    """Return the second turn of a conversation on a new server with one slot."""
    with serve(*arguments, "--parallel", "1") as server, closing(Client(server.url)) as client:
        messages = [system("a", 300), user(prose("b", 40))]
        first = client.chat(messages, max_tokens=12)
        for given in between:
            client.post("/v1/embeddings", {"input": given})
        messages += [assistant(first.text), user("Go on.")]
        second = client.chat(messages, max_tokens=12)
        assert second.n_cached >= len(first.prompt)
        return first.text, second.prompt, second.text, second.spans


@pytest.mark.parametrize(
    "architecture", [pytest.param(None, marks=pytest.mark.long), TinyArchitecture.QWEN35]
)
def test_embeddings_do_not_change_a_running_conversation(
    architecture: TinyArchitecture | None, tiny_models: TinyModels, embedded_model: Path
) -> None:
    arguments = [str(tiny_models(architecture) if architecture else embedded_model)]
    # The words of the conversation, and others.
    between = [[prose("a", 300), prose("b", 40)], "others", [1, 2, 3]]
    without = second_turn(*arguments, between=[])
    assert second_turn(*arguments, between=between) == without


def test_streams_continue_while_texts_are_embedded(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    settings: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 0}
    wanted = client.completions.create(prompt=COUNTING, **settings).choices[0].text
    texts = [prose(seed, 300) for seed in "ab"]
    alone = vectors(client, texts)
    for _ in range(N_TRIES):
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(vectors, client, texts)
            stream = client.completions.create(prompt=COUNTING, **settings, stream=True)
            said = "".join(chunk.choices[0].text for chunk in stream)
            was_embedding = not made.done()
            together = made.result()
        assert said == wanted
        assert together == alone
        if was_embedding:
            break
    assert was_embedding, "the stream waited for the embeddings"


def test_a_disconnect_ends_the_embedding_request_and_the_server_continues(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    body = {"input": [list(range(100, 500))] * 200}  # tokens: texts would take time before
    headers = {"x-request-id": "impatient"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/embeddings", json=body, headers=headers, timeout=10)
    assert vectors(client, "next")
    server.wait_for_log("request=impatient.")
    [line] = [line for line in server.log.splitlines() if "request=impatient." in line]
    assert line.endswith("finish=cancelled")
