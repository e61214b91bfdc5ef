"""A reply's header that tells in one line what was found in the cache, and where."""

from rekindle.chat.reply.events import ReplyDone, ReplyEvent, ReplyProgress, ReplyStats
from rekindle.generation.events import CacheSource, Spans

CACHE_HEADER = "x-rekindle-cache"
PENDING = "pending"  # the reply has to begin before it is known


def cache_header(stats: ReplyStats) -> dict[str, str]:
    """Of several replies, the first one's."""
    return {CACHE_HEADER: _value(stats.spans, n_cached=stats.n_cached, n_prompt=stats.n_prompt)}


def cache_header_value(event: ReplyEvent) -> str:
    """As far as a stream's first event tells it."""
    match event:
        case ReplyProgress():
            return _value(event.spans, n_cached=event.n_cached, n_prompt=event.n_total)
        case ReplyDone(_, stats):
            return cache_header(stats)[CACHE_HEADER]
        case _:
            return PENDING


def _value(spans: Spans, *, n_cached: int, n_prompt: int) -> str:
    found = spans.by_source()
    tiers = [tier.value for tier in CacheSource if tier in found]
    return f"hit={n_cached}/{n_prompt} from={','.join(tiers) or '-'}"
