"""Measure samplers: how long one takes to make, to resume, and to choose a token.

The logits are made up, and the vocabulary is the embedded model's.

python -m bench.parts.sampling
"""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
from rich.console import Console

from rekindle.generation.request import (
    Grammar,
    GrammarKind,
    GrammarStart,
    ReasoningLimit,
    Sampling,
    Trigger,
)
from rekindle.llama.context import LlamaBackend
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model
from tests.llama.driver import make_backend

N_LONG = 200_000
N_REPLY = 4_000
N_SAMPLES = 400
CALLING = Grammar(
    GrammarKind.LARK,
    'start: "<tool_call>" arguments "</tool_call>"\narguments: %json {"type": "object"}',
    GrammarStart(triggers=(Trigger("<tool_call>"),)),
)
LIMIT = ReasoningLimit(max_tokens=2**30, opening="<think>", closing="</think>", begins_inside=True)


def main() -> None:
    model = GgufModel(resolve_model(None).path, gpu_layers=0)
    backend = make_backend(model, n_slots=1)
    backend.n_ctx = 2 * N_LONG  # so that a window may be as long as the prompt
    backend.prepare_grammars()
    vocabulary = model.vocabulary
    words = np.random.default_rng(1).zipf(1.15, size=N_LONG) % vocabulary.n_vocab
    prompt = [int(token) for token in words]
    text = vocabulary.tokenize("A sentence of a reply. " * N_REPLY, parse_special=False)
    reply = text[:N_REPLY]
    list_schema = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}')
    listed = vocabulary.tokenize("[" + '"some words", ' * N_REPLY, parse_special=False)[:N_REPLY]
    penalties = Sampling(seed=1, repeat_penalty=1.1, frequency_penalty=0.2)
    whole = Sampling(seed=1, repeat_penalty=1.1, repeat_last_n=-1)
    cases: dict[str, tuple[Sampling, Sequence[int], int]] = {
        "greedy": (Sampling(temperature=0), prompt, 0),
        "seeded": (Sampling(seed=1), prompt, 0),
        "greedy, with a budget for reasoning": (
            Sampling(temperature=0, reasoning_limit=LIMIT),
            [],
            0,
        ),
        "DRY, 64 tokens": (Sampling(seed=1, dry_multiplier=0.8), prompt, 0),
        "XTC": (Sampling(seed=1, xtc_probability=0.5), prompt, 0),
        "Mirostat 2": (Sampling(seed=1, mirostat=2), prompt, 0),
        "penalties, 64 tokens": (penalties, prompt, 0),
        "greedy, penalties, 64 tokens": (
            Sampling(temperature=0, repeat_penalty=1.1),
            prompt,
            0,
        ),
        f"penalties, {N_LONG:,} tokens": (whole, prompt, 0),
        f"schema, resumed after {N_REPLY:,} tokens": (
            Sampling(seed=1, grammar=list_schema),
            listed,
            len(listed),
        ),
        f"tools, resumed after {N_REPLY:,} tokens": (
            Sampling(seed=1, grammar=CALLING),
            reply,
            len(reply),
        ),
    }
    console = Console()
    for name, (sampling, tokens, n_reply) in cases.items():
        making, choosing = _measure(backend, sampling, tokens, n_reply)
        console.print(f"{name}: make {making * 1e3:,.2f} ms, choose {choosing * 1e6:,.0f} us")
    backend.close()
    model.close()


def _measure(
    backend: LlamaBackend, sampling: Sampling, tokens: Sequence[int], n_reply: int
) -> tuple[float, float]:
    """Return the seconds to make a sampler, and the median seconds to choose a token."""
    backend.clear_all()
    backend.decode([1], [0], [0], [0])
    n_vocab = backend._logits().shape[1]
    rows = np.random.default_rng(2).normal(scale=4, size=(20, n_vocab)).astype(np.float32)
    if sampling.grammar is not None:
        backend.check_grammar(sampling.grammar)
    began = time.perf_counter()
    sampler = backend.new_sampler(sampling, tokens, n_reply, None)
    making = time.perf_counter() - began
    times = []
    for number in range(N_SAMPLES):
        backend._logits()[0] = rows[number % len(rows)]
        began = time.perf_counter()
        backend.sample([sampler], [0])
        times.append(time.perf_counter() - began)
    sampler.close()
    return making, median(times)


if __name__ == "__main__":
    main()
