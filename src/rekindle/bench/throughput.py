"""Prefill and decode speed through HTTP, the servers taking turns.

Each burst of streams has prompts that no server has seen before, so that none can answer from a
cache; only the measure of the cache sends a prompt again. The first round warms all up and is
thrown away.
"""

import asyncio
import random
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from statistics import median

from rekindle.bench.burst_client import Burst, BurstFailed, StreamResult, run_burst
from rekindle.bench.peers.contenders import Contender, Flags, Program
from rekindle.bench.peers.processes import DidNotStart, ServerProcess
from rekindle.bench.play import Conditions
from rekindle.bench.report.results import BurstRow

PREFILL = "prefill_tokens_per_second"
FIRST_TOKEN = "first_token_ms"
DECODE = "decode_tokens_per_second"
DECODE_BY_SERVER = "decode_tokens_per_second_by_server"  # what the server's own timings say
CACHED_FIRST_TOKEN = "cached_first_token_ms"
WORDS = "the server keeps every prefix that it has computed and reads a long story about town"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPlan:
    n_rounds: int = 5
    streams: tuple[int, ...] = (1, 4, 8)
    prefill_words: int = 512  # a word is about one token; results use the server's own count
    decode_words: int = 32
    decode_tokens: int = 128
    cached_words: int = 1500
    n_cached: int = 5  # times that the cached prompt is sent; picked

    def n_bursts(self, contenders: Sequence[Contender]) -> int:
        n_programs = len(programs_of(contenders))
        return n_programs * (self.n_rounds + 1) * (2 * len(self.streams) + 1)

    @property
    def n_ctx_needed(self) -> int:
        longest = max(self.prefill_words, self.decode_words + self.decode_tokens)
        return max(max(self.streams) * longest, self.cached_words) * 2


QUICK_BURSTS = BurstPlan(
    n_rounds=1, prefill_words=64, decode_words=16, decode_tokens=32, cached_words=200, n_cached=2
)


def programs_of(contenders: Sequence[Contender]) -> list[Program]:
    """Somebody else's server cannot be started with equal flags."""
    return [each for each in contenders if isinstance(each, Program) and each.has_bursts]


async def run_bursts(
    plan: BurstPlan,
    contenders: Sequence[Contender],
    conditions: Conditions,
    *,
    on_step: Callable[[str], None],
    on_done: Callable[[], None],
    on_trouble: Callable[[str], None],
) -> AsyncIterator[BurstRow]:
    """Of a server that does not start there are no rows, of a burst that fails there is none."""
    async with AsyncExitStack() as stack:
        servers = []
        for program in programs_of(contenders):
            on_step(f"throughput  {program.name}  starting")
            try:
                servers.append(await _started(program, plan, conditions, stack))
            except DidNotStart as error:
                on_trouble(f"throughput, {program.name}: {error.message}")
        for round_number in range(plan.n_rounds + 1):
            for measure, n_streams in _measures(plan):
                # Whoever goes first meets a cooler processor, so they swap.
                for server in servers if round_number % 2 else servers[::-1]:
                    name = server.program.name
                    on_step(f"throughput  {name}  round {round_number}, {n_streams} streams")
                    values: dict[str, float] = {}
                    try:
                        values = await asyncio.to_thread(
                            _measured, measure, server, plan, n_streams, round_number
                        )
                    except (BurstFailed, OSError, HTTPException) as error:
                        where = f"{name}, round {round_number}, {n_streams} streams"
                        on_trouble(f"throughput, {where}: {error}")
                    on_done()
                    for each, value in values.items() if round_number else ():
                        yield BurstRow(
                            measure=each,
                            streams=n_streams,
                            server=name,
                            round=round_number,
                            value=value,
                        )


async def _started(
    program: Program, plan: BurstPlan, conditions: Conditions, stack: AsyncExitStack
) -> ServerProcess:
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=conditions.scratch))
    flags = Flags(
        model=conditions.model,
        ctx_size=plan.n_ctx_needed,
        parallel=max(plan.streams),
        threads=conditions.threads,
    )
    server = ServerProcess(program, flags, Path(folder), program.burst_arguments)
    stack.push_async_callback(server.end)
    await server.start()
    return server


Measure = Callable[[ServerProcess, BurstPlan, int, int], dict[str, float]]


def _measures(plan: BurstPlan) -> list[tuple[Measure, int]]:
    each = [
        (measure, n_streams)
        for n_streams in plan.streams
        for measure in (measure_prefill, measure_decode)
    ]
    return [*each, (measure_cached, 1)]


def _measured(
    measure: Measure, server: ServerProcess, plan: BurstPlan, n_streams: int, round_number: int
) -> dict[str, float]:
    forget(server, max(plan.streams))
    return measure(server, plan, n_streams, round_number)


def forget(server: ServerProcess, n_slots: int) -> None:
    """With a unified KV cache, rows that idle slots keep would slow the next burst.

    This server has to find that out by itself.
    """
    if server.program.can_erase_slots:
        for slot in range(n_slots):
            url = f"{server.url}/slots/{slot}?action=erase"
            urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=30).close()


def measure_prefill(
    server: ServerProcess, plan: BurstPlan, n_streams: int, round_number: int
) -> dict[str, float]:
    prompts = _prompts(f"prefill {round_number}", n_streams, plan.prefill_words)
    results = run_burst(Burst(server.port, prompts, max_tokens=1))
    first_token = [result.text_seconds[0] for result in results]
    return {
        PREFILL: sum(result.n_prompt for result in results) / max(first_token),
        FIRST_TOKEN: 1000 * median(first_token),
    }


def measure_decode(
    server: ServerProcess, plan: BurstPlan, n_streams: int, round_number: int
) -> dict[str, float]:
    prompts = _prompts(f"decode {round_number}", n_streams, plan.decode_words)
    results = run_burst(Burst(server.port, prompts, plan.decode_tokens))
    values = {DECODE: decode_rate(results)}
    server_rates = [r.server_decode_rate for r in results if r.server_decode_rate is not None]
    if len(server_rates) == n_streams:
        values[DECODE_BY_SERVER] = sum(server_rates)
    return values


def measure_cached(
    server: ServerProcess, plan: BurstPlan, n_streams: int, round_number: int
) -> dict[str, float]:
    """The first token of a prompt that was sent before, all of it; the caches are on."""
    prompts = _prompts(f"cached {round_number}", n_streams, plan.cached_words)
    burst = Burst(server.port, prompts, max_tokens=1, cache_prompt=True)
    run_burst(burst)
    seconds = [run_burst(burst)[0].text_seconds[0] for _ in range(plan.n_cached)]
    return {CACHED_FIRST_TOKEN: 1000 * median(seconds)}


def decode_rate(results: Sequence[StreamResult]) -> float:
    """Tokens of all streams while every one of them was decoding, over that time."""
    start = max(result.text_seconds[0] for result in results)
    end = min(result.text_seconds[-1] for result in results)
    if end <= start:
        raise BurstFailed("A stream had ended before another began; there is nothing to compare.")
    n_tokens = 0.0
    for result in results:
        n_pieces = sum(start < seconds <= end for seconds in result.text_seconds)
        n_tokens += n_pieces * result.n_generated / len(result.text_seconds)
    return n_tokens / (end - start)


def _prompts(name: str, n_streams: int, n_words: int) -> tuple[str, ...]:
    """Equal for all servers, different for each stream, burst and round from the first token."""
    prompts = []
    for stream in range(n_streams):
        choose = random.Random(f"{name} {n_streams} {stream}")
        opening = f"{choose.randrange(10**6):06}"
        prompts.append(" ".join([opening, *choose.choices(WORDS.split(), k=n_words)]))
    return tuple(prompts)
