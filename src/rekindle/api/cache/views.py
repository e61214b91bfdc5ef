"""Cache state as JSON: the report of a reply, stored prefixes, tiers, sessions, forecasts."""

from collections.abc import Iterator, Sequence

from rekindle.api.cache.bodies import (
    CLASSES,
    BranchEntry,
    CacheDeleted,
    CacheStories,
    CacheStory,
    DraftTokens,
    ExpectedTimes,
    Lookup,
    MissBody,
    NeutralisedText,
    OmittedMediaBody,
    Rekindle,
    SessionEntry,
    Span,
    StickyToolsBody,
    StoredEntry,
    TierProps,
    TierTokens,
    TierUsage,
)
from rekindle.api.json import body_from
from rekindle.chat.accounts.sessions import Session
from rekindle.chat.reply.events import ReplyStats
from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.generation.forgetting import Deleted
from rekindle.generation.status import Forecast, StoredBranch, StoredPrefix, TierStatus
from rekindle.observe.request_record import Miss


def rekindle_of(stats: Sequence[ReplyStats]) -> Rekindle:
    stories = [_story(each) for each in stats]
    first = stories[0]
    return first if len(stories) == 1 else CacheStories(**first, replies=stories)


def miss_body(miss: Miss | None) -> MissBody | None:
    return body_from(MissBody, miss) if miss else None


def tokens_by_tier(spans: Spans) -> list[TierTokens]:
    counts = spans.by_source()
    return [
        TierTokens(tier=tier.value, tokens=counts[tier]) for tier in CacheSource if tier in counts
    ]


def drafted_tokens(drafts: DraftCounts) -> list[DraftTokens]:
    return [
        DraftTokens(source=source.value, tokens=count.n_tokens, accepted=count.n_accepted)
        for source, count in drafts.by_source().items()
    ]


def tier_usage(tier: TierStatus) -> TierUsage:
    return body_from(TierUsage, tier, entries=tier.n_entries, bytes=tier.n_bytes)


def tier_props(tier: TierStatus) -> TierProps:
    return TierProps(**tier_usage(tier), trouble=tier.trouble, directory=tier.directory)


def cache_deleted(key: str | None, deleted: Deleted) -> CacheDeleted:
    return CacheDeleted(
        object="cache.deleted",
        key=key,
        deleted=sum(deleted.counts.values()),
        places={place.value: n for place, n in deleted.counts.items()},
        unreached=list(deleted.unreached),
    )


def branch_entry(branch: StoredBranch) -> BranchEntry:
    return body_from(BranchEntry, branch, **_renamed(branch))


def stored_entry(stored: StoredPrefix) -> StoredEntry:
    return body_from(StoredEntry, stored, **_renamed(stored), tokens=stored.n_tokens)


def _renamed(stored: StoredPrefix | StoredBranch) -> dict[str, object]:
    return {
        "class": CLASSES[stored.rank],
        "bytes": stored.n_bytes,
        "tiers": stored.sources,
        "last_used": stored.used_at,
    }


def session_entry(session: Session) -> SessionEntry:
    ledger, used_at = session.ledger, session.used_at
    return body_from(SessionEntry, ledger, session=session.id, last_used=used_at)


def lookup_of(forecast: Forecast, miss: Miss | None) -> Lookup:
    restore, prefill = _ms(forecast.restore_seconds), _ms(forecast.prefill_seconds)
    total = None if restore is None or prefill is None else round(restore + prefill, 3)
    return Lookup(
        object="cache.lookup",
        prompt_tokens=forecast.n_prompt,
        cached=tokens_by_tier(forecast.spans),
        prefilled=forecast.n_prompt - forecast.n_cached,
        expected_ms=ExpectedTimes(restore=restore, prefill=prefill, total=total),
        miss=miss_body(miss),
    )


def _story(stats: ReplyStats) -> CacheStory:
    story: CacheStory = {
        "cached": tokens_by_tier(stats.spans),
        "prefilled": stats.n_prefilled,
        "restored_ms": round(stats.restore_seconds * 1e3, 3),
        "remembered_turns": stats.n_remembered_turns,
        "dropped_messages": stats.n_dropped_messages,
        "spans": [part for span in stats.spans for part in _parts(span, stats.remembered)],
        "session": stats.session,
        "class": CLASSES[stats.rank],
        "prefilled_twice": stats.n_recomputed,
    }
    if stats.drafts.n_tokens:
        story["drafts"] = drafted_tokens(stats.drafts)
    if stats.neutralised:
        story["neutralised"] = [
            NeutralisedText(rule=each.rule, count=each.count) for each in stats.neutralised
        ]
    if stats.n_reasoning:
        story["reasoning_tokens"] = stats.n_reasoning
    if stats.media_omitted:
        story["media_omitted"] = [body_from(OmittedMediaBody, each) for each in stats.media_omitted]
    if (sticky := stats.sticky) is not None:
        story["sticky_tools"] = StickyToolsBody(
            change=sticky.change.value, tools=sticky.n_tools, saved_tokens=stats.n_sticky_saved
        )
    if stats.is_explained:
        story["miss"] = miss_body(stats.miss)
    return story


def _parts(span: CachedSpan, remembered: Sequence[tuple[int, int]]) -> Iterator[Span]:
    """Split a span where remembered turns begin and end."""
    turns = [(max(a, span.start), min(b, span.stop)) for a, b in remembered]
    position = span.start
    for start, stop in (turn for turn in turns if turn[0] < turn[1]):
        if position < start:
            yield Span(source=span.source.value, match="tokens", start=position, stop=start)
        yield Span(source=span.source.value, match="remembered_turn", start=start, stop=stop)
        position = stop
    if position < span.stop:
        yield Span(source=span.source.value, match="tokens", start=position, stop=span.stop)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
