"""Records of replies, for tests of their readers."""

from dataclasses import replace
from typing import Any

from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import NO_SPANS, CacheSource
from rekindle.generation.request import Rank
from rekindle.observe.request_record import Miss, MissReason, RequestRecord

RECORD = RequestRecord(
    id="req-1.abc.0",
    model="tiny",
    namespace="",
    session="ann",
    asked_at=0.0,
    rank=Rank.MAIN,
    started_at=1_000_000.0,
    n_prompt=1000,
    is_evaluated=True,
    spans=NO_SPANS.extended(CacheSource.LIVE, 300).extended(CacheSource.DISK, 700),
    n_generated=11,
    drafts=DraftCounts(),
    n_recomputed=20,
    n_remembered_turns=2,
    n_dropped_messages=0,
    n_media_omitted=0,
    n_sticky_saved=0,
    miss=None,
    build_seconds=0.5,
    queue_seconds=1.0,
    restore_seconds=2.0,
    prefill_seconds=4.0,
    first_token_seconds=8.0,
    decode_seconds=10.0,
    total_seconds=20.0,
    finish="stop",
    prompt_text="the whole prompt",
)
CLOCK = Miss(
    reason=MissReason.SYSTEM_CHANGED,
    message=0,
    part="text",
    before="The time is 10:",
    expected="17:01. Be kind.",
    got="18:44. Be kind.",
    tokens_lost=640,
)


def a_record(**fields: Any) -> RequestRecord:
    return replace(RECORD, **fields)
