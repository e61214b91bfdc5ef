"""A VllmEngine on fakes, inside a test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from rekindle.errors import RekindleError
from rekindle.generation.events import PromptEvaluated, TokenEvent, TokenSampled, TokenStream
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.vllm.engine import VllmEngine
from rekindle.vllm.fleet import Fleet
from rekindle.vllm.upstream import ProbeTerms, Served, Upstream
from tests.support.fake_vllm import FakeVllm

N_VOCAB = 49152
ENDS = frozenset({2})
TERMS = ProbeTerms(prompt=[5, 6, 7], n_vocab=N_VOCAB, end_tokens=ENDS)
PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def engine_on(
    *fakes: FakeVllm,
    n_each: int = 4,
    queue_size: int = 8,
    first_byte_seconds: float = 30.0,
) -> AsyncIterator[VllmEngine]:
    """Run an engine on the fakes. Upstreams that do not answer yet are probed again soon."""
    upstreams = [Upstream(fake.url, api_key=None) for fake in fakes]
    async with httpx.AsyncClient() as client:
        for upstream in upstreams:
            try:
                await upstream.find_model(client)
                await upstream.probe(client, TERMS)
            except RekindleError as error:
                upstream.trouble = error.message
    served = Served(fakes[0].model, None, fakes[0].n_ctx)
    fleet = Fleet(upstreams, served, TERMS, n_each=n_each, first_rest_seconds=0.05)
    engine = VllmEngine(
        fleet,
        queue_size=queue_size,
        first_byte_seconds=first_byte_seconds,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.shut_down(0)


def request(
    name: str,
    prompt: Sequence[int] = tuple(range(100, 140)),
    *,
    max_tokens: int | None = 32,
    sampling: Sampling | None = None,
    namespace: str = "",
    **fields: Any,
) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        prompt=tuple(prompt),
        boundaries=(),
        sampling=sampling or Sampling(temperature=0),
        max_tokens=max_tokens,
        terms=CacheTerms(namespace=namespace),
        **fields,
    )


async def events_of(stream: TokenStream) -> list[TokenEvent]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [event async for event in stream]


async def tokens_before_failure(stream: TokenStream, said: list[int]) -> None:
    async for event in stream:
        if isinstance(event, TokenSampled):
            said.append(event.token)


def tokens_in(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenSampled)]


def evaluated_in(events: Sequence[TokenEvent]) -> PromptEvaluated:
    [evaluated] = [event for event in events if isinstance(event, PromptEvaluated)]
    return evaluated


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the fake is in another thread
            await asyncio.sleep(0.005)
