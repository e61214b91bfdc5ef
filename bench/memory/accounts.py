"""Whether the memory tier's books are right: accounted bytes beside what the process grew by.

    python -m bench.memory.accounts [NAME...]

`rekindle serve` with random weights and no disk. Prompts that have nothing in common fill the
memory tier to its budget, then push each other out until everything was replaced three times;
at last the cache is emptied. Growth is anonymous memory by the kernel's count, beyond that of a
server that has used its whole context and holds nothing.
"""

import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from gguf import GGUFWriter, TokenType
from rich.console import Console
from rich.table import Table

from tests.support.server_process import ServerProcess, serve
from tests.support.tables import anonymous_bytes
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.tiny_vocabulary import CONTROL_TOKENS, END_OF_TEXT, TURN_END, vocabulary

CONTEXT_TOKENS, LONG_TOKENS = 4096, 1024
N_REPLACED = 3
N_WARM_UP = 10  # picked
LIMIT = 0.05
MIB = 2**20

N_EMBD, N_LAYER, N_HEAD, HEAD_DIM, N_FF = 64, 2, 128, 32, 96  # 32 KiB of rows per token


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    architecture: TinyArchitecture | None  # None: rows of 32 KiB per token
    budget_bytes: int
    prompt_tokens: int
    more_tokens: int = 0  # at most, at random


CASES = (
    Case("wide-256", None, 256 * MIB, 1024),  # payloads of 8 MiB
    Case("wide-1024", None, 1024 * MIB, 1024),
    Case("mixed-256", None, 256 * MIB, 16, 1000),
    Case("narrow-128", TinyArchitecture.LLAMA, 128 * MIB, 1024),  # of 256 KiB
    Case(
        "short-64", TinyArchitecture.LLAMA, 64 * MIB, 100
    ),  # of 100 KiB: malloc does not map these
    # What a server takes beside its cache differs by 2 MiB from start to start.
    Case("states-128", TinyArchitecture.MAMBA2, 128 * MIB, 256),
)


@dataclass(frozen=True, slots=True)
class Reading:
    moment: str
    accounted_bytes: float
    grown_bytes: int
    n_entries: float

    @property
    def error(self) -> float:
        return self.grown_bytes / self.accounted_bytes - 1 if self.accounted_bytes else 0.0


def main(names: list[str]) -> int:
    table = Table("case", "moment", "entries", "accounted, MiB", "grown, MiB", "off by")
    worst = 0.0
    for case in CASES:
        if names and case.name not in names:
            continue
        for reading in _measure(case):
            table.add_row(case.name, *_cells(reading))
            if reading.moment.startswith(("full", "replaced")):
                worst = max(worst, abs(reading.error))
    console = Console()
    console.print(table)
    console.print(f"At the budget the books are off by {worst:.1%} at most; {LIMIT:.0%} may be.")
    return int(worst > LIMIT)


def _cells(reading: Reading) -> Iterator[str]:
    yield reading.moment
    yield f"{reading.n_entries:.0f}"
    yield f"{reading.accounted_bytes / MIB:.1f}"
    yield f"{reading.grown_bytes / MIB:.1f}"
    yield f"{reading.error:+.1%}" if reading.accounted_bytes else ""


def _measure(case: Case) -> Iterator[Reading]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        if case.architecture is None:
            _write_wide_model(model)
        else:
            write_tiny_model(model, case.architecture)
        arguments = (
            *("--ctx-size", str(CONTEXT_TOKENS), "--parallel", "1", "--threads", "1"),
            *("--cache-ram", str(case.budget_bytes), "--no-cache-disk", "--log-level", "warning"),
        )
        with serve(str(model), *arguments) as server:
            filling = _Filling(server, case)
            yield from filling.readings()
            speed = f"{filling.megabytes_per_second():.0f} MB/s"
            Console(stderr=True).print(f"{case.name}: saved into memory at {speed}")


class _Filling:
    def __init__(self, server: ServerProcess, case: Case) -> None:
        self._server = server
        self._case = case
        self._http = httpx.Client(base_url=server.url, timeout=600)
        self._noise = random.Random(1)
        self._n_base_bytes = 0

    def readings(self) -> Iterator[Reading]:
        # One that is kept, for tables that are made at once but touched late. No more of them:
        # what entries leave to malloc when they go would serve those that are counted.
        self._ask(LONG_TOKENS)
        self._empty()
        for _ in range(N_WARM_UP):
            self._ask(LONG_TOKENS, cache_prompt=False)
        self._n_base_bytes = self._anonymous_bytes()
        yield self._read("empty")
        for percent in (25, 50, 75):
            while self._accounted() < self._case.budget_bytes * percent // 100:
                self._ask_next()
            yield self._read(f"{percent} %")
        while not self._evictions():
            self._ask_next()
        yield self._read("full")
        n_entries = self._metric("rekindle_cache_entries", "memory")
        for times in range(1, N_REPLACED + 1):
            while self._evictions() < times * n_entries:
                self._ask_next()
            yield self._read(f"replaced {times} x")
        self._empty()
        yield self._read("emptied")

    def _ask_next(self) -> None:
        case = self._case
        self._ask(case.prompt_tokens + self._noise.randrange(case.more_tokens + 1))

    def _ask(self, n_tokens: int, *, cache_prompt: bool = True) -> None:
        """Nothing is shared, as the first tokens differ, and no reply is remembered."""
        prompt = [self._noise.randrange(1, 250) for _ in range(n_tokens)]
        body = {"prompt": prompt, "max_tokens": 0, "cache_prompt": cache_prompt}
        # One name for all: else each would get one, and names have room of their own.
        body |= {"cache_key": "accounts"} if cache_prompt else {}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def _empty(self) -> None:
        self._ask(1, cache_prompt=False)
        self._http.delete("/v1/cache").raise_for_status()

    def _read(self, moment: str) -> Reading:
        self._ask(1, cache_prompt=False)  # the engine saves after it has answered
        return Reading(
            moment,
            self._accounted(),
            self._anonymous_bytes() - self._n_base_bytes,
            self._metric("rekindle_cache_entries", "memory"),
        )

    def _accounted(self) -> float:
        return self._metric("rekindle_cache_bytes", "memory")

    def _evictions(self) -> float:
        return self._metric("rekindle_cache_evictions_total", "memory")

    def megabytes_per_second(self) -> float:
        """Of saving: from the context into memory."""
        n_bytes = self._metric("rekindle_cache_saved_bytes_total", "memory")
        return n_bytes / self._metric("rekindle_cache_save_seconds_total", "memory") / 1e6

    def _metric(self, name: str, tier: str) -> float:
        metrics = self._http.get("/metrics").text
        [value] = re.findall(rf'^{name}{{tier="{tier}"}} (\S+)$', metrics, re.MULTILINE)
        return float(value)

    def _anonymous_bytes(self) -> int:
        return anonymous_bytes(self._server.process.pid)


def _write_wide_model(path: Path) -> None:
    """Dense attention with so many heads that its rows are large and its work is small."""
    writer = GGUFWriter(str(path), "llama")
    words = vocabulary()
    n_text, n_vocab = len(words.tokens) - len(CONTROL_TOKENS), len(words.tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words.tokens)
    writer.add_token_types([TokenType.NORMAL] * n_text + [TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.id(END_OF_TEXT))
    writer.add_eos_token_id(words.id(TURN_END))
    writer.add_context_length(32768)
    writer.add_block_count(N_LAYER)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    noise = np.random.default_rng(1)

    def matrix(name: str, n_in: int, n_out: int) -> None:
        values = noise.normal(0, n_in**-0.5, (n_out, n_in)).astype(np.float16)
        writer.add_tensor(f"{name}.weight", values)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, np.float32))

    matrix("token_embd", N_EMBD, n_vocab)
    matrix("output", N_EMBD, n_vocab)
    norm("output_norm")
    for block in (f"blk.{layer}" for layer in range(N_LAYER)):
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        for part in ("q", "k", "v"):
            matrix(f"{block}.attn_{part}", N_EMBD, N_HEAD * HEAD_DIM)
        matrix(f"{block}.attn_output", N_HEAD * HEAD_DIM, N_EMBD)
        matrix(f"{block}.ffn_gate", N_EMBD, N_FF)
        matrix(f"{block}.ffn_up", N_EMBD, N_FF)
        matrix(f"{block}.ffn_down", N_FF, N_EMBD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
