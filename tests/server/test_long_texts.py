"""Messages that once crashed the process, through the real server."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

N_LETTERS = 40_000
LETTERS = "A" * N_LETTERS  # 12 MB of stack
SPACES = " " * 20_000 + "5"  # half a minute of backtracking


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_tiny_model(
        tmp_path_factory.mktemp("models") / "long.gguf",
        TinyArchitecture.LLAMA,
        pre_tokenizer="deepseek-llm",
    )
    with serve(str(model), "--ctx-size", "4096", "--parallel", "1", "--no-cache-disk") as server:
        yield server


def bodies(text: str) -> dict[str, dict[str, object]]:
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/messages": {"model": "long", "messages": messages, "max_tokens": 4},
        "/v1/responses": {"model": "long", "input": text, "max_output_tokens": 16},
        "/v1/completions": {"prompt": text, "max_tokens": 4},
        "/v1/embeddings": {"model": "long", "input": text},
        "/tokenize": {"content": text},
        "/apply-template": {"messages": messages},
        "/v1/messages/count_tokens": {"model": "long", "messages": messages},
    }


def post(server: ServerProcess, path: str, text: str) -> httpx.Response:
    return httpx.post(server.url + path, json=bodies(text)[path], timeout=60)


GENERATING = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions")


@pytest.mark.parametrize("path", [*GENERATING, "/v1/embeddings"])
def test_a_long_run_of_letters_is_only_too_long_for_the_context(
    path: str, server: ServerProcess
) -> None:
    reply = post(server, path, LETTERS)
    assert reply.status_code == 400, reply.text
    assert re.search(r"400\d\d tokens", reply.json()["error"]["message"])
    assert post(server, path, "Hello").status_code == 200


def test_a_long_run_of_letters_is_counted(server: ServerProcess) -> None:
    assert len(post(server, "/tokenize", LETTERS).json()["tokens"]) == N_LETTERS
    assert len(post(server, "/apply-template", LETTERS).json()["tokens"]) > N_LETTERS
    counted = post(server, "/v1/messages/count_tokens", LETTERS).json()
    assert counted["input_tokens"] > N_LETTERS


@pytest.mark.parametrize("path", bodies(""))
def test_a_text_that_would_take_a_minute_to_tokenise_is_refused(
    path: str, server: ServerProcess
) -> None:
    reply = post(server, path, SPACES)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(
        "Runs of white space are too long for this model's tokenizer (deepseek-llm): the longest"
        " has 20,000 characters."
    )
    params = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/tokenize": "content"}
    assert error.get("param") == params.get(path)


def test_a_schema_with_a_long_constant_is_refused(server: ServerProcess) -> None:
    """The constant would be tokenised again for every token of the reply."""
    path = "/v1/chat/completions"
    schema = {"name": "long", "schema": {"const": LETTERS}}
    body = bodies("Hello")[path] | {
        "response_format": {"type": "json_schema", "json_schema": schema}
    }
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    assert "it forces a text of 40,002 bytes" in reply.json()["error"]["message"]
    assert post(server, path, "Hello").status_code == 200
