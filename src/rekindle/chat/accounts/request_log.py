"""The log line of a reply, written when it ends."""

import logging

from rekindle.generation.events import CacheSource, Spans
from rekindle.observe.request_record import RequestRecord

_log = logging.getLogger("rekindle.request")


def log_request(record: RequestRecord) -> None:
    first_token, speed = record.first_token_seconds, record.tokens_per_second
    _log.info(
        "request=%s prompt=%d cached=%d from=%s prefilled=%d turns=%d media=%d miss=%s"
        " lost=%d queue_ms=%.0f restore_ms=%.1f first_token_ms=%s generated=%d drafted=%d"
        " accepted=%d tokens_per_s=%s finish=%s",
        record.id,
        record.n_prompt,
        record.n_cached,
        by_source(record.spans),
        record.n_prefilled,
        record.n_remembered_turns,
        record.n_media_omitted,
        record.miss.reason if record.miss else "-",
        record.miss.tokens_lost if record.miss else 0,
        record.queue_seconds * 1e3,
        record.restore_seconds * 1e3,
        "-" if first_token is None else f"{first_token * 1e3:.0f}",
        record.n_generated,
        record.drafts.n_tokens,
        record.drafts.n_accepted,
        "-" if speed is None else f"{speed:.1f}",
        record.finish,
    )


def by_source(spans: Spans) -> str:
    """Return the tokens by source, such as `live:512,disk:1024`."""
    counts = spans.by_source()
    parts = [f"{source}:{counts[source]}" for source in CacheSource if source in counts]
    return ",".join(parts) or "-"
