"""The record of one finished reply, for the log, the metrics, the trace and the dashboard."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import Spans
from rekindle.generation.forgetting import Owner
from rekindle.generation.request import Rank


class MissReason(StrEnum):
    FIRST_REQUEST = "first_request"
    EVICTED = "evicted"
    OTHER_MODEL = "other_model"
    TEXT_CHANGED = "text_changed"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    TEMPLATE_REWROTE_TURN = "template_rewrote_turn"
    CACHE_OFF = "cache_off"
    RECOMPUTE_FASTER = "recompute_faster"
    NO_CHECKPOINT = "no_checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    reason: MissReason
    message: int | None = None  # index of the changed message
    part: str | None = None  # text, tool_call, tool_result, reasoning, or the name of a tool
    before: str = ""  # the text in front of the first difference
    expected: str = ""
    got: str = ""
    tokens_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    id: str
    model: str
    namespace: str
    session: str
    asked_at: float  # arrival of the request, in seconds since the epoch
    rank: Rank
    started_at: float  # seconds since the epoch
    n_prompt: int
    is_evaluated: bool  # False: the reply ended before its prompt was computed
    spans: Spans  # cached parts of the prompt, and their source
    n_generated: int
    drafts: DraftCounts
    n_recomputed: int  # prompt tokens that had been computed before
    n_remembered_turns: int
    n_dropped_messages: int
    n_media_omitted: int
    n_sticky_saved: int  # prompt tokens not prefilled, thanks to the session's tools
    miss: Miss | None
    build_seconds: float  # to render and tokenise the prompt
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    first_token_seconds: float | None  # since the engine got the request; None: no token
    decode_seconds: float  # from the first token to the last
    total_seconds: float
    finish: str  # stop, length, tool_calls, cancelled, or "failed:" with the reason
    prompt_text: str  # the rendered prompt; written only with --trace-prompts

    @property
    def owner(self) -> Owner:
        return Owner(namespace=self.namespace, session=self.session, asked_at=self.asked_at)

    @property
    def n_cached(self) -> int:
        return self.spans.n_tokens

    @property
    def n_prefilled(self) -> int:
        return self.n_prompt - self.n_cached if self.is_evaluated else 0

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed without the first token."""
        return (self.n_generated - 1) / self.decode_seconds if self.decode_seconds > 0 else None


Observer = Callable[[RequestRecord], None]  # called on the event loop: must return at once
