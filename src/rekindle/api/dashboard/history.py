"""The last hour of this server, in memory and bounded, sent to each page that opens.

Where a namespace may be None, that is the hour of all namespaces together.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rekindle.api.dashboard.bodies import Bucket, FirstToken
from rekindle.api.json import body_from
from rekindle.bounded_cache import BoundedCache
from rekindle.generation.events import CacheSource
from rekindle.generation.forgetting import Tombstone, Tombstones
from rekindle.observe.request_record import Observer, RequestRecord

BUCKET_SECONDS = 10
N_BUCKETS = 360  # one hour
MAX_SAMPLES = 64  # first-token times of one bucket; picked
MAX_NAMESPACES = 64  # with buckets of their own; picked
MAX_REQUESTS = 200  # sent to a page when it opens; picked


@dataclass(slots=True)
class _Bucket:
    start: int
    requests: int = 0
    tokens: dict[CacheSource, int] = field(default_factory=dict)
    prefilled: int = 0
    twice: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_ms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        for source, n_tokens in record.spans.by_source().items():
            self.tokens[source] = self.tokens.get(source, 0) + n_tokens
        self.prefilled += record.n_prefilled
        self.twice += record.n_recomputed
        self.drafted += record.drafts.n_tokens
        self.accepted += record.drafts.n_accepted
        if record.first_token_seconds is not None:
            self.first_token_ms.append(record.first_token_seconds * 1000)


class HourHistory:
    """Buckets and requests of the last hour. Used on the event loop only."""

    def __init__(self, forgotten: Tombstones, *, clock: Callable[[], float] = time.time) -> None:
        self._forgotten = forgotten
        self._clock = clock
        # By namespace. No bucket is empty.
        self._buckets = BoundedCache[str | None, deque[_Bucket]](max_items=MAX_NAMESPACES)
        self._requests: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)
        self._listeners: list[Observer] = []

    def listen(self, listener: Observer) -> None:
        self._listeners.append(listener)

    def observe(self, record: RequestRecord) -> None:
        for namespace in (None, record.namespace):
            self._bucket_now(namespace).add(record)
        if self._forgotten.cover(record.owner):
            return
        self._requests.append(replace(record, prompt_text=""))  # the text may be megabytes
        for listener in self._listeners:
            listener(record)

    def forget(self, tombstone: Tombstone) -> int:
        """Drop the requests that the deletion covers; the counts stay. Return how many."""
        kept = [record for record in self._requests if not tombstone.covers(record.owner)]
        n_dropped = len(self._requests) - len(kept)
        self._requests = deque(kept, maxlen=MAX_REQUESTS)
        return n_dropped

    def requests(self, namespace: str | None) -> list[RequestRecord]:
        return [record for record in self._requests if namespace in (None, record.namespace)]

    def buckets(self, namespace: str | None) -> list[Bucket]:
        return [_body(bucket) for bucket in self._of_the_hour(namespace)]

    def last_buckets(self, namespace: str | None) -> list[Bucket]:
        """Return the last two buckets: the first may have ended since the last snapshot."""
        return [_body(bucket) for bucket in self._of_the_hour(namespace)[-2:]]

    def first_token_ms(self, namespace: str | None) -> FirstToken:
        hour = self._of_the_hour(namespace)
        return _first_token(ms for bucket in hour for ms in bucket.first_token_ms)

    def _bucket_now(self, namespace: str | None) -> _Bucket:
        buckets = self._buckets.get(namespace) or deque(maxlen=N_BUCKETS)
        self._buckets.put(namespace, buckets)
        start = int(self._clock()) // BUCKET_SECONDS * BUCKET_SECONDS
        # The buckets stay in order even if the clock is set back.
        if not buckets or buckets[-1].start < start:
            buckets.append(_Bucket(start))
        return buckets[-1]

    def _of_the_hour(self, namespace: str | None) -> Sequence[_Bucket]:
        oldest = self._clock() - N_BUCKETS * BUCKET_SECONDS
        buckets = self._buckets.peek(namespace) or ()
        return [bucket for bucket in buckets if bucket.start > oldest]


def _body(bucket: _Bucket) -> Bucket:
    by_source = {source: bucket.tokens.get(source, 0) for source in CacheSource}
    first_token = _first_token(bucket.first_token_ms)
    return body_from(Bucket, bucket, **by_source, first_token_ms=first_token)


def _first_token(samples: Iterable[float]) -> FirstToken:
    ordered = sorted(samples)
    return FirstToken(p50=_percentile(ordered, 50), p95=_percentile(ordered, 95))


def _percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Return the percentile by nearest rank."""
    if not ordered:
        return None
    return round(ordered[(len(ordered) * percent + 99) // 100 - 1], 1)
