"""Prompts that are computed before the first request needs them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import serve
from tests.support.workloads import (
    SEARCH_TOOL,
    Client,
    n_cached_of,
    prose,
    system,
    user,
)


@pytest.fixture(scope="module")
def client(embedded_model: Path) -> Iterator[Client]:
    with serve("--parallel", "1") as server, closing(Client(server.url)) as client:
        yield client


@pytest.mark.parametrize(
    "how",
    [{"max_tokens": 0}, {"prefill": True}, {"prompt_cache_options": {"prewarm": True}}],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("stream", [False, True])
def test_priming_samples_nothing_and_the_next_request_finds_the_whole_prompt(
    client: Client,
    how: dict[str, Any],
    stream: bool,  # noqa: FBT001
) -> None:
    name = f"{next(iter(how))} {stream}"
    messages = [system(f"primed by {name}"), user(prose(name, 20))]
    body = {"messages": messages, "tools": [SEARCH_TOOL]}
    primed = client.post("/v1/chat/completions", {**body, **how, "stream": stream})
    assert primed["timings"]["predicted_n"] == 0
    [choice] = primed["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    n_prompt = n_cached_of(primed["rekindle"]) + primed["rekindle"]["prefilled"]
    after = client.post("/v1/chat/completions", {**body, "max_tokens": 2})
    assert after["usage"]["prompt_tokens"] == n_prompt
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1


def test_an_error_reaches_the_caller(client: Client) -> None:
    too_long = [user("word " * 20_000)]
    answer = client.try_post("/v1/chat/completions", {"messages": too_long, "max_tokens": 0})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
