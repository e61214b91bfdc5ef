"""The x-rekindle-cache header: how much of the prompt was cached, and in which tiers."""

from rekindle.chat.reply.events import ReplyDone, ReplyEvent, ReplyProgress
from rekindle.generation.events import CacheSource, Spans

CACHE_HEADER = "x-rekindle-cache"
PENDING = "pending"  # the reply began before the cached tokens were known


def cache_header_value(event: ReplyEvent) -> str:
    """Return the header's value for the first event; PENDING if the event has no counts."""
    match event:
        case ReplyProgress():
            return _value(event.spans, n_cached=event.n_cached, n_prompt=event.n_total)
        case ReplyDone(_, stats):
            return _value(stats.spans, n_cached=stats.n_cached, n_prompt=stats.n_prompt)
        case _:
            return PENDING


def _value(spans: Spans, *, n_cached: int, n_prompt: int) -> str:
    found = spans.by_source()
    tiers = [tier.value for tier in CacheSource if tier in found]
    return f"hit={n_cached}/{n_prompt} from={','.join(tiers) or '-'}"
