"""Measure decoding with drafts whose quality is known, beside llama-server.

    python -m bench.models.drafts (--model FILE | --shape tiny|8b [--type f16|q8_0]) [--gpu]
                                  [--llama-server PATH] [--rounds N] [--reply N] [--json FILE]

The model recites (`bench.models.reciter`), so every reply is known, and a wrong one is counted.
FILE is such a model. Rekindle runs with and without drafts, llama-server without and with each of
its settings for drafts. All servers run at once and take turns. The first round warms up.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from gguf import GGUFReader

from bench.engine_run import scratch_directory
from bench.models.recitations import Kind, NotEnoughTokens, Recitation, Recitations
from bench.models.reciter import SHAPES, TYPES, recital_of, write_reciter
from bench.report import CONSOLE
from rekindle.bench.burst_client import Burst, BurstFailed, StreamResult, run_burst
from rekindle.bench.peers.contenders import (
    OURS,
    WITHOUT_DRAFTS,
    Flags,
    Program,
    find_contenders,
    find_variants,
    in_turn,
)
from rekindle.bench.peers.processes import DidNotStart, ServerProcess, started
from rekindle.bench.report.summary import ratio_of
from rekindle.bench.report.tables import markdown_table
from rekindle.errors import StartupError

REPLY_TOKENS = 256
ALL_LAYERS = 999
OTHER_PEERS = ("xllamacpp", "llama_cpp.server")


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One reply of one server."""

    kind: Kind
    server: str
    round: int
    tokens_per_second: float
    n_reply: int
    n_drafted: int
    n_accepted: int
    is_right: bool  # the reply is the cycle


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    with scratch_directory() as scratch:
        try:
            rows = asyncio.run(_measured(options, scratch))
        except (StartupError, DidNotStart) as error:
            CONSOLE.print(error.message, markup=False)
            return 2
        except NotEnoughTokens as error:
            CONSOLE.print(str(error), markup=False)
            return 2
    CONSOLE.print(table(rows), markup=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not all(row.is_right for row in rows))


async def _measured(options: argparse.Namespace, scratch: Path) -> list[DraftRow]:
    model = options.model or write_reciter(
        scratch / "reciter.gguf", SHAPES[options.shape], TYPES[options.type]
    )
    recitations = Recitations(recital_of(_n_vocab(model)), options.reply)
    rounds = [list(recitations.round(number)) for number in range(options.rounds + 1)]
    n_longest = max(len(each.prompt) for recited in rounds for each in recited)
    flags = Flags(
        model=model,
        ctx_size=2 * (n_longest + options.reply),
        parallel=1,
        threads=options.threads,
    )
    rows: list[DraftRow] = []
    async with AsyncExitStack() as stack:
        servers = await _start(options, flags, scratch, stack)
        for number, recited in enumerate(rounds):
            for recitation in recited:
                for name, process in in_turn(servers, number):
                    try:
                        row = await asyncio.to_thread(play, name, process, number, recitation)
                    except BurstFailed as error:
                        CONSOLE.print(f"{name}, {recitation.kind}: {error.message}", markup=False)
                        continue
                    if number:
                        rows.append(row)
    return rows


async def _start(
    options: argparse.Namespace, flags: Flags, scratch: Path, stack: AsyncExitStack
) -> list[tuple[str, ServerProcess]]:
    path = options.llama_server
    contenders = find_contenders(llama_server=path, remotes=(), without=OTHER_PEERS)
    variants = find_variants(contenders, llama_server=path, without=())
    more = ("--n-gpu-layers", str(ALL_LAYERS if options.gpu else 0))
    servers = []
    for program in (*contenders, *variants):
        assert isinstance(program, Program)  # there are no remote ones
        CONSOLE.print(f"starting {program.name} {program.version}", markup=False)
        servers.append((program.name, await started(program, flags, scratch, stack, more)))
    return servers


def play(name: str, process: ServerProcess, number: int, recitation: Recitation) -> DraftRow:
    n_reply = len(recitation.reply)
    burst = Burst(process.port, (recitation.prompt,), n_reply, cache_prompt=True)
    [result] = run_burst(burst)
    return DraftRow(
        recitation.kind,
        name,
        number,
        reply_rate(result),
        result.n_generated,
        result.n_drafted,
        result.n_accepted,
        is_right=result.text == recitation.reply_text,
    )


def reply_rate(result: StreamResult) -> float:
    """Return the tokens per second after the first one, by the client's clock."""
    seconds = result.text_seconds[-1] - result.text_seconds[0]
    if not seconds:
        raise BurstFailed("The reply came in one piece; there is no time to measure.")
    return (result.n_generated - 1) / seconds


def table(rows: Sequence[DraftRow]) -> str:
    """Return medians over the rounds, with the ratio to Rekindle without drafts."""
    lines = [["kind", "server", "tokens/s", "ratio", "accepted", "drafted", "wrong replies"]]
    for kind in Kind:
        rates = {
            server: {row.round: row.tokens_per_second for row in rows if _is(row, kind, server)}
            for server in sorted({row.server for row in rows}, key=_order)
        }
        for server, by_round in rates.items():
            here = [row for row in rows if _is(row, kind, server)]
            if not here:
                continue
            ratio = ratio_of(by_round, rates.get(WITHOUT_DRAFTS, {}))
            lines.append(
                [
                    kind,
                    server,
                    f"{median(by_round.values()):.1f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                    str(sum(row.n_accepted for row in here)),
                    str(sum(row.n_drafted for row in here)),
                    str(sum(not row.is_right for row in here)),
                ]
            )
    return markdown_table(lines)


def _order(server: str) -> tuple[bool, str]:
    """Sort this server and its variant before the others."""
    return not server.startswith(OURS), server


def _is(row: DraftRow, kind: Kind, server: str) -> bool:
    return row.kind is kind and row.server == server


def _n_vocab(model: Path) -> int:
    field = GGUFReader(model).fields.get("llama.vocab_size")
    if field is None:
        raise StartupError(f"{model} is not a model of `python -m bench.models.reciter`.")
    return int(field.contents())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.models.drafts")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--shape", choices=[*SHAPES])
    parser.add_argument("--type", choices=[*TYPES], default="q8_0")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reply", type=int, default=REPLY_TOKENS)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
