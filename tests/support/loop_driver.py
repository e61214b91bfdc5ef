"""The engine loop on the test's own thread, step by step."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from rekindle.engine.backend import Embedder
from rekindle.engine.loop import EngineLoop
from rekindle.engine.orders import Ask, Cancel, Delivery, OpenCache
from rekindle.engine.scheduler.sampler_queue import Preparer
from rekindle.generation.events import PromptEvaluated, TokenSampled
from rekindle.generation.questions import Question
from rekindle.generation.request import (
    USUAL_TERMS,
    CacheTerms,
    EmbeddingRequest,
    GenerationRequest,
    Sampling,
)
from rekindle.link.activity_page import ActivityPage, new_page_file
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend
from tests.support.fake_embedder import FakeEmbedder
from tests.support.preparers import PreparingAtOnce

T = TypeVar("T")

GREEDY = Sampling(temperature=0)
MAX_STEPS = 500
MAX_SECONDS = 30  # for the answer to a question


class Asked(NamedTuple):
    evaluated: PromptEvaluated
    tokens: list[int]
    n_computed: int


class Bench:
    """An engine loop whose steps the test takes, and all events that it delivered."""

    def __init__(
        self,
        backend: FakeBackend,
        open_cache: OpenCache | None = None,
        embedder: Embedder | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        self.backend = backend
        self.said: list[Delivery] = []
        self.loop = EngineLoop(
            backend,
            self.said.extend,
            open_cache or cache_opener(),
            queue_size=8,
            embedder=embedder or FakeEmbedder(),
            preparer=preparer or PreparingAtOnce(),
            activity=ActivityPage(new_page_file()),
        )
        self.loop.start()
        # As after a first prompt: the first batch of an unknown speed is a small one.
        self.loop._saver.prefill_seconds_per_token = 1e-6

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        *,
        boundaries: tuple[int, ...] = (),
        cache_prompt: bool = True,
        background: bool = False,
        terms: CacheTerms = USUAL_TERMS,
        sampling: Sampling = GREEDY,
        number: int = 0,
        n_top_logprobs: int | None = None,
        speculate: bool = True,
    ) -> None:
        if not terms.asked_at:
            terms = replace(terms, asked_at=time.time())
        request = GenerationRequest(
            id=name,
            prompt=tuple(prompt),
            boundaries=boundaries,
            sampling=sampling,
            number=number,
            n_top_logprobs=n_top_logprobs,
            speculate=speculate,
            max_tokens=max_tokens,
            cache_prompt=cache_prompt,
            background=background,
            terms=terms,
        )
        self.loop.inbox.put(request)

    def embed(self, name: str, *inputs: Sequence[int]) -> None:
        self.loop.inbox.put(EmbeddingRequest(id=name, inputs=tuple(map(tuple, inputs))))

    def question(self, question: Question[T]) -> T:
        order = Ask(question)
        self.loop.inbox.put(order)
        deadline = time.monotonic() + MAX_SECONDS
        while not order.outcome.done() and time.monotonic() < deadline:
            self.step()
            if self.loop._is_stalled:
                time.sleep(0.001)  # it waits for the disk
        return order.outcome.result(timeout=0)

    def step(self) -> None:
        self.loop.inbox.put(Cancel("nobody"))  # receive() blocks on an empty inbox when idle
        self.loop.receive()
        self.loop.step()
        self.loop.outbox.flush()

    @property
    def is_at_rest(self) -> bool:
        """Whether the last step found nothing to do, and no export waits."""
        return self.loop._is_stalled and self.loop._saver.seconds_to_export() is None

    def run(self, n_steps: int = 500) -> None:
        for _ in range(n_steps):
            self.step()
            status = self.loop.status()
            n_embedding = status.embedder.n_requests if status.embedder else 0
            is_over = status.n_running == status.n_waiting == status.n_background == 0
            # The loop itself goes on until a step has found nothing to do.
            if self.loop._is_stalled:
                if is_over and not n_embedding and self.is_at_rest:
                    return
                time.sleep(0.001)  # another thread has to do something first
        raise AssertionError("still running")

    def tokens(self, name: str) -> list[int]:
        return [event.token for event in self.events(name) if isinstance(event, TokenSampled)]

    def events(self, name: str) -> list[object]:
        return [event for request_id, event in self.said if request_id == name]

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        n_steps: int = 500,
        **options: Any,
    ) -> Asked:
        """Run one request from start to end. Return its cost and its tokens."""
        before = self.backend.n_computed
        self.submit(name, prompt, max_tokens, **options)
        self.run(n_steps)
        [evaluated] = [each for each in self.events(name) if isinstance(each, PromptEvaluated)]
        return Asked(evaluated, self.tokens(name), self.backend.n_computed - before)

    def assert_nothing_is_left(self) -> None:
        """Check that nothing of a request is left but the rows in idle slots."""
        assert all(sampler.closed for sampler in self.backend.samplers)
        status = self.loop.status()
        assert (status.n_running, status.n_waiting, status.n_background) == (0, 0, 0)
        assert status.n_cells_used == self.backend.n_cells_used

    def close(self) -> None:
        self.loop.stop()
        self.loop.outbox.flush()
