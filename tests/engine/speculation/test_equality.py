"""With and without drafts, a request has the same events: proven on exact arithmetic."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from rekindle.engine.orders import Cancel
from rekindle.generation.events import Finished, TokenSampled
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import Grammar, GrammarKind, Sampling
from tests.support.exact_backend import N_VOCAB, ExactBackend
from tests.support.loop_driver import Bench

N_REQUESTS = 1000
N_TOGETHER = 25  # requests of one engine
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    n_top_logprobs: int | None
    cancel_after: int | None  # tokens: as a client that leaves, or a stop string
    starts_at: int  # step


class Free:
    """Steps that cost the same, however many tokens they have: drafts are always worth it."""

    def ratio(self, n_base: int, n_drafted: int, n_accepted: float) -> float:
        return 1.0

    def is_stale(self, n_tokens: int) -> bool:
        return False

    def observe(self, n_tokens: int, seconds: float) -> None:
        pass

    def observe_sampling(self, n_tokens: int, seconds: float) -> None:
        pass


def some_requests(noise: random.Random) -> Iterator[Asked]:
    texts = [[noise.randrange(1, N_VOCAB) for _ in range(noise.randrange(3, 90))] for _ in range(4)]
    for number in range(N_TOGETHER):
        prompt = noise.choice(texts)[: noise.randrange(2, 90)]
        if noise.random() < 0.3:
            prompt = prompt + noise.choice(texts)
        is_greedy = noise.random() < 0.5
        asked = Asked(
            name=f"request {number}",
            prompt=tuple(prompt),
            max_tokens=noise.choice((1, 2, 5, 20, 60, 120)),
            sampling=Sampling(
                temperature=0.0 if is_greedy else noise.choice((0.05, 0.3)),
                seed=noise.randrange(3),
                frequency_penalty=noise.choice((0.0, 0.0, 0.0, 0.05)),
                mirostat=noise.choice((0, 0, 0, 0, 2)),
                logit_bias=noise.choice(((), (), ((3, 2.0), (0, -1.0)))),
                grammar=noise.choice((None, None, Grammar(GrammarKind.LARK, "alternate"))),
            ),
            n_top_logprobs=noise.choice((None, None, 2)),
            cancel_after=noise.choice((None, None, None, noise.randrange(1, 30))),
            starts_at=noise.randrange(60),
        )
        for choice in range(noise.choice((1, 1, 1, 3))):
            sampling = replace(asked.sampling, seed=(asked.sampling.seed or 0) + choice)
            yield replace(asked, name=f"{asked.name}.{choice}", sampling=sampling)


def replies(
    requests: list[Asked], model_class: ModelClass, n_draft_rows: int
) -> tuple[dict[str, list[object]], int]:
    """Return the events of each reply, and the number of accepted tokens."""
    backend = ExactBackend(model_class=model_class, n_cells=1500, n_draft_rows=n_draft_rows)
    bench = Bench(backend)
    bench.loop._speculation._costs = Free()  # type: ignore[assignment]
    waiting = sorted(requests, key=lambda each: each.starts_at)
    to_cancel = {each.name: each.cancel_after for each in requests if each.cancel_after}
    n_read: Counter[str] = Counter()
    for step in range(MAX_STEPS):
        while waiting and waiting[0].starts_at <= step:
            asked = waiting.pop(0)
            bench.submit(
                asked.name,
                asked.prompt,
                asked.max_tokens,
                sampling=asked.sampling,
                n_top_logprobs=asked.n_top_logprobs,
            )
        n_said = len(bench.said)
        bench.step()
        n_read.update(
            name for name, event in bench.said[n_said:] if isinstance(event, TokenSampled)
        )
        for name in [name for name, count in to_cancel.items() if n_read[name] >= count]:
            del to_cancel[name]
            bench.loop.inbox.put(Cancel(name))
        status = bench.loop.status()
        if not waiting and status.n_running == status.n_waiting == 0:
            break
    else:
        raise AssertionError("still running")
    bench.assert_nothing_is_left()
    said = {each.name: _outcome(bench.events(each.name), each) for each in requests}
    accepted = bench.loop._cache.counters.drafts.n_accepted
    bench.close()
    return said, accepted


def _outcome(events: list[object], asked: Asked) -> list[object]:
    """Return tokens and end without what tells of drafts. A client that left has read less."""
    sampled = [replace(each, drafted=None) for each in events if isinstance(each, TokenSampled)]
    ends = [replace(each, drafted=None) for each in events if isinstance(each, Finished)]
    if asked.cancel_after is not None and len(sampled) >= asked.cancel_after:
        return list(sampled[: asked.cancel_after])
    return [*sampled, *ends]


@pytest.mark.parametrize("model_class", [ModelClass.DENSE, ModelClass.SLIDING_WINDOW])
def test_a_thousand_random_requests_have_the_same_events_with_and_without_drafts(
    model_class: ModelClass,
) -> None:
    n_requests = n_accepted = 0
    for seed in range(N_REQUESTS):
        if n_requests >= N_REQUESTS / 2:
            break
        requests = list(some_requests(random.Random(seed)))
        plain, none = replies(requests, model_class, n_draft_rows=0)
        drafted, accepted = replies(requests, model_class, n_draft_rows=16)
        assert drafted == plain, f"seed {seed}"
        assert none == 0
        n_requests += len(requests)
        n_accepted += accepted
    assert n_accepted > 8 * n_requests
