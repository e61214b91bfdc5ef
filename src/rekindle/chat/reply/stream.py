"""One reply while it is sampled: engine events in, reply events out, and at its end a turn."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

from rekindle.chat.accounts.accounts import Account
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.assembler import ReplyAssembler, ReplyReader
from rekindle.chat.reply.events import (
    FinishReason,
    LineLimits,
    ReplyDone,
    ReplyEvent,
    ReplyPart,
    ReplyProgress,
    ReplyStats,
)
from rekindle.chat.reply.parser import ParsedReply
from rekindle.errors import CallBroken, RekindleError
from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import (
    NO_SPANS,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenSampled,
    TokenStream,
)
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Observer

_log = logging.getLogger("rekindle.request")

# Takes the prompt, the sampled tokens, the parsed reply, the call ids.
OnEnd = Callable[[Prompt, Sequence[int], ParsedReply, Sequence[str]], None]


class ReplyStream:
    """The events of one reply. Iterate it to the end, or close it."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        tokens: TokenStream,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        line_limits: LineLimits,
        shows_tokens: bool,
        reader: ReplyReader | None,  # None: raw text
        is_remembered: bool,
        on_end: OnEnd | None,
        account: Account,
        observe: Observer,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._reply = ReplyAssembler(
            prompt, tokenizer, reader, stop, line_limits=line_limits, shows_tokens=shows_tokens
        )
        self._is_remembered = is_remembered
        self._on_end = on_end
        self._account = account
        self._observe = observe
        self._started_at = time.time()
        self._submitted_at = time.monotonic()
        self._evaluated: PromptEvaluated | None = None
        self._first_token_at = self._last_token_at = 0.0
        self._n_evaluated = 0  # of the prompt's tokens
        self._spans = NO_SPANS  # of the evaluated tokens, found in a cache
        self._drafts = DraftCounts()
        self._is_last_computed = False  # a sampled token is computed when another one follows
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[ReplyEvent]:
        try:
            async for event in self._tokens:
                match event:
                    case TokenSampled():
                        self._note_draft(event)
                        for part in self._on_token(event):
                            yield part
                        if self._reply.stop is not None:
                            yield self._done(FinishReason.STOP, None)
                            return
                        if self._reply.is_over:
                            yield self._done(FinishReason.LENGTH, None)
                            return
                    case Finished():
                        self._note_draft(event)
                        has_end = event.token is not None
                        self._is_last_computed = has_end or event.cause is StopCause.END_OF_TURN
                        for part in self._unbroken(self._reply.finish()):
                            yield part
                        yield self._done(self._reason(event.cause), event.token)
                        return
                    case PromptEvaluated():
                        yield self._on_evaluated(event)
                    case PrefillProgress():
                        self._n_evaluated = event.n_done
                        self._spans = event.spans
                        yield ReplyProgress(
                            event.n_done,
                            event.n_total,
                            event.n_cached,
                            event.elapsed_seconds,
                            event.spans,
                        )
        except RekindleError as error:
            self._end(f"failed: {error.message}")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the request in the engine if it still runs. Harmless when repeated."""
        self._tokens.cancel()
        if not self._ended:
            self._reply.finish()  # the client is gone, but the turn is remembered
            self._remember(None)
            self._end("cancelled")

    def _done(self, reason: FinishReason, end_token: int | None) -> ReplyDone:
        self._remember(end_token)
        stats = self._end(reason.value)
        reply = self._reply
        if self._on_end is not None:
            self._on_end(self._prompt, reply.tokens, reply.said, reply.call_ids)
        return ReplyDone(reason, stats, reply.stop, tuple(reply.tokens), reply.is_over)

    def _on_evaluated(self, event: PromptEvaluated) -> ReplyProgress:
        self._evaluated = event
        self._n_evaluated = event.n_prompt
        self._spans = event.spans
        return ReplyProgress(
            event.n_prompt,
            event.n_prompt,
            event.n_cached,
            event.restore_seconds + event.prefill_seconds,
            event.spans,
            self._account.settle(event),
        )

    def _on_token(self, event: TokenSampled) -> list[ReplyPart]:
        self._last_token_at = time.monotonic()
        if not self._reply.tokens:
            self._first_token_at = self._last_token_at
        return self._unbroken(self._reply.feed(event))

    def _note_draft(self, event: TokenSampled | Finished) -> None:
        if event.drafted is not None:
            self._drafts.note(event.drafted)

    def _unbroken(self, parts: list[ReplyPart]) -> list[ReplyPart]:
        if self._reply.is_broken:
            raise CallBroken(
                "The model broke off a tool call whose beginning was already sent."
                " The call must not be run. Send the request again."
            )
        return parts

    def _reason(self, cause: StopCause) -> FinishReason:
        if self._reply.stop is not None:  # in the text that was held back
            return FinishReason.STOP
        if cause is StopCause.LENGTH:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self._reply.calls else FinishReason.STOP

    def _remember(self, end_token: int | None) -> None:
        tokens = self._reply.tokens_to_remember()
        if not self._is_remembered or not tokens:
            return
        end = () if end_token is None else (end_token,)
        end_text = self._tokenizer.detokenize(end, render_special=True).decode("utf-8", "replace")
        try:
            self._prompt.remember(
                tokens, end_text, self._reply.said, self._reply.call_ids, self._account.owner
            )
        except Exception:  # the reply is whole; the next turn has to be prefilled
            _log.exception("request=%s turn not remembered", self._request_id)

    def _end(self, outcome: str) -> ReplyStats:
        self._ended = True
        reply = self._reply
        if self._evaluated is None and reply.tokens:
            self._on_evaluated(self._presumed())
        n_rows = len(reply.tokens) - (not self._is_last_computed)
        n_computed = self._n_evaluated + max(n_rows, 0)
        self._account.close(n_computed, reply.tokens, reply.said, reply.call_ids)
        stats = self._stats(outcome)
        self._observe(stats)
        return stats

    def _presumed(self) -> PromptEvaluated:
        """Return an event for a reply that ended early: an upstream reports its cache last."""
        return PromptEvaluated(
            n_prompt=len(self._prompt.tokens),
            n_cached=self._spans.n_tokens,
            queue_seconds=0.0,
            prefill_seconds=self._first_token_at - self._submitted_at,
            spans=self._spans,
        )

    def _n_sticky_saved(self) -> int:
        """Return the tokens that were not prefilled because the session's tools were rendered."""
        sticky, evaluated = self._prompt.sticky, self._evaluated
        if sticky is None or evaluated is None:
            return 0
        return max(sticky.n_prefill_as_sent - (evaluated.n_prompt - evaluated.n_cached), 0)

    def _stats(self, outcome: str) -> ReplyStats:
        evaluated, account, prompt = self._evaluated, self._account, self._prompt
        sampled = self._reply.tokens
        return ReplyStats(
            id=self._request_id,
            model=account.model,
            namespace=prompt.namespace,
            session=account.session,
            asked_at=account.owner.asked_at,
            rank=account.rank,
            started_at=self._started_at,
            n_prompt=len(prompt.tokens),
            is_evaluated=evaluated is not None,
            spans=self._spans,
            n_generated=len(sampled),
            drafts=self._drafts,
            n_recomputed=account.n_recomputed,
            n_remembered_turns=len(prompt.remembered),
            n_dropped_messages=prompt.n_dropped,
            n_media_omitted=sum(each.count for each in account.media_omitted),
            n_sticky_saved=self._n_sticky_saved(),
            miss=account.diagnosis.miss,
            build_seconds=prompt.build_seconds,
            queue_seconds=evaluated.queue_seconds if evaluated else 0.0,
            restore_seconds=evaluated.restore_seconds if evaluated else 0.0,
            prefill_seconds=evaluated.prefill_seconds if evaluated else 0.0,
            first_token_seconds=self._first_token_at - self._submitted_at if sampled else None,
            decode_seconds=self._last_token_at - self._first_token_at,
            total_seconds=time.monotonic() - self._submitted_at,
            finish=outcome,
            prompt_text=prompt.text,
            n_reasoning=self._reply.n_reasoning,
            remembered=prompt.remembered,
            neutralised=prompt.neutralised,
            diagnosis=account.diagnosis,
            is_explained=account.is_explained,
            is_kept=self._is_remembered,
            media_omitted=account.media_omitted,
            sticky=prompt.sticky,
        )
