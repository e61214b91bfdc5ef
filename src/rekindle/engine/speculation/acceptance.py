"""How often the next drafted token is right, by its source and by how long the match is.

Every sampled token is compared with the one that would have been drafted, drafted or not. The
estimates cost nothing, and drafts begin where they would have been right.
"""

from collections.abc import Iterator

from rekindle.generation.drafts import DraftSource

# A match gets more certain with each token: the buckets end before these lengths.
BUCKET_ENDS = (4, 8, 16, 32)
N_BUCKETS = len(BUCKET_ENDS) + 1
# What is assumed before the first tokens, for each bucket; picked.
PRIORS = {
    DraftSource.REPLY: (0.8, 0.85, 0.9, 0.95, 0.97),
    DraftSource.CONTEXT: (0.3, 0.5, 0.7, 0.8, 0.9),
    DraftSource.STORE: (0.3, 0.5, 0.7, 0.8, 0.9),
}
PRIOR_WEIGHT = 16.0  # tokens, of the prior in the engine's rates; picked
ENGINE_WEIGHT = 4.0  # tokens, of the engine's rates in those of one reply; picked
ENGINE_MEMORY = 512.0  # tokens after which the engine's rates begin to forget; picked
REPLY_MEMORY = 32.0  # the same for one reply


class Rates:
    """The rate of right tokens per source and bucket. `before` is what to assume at first."""

    def __init__(self, before: "Rates | None", weight: float, memory: float) -> None:
        self._before = before
        self._weight = weight
        self._memory = memory
        self._right = {source: [0.0] * N_BUCKETS for source in DraftSource}
        self._all = {source: [0.0] * N_BUCKETS for source in DraftSource}

    def note(self, source: DraftSource, n_matched: int, *, is_right: bool) -> None:
        bucket = _bucket(n_matched)
        right, total = self._right[source], self._all[source]
        if total[bucket] >= self._memory:
            right[bucket] /= 2
            total[bucket] /= 2
        right[bucket] += is_right
        total[bucket] += 1
        if self._before is not None:
            self._before.note(source, n_matched, is_right=is_right)

    def chances(self, source: DraftSource, n_matched: int, n_tokens: int) -> Iterator[float]:
        """Yield for each token of a draft the chance that it and all before it are right."""
        chance, rate, last = 1.0, 0.0, -1
        for n_matched_then in range(n_matched, n_matched + n_tokens):
            bucket = _bucket(n_matched_then)
            if bucket != last:
                rate, last = self._rate(source, bucket), bucket
            chance *= rate
            yield chance

    def _rate(self, source: DraftSource, bucket: int) -> float:
        before = self._before
        assumed = PRIORS[source][bucket] if before is None else before._rate(source, bucket)
        right, total = self._right[source][bucket], self._all[source][bucket]
        return (right + self._weight * assumed) / (total + self._weight)


def engine_rates() -> Rates:
    return Rates(None, PRIOR_WEIGHT, ENGINE_MEMORY)


def reply_rates(engine: Rates) -> Rates:
    return Rates(engine, ENGINE_WEIGHT, REPLY_MEMORY)


def _bucket(n_matched: int) -> int:
    for bucket, end in enumerate(BUCKET_ENDS):
        if n_matched < end:
            return bucket
    return N_BUCKETS - 1
