"""Measure the search for drafts apart from the model: the time on the engine thread, and memory.

    python -m bench.parts.draft_lookup

A prompt is read, then tokens are added for which nothing is known: the dearest case.
"""

import random
import sys
import time

from rekindle.cache.drafts.stored_texts import StoredTexts
from rekindle.cache.entry import BLOCK_TOKENS, Header, Kind, Reason, entry_key, token_bytes
from rekindle.cache.index import PrefixIndex, Where
from rekindle.engine.speculation.acceptance import engine_rates, reply_rates
from rekindle.engine.speculation.drafter import Drafter

ROOT = bytes(range(16))
N_VOCAB = 50_000
N_BLOCKS = 2_000
N_TOKENS = 2_000


def main() -> None:
    noise = random.Random(1)
    texts = _filled_store(noise)
    for n_prompt in (1_000, 20_000, 200_000):
        prompt = [noise.randrange(N_VOCAB) for _ in range(n_prompt)]
        rates = reply_rates(engine_rates())
        drafter = Drafter(prompt, [], lambda last: texts.find(ROOT, last), rates, frozenset())
        times = []
        for _ in range(N_TOKENS):
            token = noise.randrange(N_VOCAB)
            prompt.append(token)
            began = time.perf_counter()
            drafter.note(token)
            drafter.draft(16)
            times.append(time.perf_counter() - began)
        n_bytes = drafter.n_bytes
        times.sort()
        sys.stdout.write(
            f"prompt {n_prompt}: median {times[N_TOKENS // 2] * 1e6:.1f} us per token, longest"
            f" {times[-1] * 1e3:.2f} ms, {n_bytes / n_prompt:.0f} bytes per token\n"
        )


def _filled_store(noise: random.Random) -> StoredTexts:
    index = PrefixIndex(has_rows=True, has_checkpoints=False)
    texts = StoredTexts(index, lambda root, node: False)
    for _ in range(N_BLOCKS):
        tokens = token_bytes([noise.randrange(N_VOCAB) for _ in range(BLOCK_TOKENS)])
        header = Header(
            key=entry_key(ROOT, Kind.BLOCK, tokens),
            parent=ROOT,
            fingerprint=ROOT,
            kind=Kind.BLOCK,
            start=0,
            tokens=tokens,
            payload_bytes=1,
            compute_seconds=1.0,
            reason=Reason.DECODE,
            created_at=0.0,
        )
        texts.note(index.add(header, Where.MEMORY))
    began = time.perf_counter()
    while texts.advance():
        pass
    seconds = time.perf_counter() - began
    sys.stdout.write(
        f"store: {seconds / N_BLOCKS * 1e6:.0f} us per block to read,"
        f" {texts.n_bytes / 2**20:.0f} MiB\n"
    )
    return texts


if __name__ == "__main__":
    main()
