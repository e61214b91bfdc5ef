"""Many requests at once: each gets the same reply as alone, and no task or slot leaks."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.settings import Settings
from rekindle.generation.status import EngineStatus
from rekindle.models.source import ModelFile
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess
from tests.support.tiny_models import MEMORY_CLASSES, TinyArchitecture

N_REQUESTS = 32

# Rows that share a batch are computed by other kernels than a row alone, which moves logits a
# little. Where two tokens are closer than this in the reply alone, either may win.
NEAR_TIE = 1.0


@dataclass(frozen=True)
class Reply:
    tokens: tuple[str, ...]
    alternatives: tuple[dict[str, float], ...]  # per token: text -> logprob


def body(index: int) -> dict[str, Any]:
    words = " ".join(f"item {index} number {word * (index + 3)}" for word in range(5 * index % 41))
    return {
        "prompt": f"Request {index}. {words} The next word is",
        "max_tokens": 8 + index % 17,
        "temperature": 0,
        "logprobs": 8,
        "ignore_eos": True,
    }


async def complete(client: httpx.AsyncClient, index: int, *, is_streaming: bool) -> Reply:
    request = {**body(index), "stream": is_streaming}
    if not is_streaming:
        response = await client.post("/v1/completions", json=request)
        response.raise_for_status()
        scores = [response.json()["choices"][0]["logprobs"]]
    else:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            response.raise_for_status()
            frames = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        choices = [httpx.Response(200, text=frame[6:]).json()["choices"] for frame in frames]
        scores = [choice[0]["logprobs"] for choice in choices if choice and choice[0]["logprobs"]]
    tokens = [token for score in scores for token in score["tokens"]]
    tops = [top for score in scores for top in score["top_logprobs"]]
    return Reply(tuple(tokens), tuple(tops))


async def alone_and_together(url: str) -> tuple[list[Reply], list[Reply]]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        alone = [await complete(client, i, is_streaming=False) for i in range(N_REQUESTS)]
        streams = (complete(client, i, is_streaming=True) for i in range(N_REQUESTS))
        return alone, list(await asyncio.gather(*streams))


def assert_same_but_for_near_ties(alone: Reply, together: Reply) -> bool:
    """True where the replies are equal; a difference must be a choice between near equals."""
    assert len(alone.tokens) == len(together.tokens)
    for position, (mine, other) in enumerate(zip(alone.tokens, together.tokens, strict=True)):
        if mine != other:
            candidates = alone.alternatives[position]
            assert other in candidates, f"{other!r} instead of {mine!r} among {candidates}"
            assert candidates[mine] - candidates[other] < NEAR_TIE
            return False
    return True


@pytest.mark.long
def test_32_streams_on_4_slots_get_the_same_replies_as_alone(
    server: ServerProcess, embedded_model: Path
) -> None:
    # Opens the catalogue, and is long enough to be a turn that is remembered.
    longest = {**body(8), "max_tokens": 24}
    httpx.post(f"{server.url}/v1/completions", json=longest, timeout=300)
    server.wait_until_idle()
    before = server.n_file_descriptors
    alone, together = asyncio.run(alone_and_together(server.url))
    equal = [
        assert_same_but_for_near_ties(mine, other)
        for mine, other in zip(alone, together, strict=True)
    ]
    print(f"{sum(equal)} of {N_REQUESTS} replies equal, the others differ at a near tie")  # noqa: T201
    server.wait_until_idle()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "\nrekindle_requests_waiting 0.0" in metrics
    server.wait_for_descriptors(before)


@pytest.mark.parametrize("architecture", MEMORY_CLASSES)
def test_no_class_of_model_mixes_up_its_sequences(
    tiny_models: TinyModels, architecture: TinyArchitecture
) -> None:
    settings = Settings(
        engine=EngineSettings(parallel=4, ctx_size=4096, threads=1),
        cache=CacheSettings(cache_disk=Bytes(0)),
    )
    assembly = assemble(settings, ModelFile(tiny_models(architecture), "tiny"))
    with background(assembly) as url:
        alone, together = asyncio.run(alone_and_together(url))
        [status] = assembly.pool.statuses()
        assert (status.n_running, status.n_waiting) == (0, 0)
    for mine, other in zip(alone, together, strict=True):
        assert_same_but_for_near_ties(mine, other)


def is_busy(status: EngineStatus) -> bool:
    return bool(status.n_running or status.n_waiting)


def test_no_task_and_no_slot_is_left_behind(tiny_models: TinyModels) -> None:
    """Replies that end, replies whose client leaves, and refusals, all in one event loop."""
    settings = Settings(
        engine=EngineSettings(parallel=2, ctx_size=2048, threads=1),
        cache=CacheSettings(cache_disk=Bytes(0)),
    )
    assembly = assemble(settings, ModelFile(tiny_models(TinyArchitecture.LLAMA), "tiny"))

    async def leave_early(client: httpx.AsyncClient, index: int) -> None:
        endless = {**body(index), "max_tokens": 100_000, "stream": True}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=endless), 0.05)

    async def scenario() -> None:
        assembly.pool.start()
        before = asyncio.all_tasks()
        transport = httpx.ASGITransport(assembly.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await asyncio.gather(
                *(complete(client, i, is_streaming=i % 2 == 0) for i in range(N_REQUESTS)),
                *(leave_early(client, i) for i in range(8)),
                *(client.post("/v1/completions", json={"prompt": 5}) for _ in range(4)),
            )
            async with asyncio.timeout(30):
                # The engine is another thread and gives no event to wait for.
                while is_busy(assembly.pool.statuses()[0]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        [status] = assembly.pool.statuses()
        assert (status.n_running, status.n_waiting) == (0, 0)
        assert asyncio.all_tasks() == before

    asyncio.run(scenario())
    assembly.close()
