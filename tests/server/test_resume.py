"""Interrupted and concurrent prefills: no token is computed twice."""

import http.client
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.engine.scheduler.batch_planner import PREFILL_GRAIN
from tests.campaigns.crash import ARCHITECTURES
from tests.conftest import TinyModels
from tests.support.cache_traffic import eventually, random_tokens
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import (
    REQUEST_SECONDS,
    Client,
    n_cached_of,
    prose,
    user,
)

N_UBATCH = 256  # the engine computes as many tokens in a step, and looks for orders behind each
HEADER_TOKENS = 12  # that prompts of a chat template share whatever they say, and texts by chance
PREFILLED = "rekindle_prompt_tokens_prefilled_total"

DIALECTS = [
    ("/v1/chat/completions", "messages", {"max_tokens": 1, "temperature": 0}),
    ("/v1/responses", "input", {"max_output_tokens": 1, "temperature": 0}),
    ("/v1/messages", "messages", {"max_tokens": 1, "temperature": 0}),
]


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "4", "--ctx-size", "32768", "--ubatch-size", str(N_UBATCH)) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


def prompt_of(client: Client, name: str, n_tokens: int) -> list[int]:
    tokens = client.tokenize(f"{name}. {prose(name, n_tokens)}")
    assert len(tokens) >= n_tokens
    return tokens[:n_tokens]


@contextmanager
def prefilling(server: ServerProcess, prompt: Sequence[int]) -> Iterator[Iterator[int]]:
    """Yield the progress of a prefill. The client disconnects at the end of the block."""
    body = {"prompt": list(prompt), "max_tokens": 1, "stream": True, "return_progress": True}
    with (
        httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS) as asking,
        asking.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        yield (
            frame["prompt_progress"]["processed"]
            for frame in frames(response)
            if "prompt_progress" in frame
        )


def frames(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def in_the_middle(progress: Iterator[int], n_prompt: int) -> int:
    n_done = next(n_done for n_done in progress if 3 * n_done >= n_prompt)
    assert 3 * n_done <= 2 * n_prompt
    return n_done


@pytest.mark.long
def test_a_retry_after_a_lost_connection_computes_only_the_rest(
    server: ServerProcess, client: Client
) -> None:
    prompt = prompt_of(client, "a client that leaves", 2500)
    before = client.metric(PREFILLED)
    with prefilling(server, prompt) as progress:
        n_seen = in_the_middle(progress, len(prompt))
    retry = client.complete(prompt, max_tokens=1)
    # The batch that ran at the disconnect is complete too, and perhaps one more.
    assert n_seen <= retry.n_cached <= n_seen + 2 * N_UBATCH
    assert client.metric(PREFILLED) - before == len(prompt)


@pytest.mark.long
@pytest.mark.parametrize(("path", "key", "fields"), DIALECTS[:1])
def test_a_client_that_gives_up_waiting_for_a_whole_reply_loses_nothing(
    client: Client, server: ServerProcess, path: str, key: str, fields: dict[str, Any]
) -> None:
    body = conversation(path, key, prose(f"gives up {path}", 100), prose(path, 750)) | fields
    before = client.metric(PREFILLED)
    address = httpx.URL(server.url)
    with closing(http.client.HTTPConnection(address.host, address.port)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        eventually(lambda: must(client.metric(PREFILLED) > before))
    server.wait_until_idle()
    n_computed = client.metric(PREFILLED) - before
    retry = client.post(path, body)["rekindle"]
    n_prompt = n_cached_of(retry) + retry["prefilled"]
    assert n_computed <= n_cached_of(retry) <= n_computed + HEADER_TOKENS
    assert n_cached_of(retry) < n_prompt - 1, "it was not in the middle"
    assert client.metric(PREFILLED) - before == n_computed + retry["prefilled"]


def conversation(path: str, key: str, head: str, last: str) -> dict[str, Any]:
    if path == "/v1/messages":
        return {"system": head, key: [user(last)]}
    return {key: [{"role": "system", "content": head}, user(last)]}


def must(condition: bool) -> None:  # noqa: FBT001
    assert condition


@pytest.mark.long
def test_a_killed_prefill_resumes_from_the_written_blocks(
    embedded_model: Path, tmp_path: Path
) -> None:
    arguments = ("--parallel", "1", "--cache-dir", str(tmp_path), "--ubatch-size", str(N_UBATCH))
    with serve(*arguments) as server, closing(Client(server.url)) as client:
        prompt = prompt_of(client, "killed", 1500)
        with prefilling(server, prompt) as progress:
            n_before = next(
                n_before for n_before, n_done in pairwise(progress) if 2 * n_done >= len(prompt)
            )
            # Blocks are exported behind the step that completes them, and written beside the
            # next one.
            n_blocks = n_before // BLOCK_TOKENS
            eventually(lambda: must(client.metric("rekindle_cache_writes_total") >= n_blocks))
            n_prefilled = client.metric(PREFILLED)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(progress)
        assert n_prefilled < len(prompt) - 1, "it was not in the middle"
    with serve(*arguments) as server, closing(Client(server.url)) as client:
        retry = client.complete(prompt, max_tokens=1)
        assert retry.n_cached >= n_blocks * BLOCK_TOKENS >= len(prompt) // 3
        assert retry.sources == {"disk"}
        assert client.metric(PREFILLED) == len(prompt) - retry.n_cached


@pytest.mark.parametrize("architecture", ARCHITECTURES[::3])
def test_a_cancelled_prefill_is_resumed_after_a_restart(
    tiny_models: TinyModels, tmp_path: Path, architecture: TinyArchitecture
) -> None:
    """All of it, once it is written, and not whole blocks only."""
    arguments = (
        *(str(tiny_models(architecture)), "--parallel", "1", "--ubatch-size", str(PREFILL_GRAIN)),
        *("--cache-dir", str(tmp_path), "--threads", "1", "--no-cache-recompute"),
        *("--ctx-size", "16384"),
    )
    # Long enough that a busy machine does not compute it all before it notices the disconnect.
    prompt = random_tokens(random.Random("cancelled"), 16_000)
    with serve(*arguments) as server, closing(Client(server.url)) as client:
        with prefilling(server, prompt) as progress:
            n_seen = next(n_done for n_done in progress if n_done > BLOCK_TOKENS)
        server.wait_until_idle()
        n_computed = client.metric(PREFILLED)
        assert n_seen <= n_computed < len(prompt) - 1
        client.wait_until_on_disk()
        server.process.kill()
        server.process.wait()
    with serve(*arguments) as server, closing(Client(server.url)) as client:
        retry = client.complete(prompt, max_tokens=1)
        assert retry.n_cached == n_computed
        assert retry.sources == {"disk"}


def test_identical_concurrent_prefills_run_once_in_every_wire_format(client: Client) -> None:
    head, last = prose("asked for thrice", 200), prose("thrice", 500)
    before = client.metric(PREFILLED)
    with ThreadPoolExecutor(len(DIALECTS)) as pool:
        asked = [
            pool.submit(client.post, path, conversation(path, key, head, last) | fields)
            for path, key, fields in DIALECTS
        ]
    stories = [each.result()["rekindle"] for each in asked]
    [n_prompt] = {n_cached_of(story) + story["prefilled"] for story in stories}
    *others, n_first = sorted(story["prefilled"] for story in stories)
    assert others == [0, 0]
    assert n_first >= n_prompt - HEADER_TOKENS
    assert client.metric(PREFILLED) - before == n_first


@pytest.mark.long
def test_a_request_waiting_for_an_identical_prefill_resumes_it_after_a_disconnect(
    server: ServerProcess, client: Client
) -> None:
    prompt = prompt_of(client, "followed", 1400)
    before = client.metric(PREFILLED)
    with ThreadPoolExecutor(1) as pool:
        with prefilling(server, prompt) as progress:
            next(progress)
            follower = pool.submit(client.complete, prompt, max_tokens=1)
            with closing(Client(server.url)) as other:
                eventually(lambda: must(other.metric("rekindle_requests_waiting") == 1))
            n_seen = next(progress)
        assert n_seen <= follower.result().n_cached < len(prompt) - 1
    assert client.metric(PREFILLED) - before == len(prompt)
