"""Prefill and decode speed through HTTP. The servers take turns.

Each burst of streams has prompts that no server has seen, so no cache can answer them. Only
`measure_cached` sends a prompt twice. The first round warms up all servers and is thrown away.
"""

import asyncio
import random
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http.client import HTTPException
from statistics import median

from rekindle.bench.burst_client import Burst, BurstFailed, StreamResult, run_burst
from rekindle.bench.peers.contenders import Contender, Flags, Program, in_turn
from rekindle.bench.peers.processes import DidNotStart, ServerProcess, started
from rekindle.bench.play import Conditions
from rekindle.bench.report.results import BurstRow, Progress

PREFILL = "prefill_tokens_per_second"
FIRST_TOKEN = "first_token_ms"
DECODE = "decode_tokens_per_second"
DECODE_BY_SERVER = "decode_tokens_per_second_by_server"  # by the server's own timings
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
    """Return the servers to send bursts to. Remote ones may run with other flags."""
    return [each for each in contenders if isinstance(each, Program) and each.has_bursts]


async def run_bursts(
    plan: BurstPlan, contenders: Sequence[Contender], conditions: Conditions, progress: Progress
) -> None:
    """Add a row for each burst. A server that does not start and a burst that fails have none."""
    flags = Flags(
        model=conditions.model,
        ctx_size=plan.n_ctx_needed,
        parallel=max(plan.streams),
        threads=conditions.threads,
        ubatch_size=conditions.ubatch_size,
    )
    async with AsyncExitStack() as stack:
        servers: list[tuple[Program, ServerProcess]] = []
        for program in programs_of(contenders):
            progress.on_step(f"throughput  {program.name}  starting")
            try:
                more = program.burst_arguments
                process = await started(program, flags, conditions.scratch, stack, more)
                servers.append((program, process))
            except DidNotStart as error:
                progress.on_trouble(f"throughput, {program.name}: {error.message}")
        for round_number in range(plan.n_rounds + 1):
            for measure, n_streams in _measures(plan):
                for program, process in in_turn(servers, round_number):
                    await _measure(
                        measure, program, process, plan, n_streams, round_number, progress
                    )


Speeds = dict[str, float]  # by measure
Measure = Callable[[int, BurstPlan, int, int], Speeds]


def _measures(plan: BurstPlan) -> Iterator[tuple[Measure, int]]:
    for n_streams in plan.streams:
        yield measure_prefill, n_streams
        yield measure_decode, n_streams
    yield measure_cached, 1


async def _measure(
    measure: Measure,
    program: Program,
    process: ServerProcess,
    plan: BurstPlan,
    n_streams: int,
    round_number: int,
    progress: Progress,
) -> None:
    def burst() -> Speeds:
        if program.can_erase_slots:
            erase_slots(process.url, max(plan.streams))
        return measure(process.port, plan, n_streams, round_number)

    name, where = program.name, f"round {round_number}, {n_streams} streams"
    progress.on_step(f"throughput  {name}  {where}")
    values: Speeds = {}
    try:
        values = await asyncio.to_thread(burst)
    except (BurstFailed, OSError, HTTPException) as error:
        progress.on_trouble(f"throughput, {name}, {where}: {error}")
    progress.on_done()
    if round_number:
        progress.bursts += [
            BurstRow(measure=each, streams=n_streams, server=name, round=round_number, value=value)
            for each, value in values.items()
        ]


def erase_slots(url: str, n_slots: int) -> None:
    """Erase the rows of idle slots: in a unified KV cache they slow the next burst.

    Here the slot is a name of the prompt that was sent with `id_slot`. Other prompts of the bursts
    are not cached, so their rows are dropped when they end.
    """
    for slot in range(n_slots):
        request = urllib.request.Request(f"{url}/slots/{slot}?action=erase", b"{}")
        urllib.request.urlopen(request, timeout=30).close()


def measure_prefill(port: int, plan: BurstPlan, n_streams: int, round_number: int) -> Speeds:
    prompts = _prompts(f"prefill {round_number}", n_streams, plan.prefill_words)
    results = run_burst(Burst(port, prompts, max_tokens=1))
    first_token = [result.text_seconds[0] for result in results]
    return {
        PREFILL: sum(result.n_prompt for result in results) / max(first_token),
        FIRST_TOKEN: 1000 * median(first_token),
    }


def measure_decode(port: int, plan: BurstPlan, n_streams: int, round_number: int) -> Speeds:
    prompts = _prompts(f"decode {round_number}", n_streams, plan.decode_words)
    results = run_burst(Burst(port, prompts, plan.decode_tokens))
    values = {DECODE: decode_rate(results)}
    server_rates = [r.server_decode_rate for r in results if r.server_decode_rate is not None]
    if len(server_rates) == n_streams:
        values[DECODE_BY_SERVER] = sum(server_rates)
    return values


def measure_cached(port: int, plan: BurstPlan, n_streams: int, round_number: int) -> Speeds:
    """Measure the first token of a prompt that was sent before, with the caches on."""
    prompts = _prompts(f"cached {round_number}", n_streams, plan.cached_words)
    burst = Burst(port, prompts, max_tokens=1, cache_prompt=True)
    run_burst(burst)
    seconds = [run_burst(burst)[0].text_seconds[0] for _ in range(plan.n_cached)]
    return {CACHED_FIRST_TOKEN: 1000 * median(seconds)}


def decode_rate(results: Sequence[StreamResult]) -> float:
    """Return the tokens per second of all streams, over the time in which all of them decoded."""
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
    """Make prompts that are equal for all servers.

    Those of different streams, bursts and rounds differ from the first token on.
    """
    prompts = []
    for stream in range(n_streams):
        choose = random.Random(f"{name} {n_streams} {stream}")
        opening = f"{choose.randrange(10**6):06}"
        prompts.append(" ".join([opening, *choose.choices(WORDS.split(), k=n_words)]))
    return tuple(prompts)
