"""Prefill and decode speed through HTTP, the servers taking turns.

Each measurement is one burst of streams with prompts that no server has seen before, so that
neither can answer from a cache. The first round warms both up and is thrown away.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.client import Burst, StreamResult, run_burst
from bench.report import Measure, Sample
from bench.servers import BenchError, RunningServer

WORDS = "the server keeps every prefix that it has computed and reads a long story about town"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    streams: tuple[int, ...] = (1, 4, 8)
    n_rounds: int = 5
    prefill_words: int = 512  # a word is about one token; results use the server's own count
    decode_words: int = 32
    decode_tokens: int = 128

    @property
    def n_bursts(self) -> int:
        """For each server."""
        return (self.n_rounds + 1) * len(self.streams) * 2

    @property
    def n_ctx_needed(self) -> int:
        longest = max(self.prefill_words, self.decode_words + self.decode_tokens)
        return max(self.streams) * longest * 2


def run_rounds(
    servers: Sequence[RunningServer], plan: Plan, on_burst: Callable[[str], None]
) -> Iterator[Sample]:
    for round_number in range(plan.n_rounds + 1):
        # Whoever goes first meets a cooler processor, so they swap.
        order = servers if round_number % 2 else servers[::-1]
        for n_streams in plan.streams:
            for measure in (measure_prefill, measure_decode):
                for server in order:
                    on_burst(f"round {round_number}, {n_streams} streams, {server.contender.name}")
                    server.forget()
                    samples = measure(server, plan, n_streams, round_number)
                    if round_number > 0:
                        yield from samples


def measure_prefill(
    server: RunningServer, plan: Plan, n_streams: int, round_number: int
) -> list[Sample]:
    prompts = _prompts(f"prefill {round_number}", n_streams, plan.prefill_words)
    results = run_burst(Burst(server.port, prompts, max_tokens=1))
    first_token = [result.text_seconds[0] for result in results]
    values = {
        Measure.PREFILL: sum(result.n_prompt for result in results) / max(first_token),
        Measure.FIRST_TOKEN: 1000 * median(first_token),
    }
    return _samples(server, n_streams, round_number, values)


def measure_decode(
    server: RunningServer, plan: Plan, n_streams: int, round_number: int
) -> list[Sample]:
    prompts = _prompts(f"decode {round_number}", n_streams, plan.decode_words)
    results = run_burst(Burst(server.port, prompts, plan.decode_tokens))
    values = {Measure.DECODE: decode_rate(results)}
    server_rates = [r.server_decode_rate for r in results if r.server_decode_rate is not None]
    if len(server_rates) == n_streams:
        values[Measure.DECODE_BY_SERVER] = sum(server_rates)
    return _samples(server, n_streams, round_number, values)


def decode_rate(results: Sequence[StreamResult]) -> float:
    """Tokens of all streams while every one of them was decoding, over that time."""
    start = max(result.text_seconds[0] for result in results)
    end = min(result.text_seconds[-1] for result in results)
    if end <= start:
        raise BenchError("A stream had ended before another began; there is nothing to compare.")
    n_tokens = 0.0
    for result in results:
        n_pieces = sum(start < seconds <= end for seconds in result.text_seconds)
        n_tokens += n_pieces * result.n_generated / len(result.text_seconds)
    return n_tokens / (end - start)


def _samples(
    server: RunningServer, n_streams: int, round_number: int, values: dict[Measure, float]
) -> list[Sample]:
    return [
        Sample(measure, n_streams, server.contender.name, round_number, value)
        for measure, value in values.items()
    ]


def _prompts(name: str, n_streams: int, n_words: int) -> tuple[str, ...]:
    """Equal for both servers, different for each stream, burst and round from the first token."""
    prompts = []
    for stream in range(n_streams):
        choose = random.Random(f"{name} {n_streams} {stream}")
        opening = f"{choose.randrange(10**6):06}"
        prompts.append(" ".join([opening, *choose.choices(WORDS.split(), k=n_words)]))
    return tuple(prompts)
