"""One reply while it is sampled: tokens in, events out, and at its end a turn to remember."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.chat.accounts.accounts import Account
from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.accounts.request_log import log_request
from rekindle.chat.dialects.base import Dialect, ReadCall, Schemas
from rekindle.chat.prompt.meaning import new_call_id
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.detokenizer import StopScanner, Utf8Assembler
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyDone,
    ReplyEvent,
    ReplyPart,
    ReplyProgress,
    ReplyReasoning,
    ReplyStats,
    ReplyText,
    ScoredToken,
    TopToken,
)
from rekindle.chat.reply.parser import Part, ReplyParser, Said, SaidReasoning, SaidText, parse
from rekindle.errors import RekindleError
from rekindle.generation.events import (
    NO_SPANS,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenSampled,
    TokenStream,
)
from rekindle.generation.request import DEFAULT_SESSION, Rank
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Observer, RequestRecord

_log = logging.getLogger("rekindle.request")

MAX_TRIMMED = 32  # tokens behind a stop string's beginning; picked

# Prompt, sampled tokens, what they say, ids of the calls.
OnEnd = Callable[[Prompt, Sequence[int], Said, Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class ReplyReader:
    """How the text of a reply is taken apart."""

    dialect: Dialect
    schemas: Schemas | None  # None: no calls are looked for
    begins_in_reasoning: bool
    bytes_of: Callable[[int], bytes]  # of a token, with the control tokens that are marks

    def parser(self) -> ReplyParser:
        return ReplyParser(self.dialect, self.schemas, begins_in_reasoning=self.begins_in_reasoning)

    def read(self, text: str) -> Said:
        return parse(self.dialect, self.schemas, text, begins_in_reasoning=self.begins_in_reasoning)


class ReplyStream:
    """The events of one reply. Iterate it to the end, or close it."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        tokens: TokenStream,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        reader: ReplyReader | None = None,  # None: raw text
        is_remembered: bool = True,
        on_end: OnEnd | None = None,
        account: Account | None = None,
        observe: Observer = log_request,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._parser = reader.parser() if reader else None
        self._read = reader.read if reader else _as_text
        self._bytes_of = reader.bytes_of if reader else tokenizer.piece
        self._is_remembered = is_remembered
        self._on_end = on_end
        self._account = account
        self._characters = Utf8Assembler()
        self._stops = StopScanner(stop)
        self._observe = observe
        self._started_at = time.time()
        self._submitted_at = time.monotonic()
        self._evaluated: PromptEvaluated | None = None
        self._first_token_at = self._last_token_at = 0.0
        self._n_evaluated = 0  # of the prompt's tokens
        self._n_cached = 0  # of these, found in a cache
        self._spans = NO_SPANS
        self._sampled: list[int] = []
        self._is_last_computed = False  # of those: it is fed only when another one follows
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[ReplyCall] = []
        self._read_calls: list[ReadCall] = []  # the same, as they were read
        self._n_characters = 0  # of the reply, shown or held back
        self._unsent: list[ScoredToken] = []
        self._stop: str | None = None  # the stop string that ended it
        self._is_finished = False  # nothing is held back any more
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[ReplyEvent]:
        try:
            async for event in self._tokens:
                match event:
                    case TokenSampled():
                        for part in self._on_token(event):
                            yield part
                        if self._stop is not None:
                            yield self._done(FinishReason.STOP, None)
                            return
                    case Finished():
                        self._is_last_computed = event.cause is StopCause.END_OF_TURN
                        for part in self._on_finish():
                            yield part
                        yield self._done(self._reason(event.cause), event.token)
                        return
                    case PromptEvaluated():
                        yield self._on_evaluated(event)
                    case PrefillProgress():
                        self._n_evaluated = event.n_done
                        self._n_cached, self._spans = event.n_cached, event.spans
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
        """Ends the request in the engine if it still runs. Harmless when repeated."""
        self._tokens.cancel()
        if not self._ended:
            self._on_finish()  # nobody listens any more, but the turn is remembered as it is
            self._remember(None)
            self._end("cancelled")

    def _done(self, reason: FinishReason, end_token: int | None) -> ReplyDone:
        self._remember(end_token)
        self._end(reason.value)
        if self._on_end is not None:
            self._on_end(self._prompt, self._sampled, self._said(), self._call_ids())
        return ReplyDone(reason, self._stats(), self._stop)

    def _on_evaluated(self, event: PromptEvaluated) -> ReplyProgress:
        self._evaluated = event
        self._n_evaluated = event.n_prompt
        self._n_cached, self._spans = event.n_cached, event.spans
        return ReplyProgress(
            event.n_prompt,
            event.n_prompt,
            event.n_cached,
            event.restore_seconds + event.prefill_seconds,
            event.spans,
            self._account.settle(event) if self._account else Diagnosis(),
        )

    def _on_token(self, event: TokenSampled) -> list[ReplyPart]:
        self._last_token_at = time.monotonic()
        if not self._sampled:
            self._first_token_at = self._last_token_at
        self._sampled.append(event.token)
        text = self._characters.feed(self._bytes_of(event.token))
        if event.logprobs is not None:
            chosen = self._candidate(event.token, event.logprobs.logprob)
            top = tuple(self._candidate(token, value) for token, value in event.logprobs.top)
            self._unsent.append(ScoredToken(chosen, top, self._n_characters))
        self._n_characters += len(text)
        parts: Sequence[Part]
        if self._parser is None:
            parts = (SaidText(text),) if text else ()
        else:
            parts = self._parser.feed(text)
        return self._all_shown(parts)

    def _on_finish(self) -> list[ReplyPart]:
        if self._is_finished:
            return []
        self._is_finished = True
        tail = self._characters.flush()
        parts: list[Part] = [SaidText(tail)] if tail else []
        if self._parser is not None:
            parts = [*self._parser.feed(tail), *self._parser.finish()]
        events = self._all_shown(parts)
        if self._stop is not None:
            return events
        text = self._stops.flush()
        scored = self._take_scored()
        if text or scored:
            self._text.append(text)
            events.append(ReplyText(text, scored))
        return events

    def _all_shown(self, parts: Sequence[Part]) -> list[ReplyPart]:
        """All at once: what is remembered must not depend on how far the client has read."""
        events: list[ReplyPart] = []
        for part in parts:
            events += self._shown(part)
            if self._stop is not None:
                break
        return events

    def _shown(self, part: Part) -> Iterator[ReplyPart]:
        match part:
            case SaidText(text):
                scan = self._stops.feed(text)
                if scan.stop is not None:
                    self._stop = scan.stop
                    self._drop_scores(scan.n_cut)
                if scan.text or (scan.stop is not None and self._unsent):
                    self._text.append(scan.text)
                    yield ReplyText(scan.text, self._take_scored())
            case SaidReasoning(text):
                self._reasoning.append(text)
                yield ReplyReasoning(text, self._take_scored())
            case ReadCall(name, arguments_json):
                index, call_id = len(self._calls), self._call_id(part)
                self._read_calls.append(part)
                call = ReplyCall(index, call_id, name, arguments_json, self._take_scored())
                self._calls.append(call)
                yield call

    def _drop_scores(self, n_chars: int) -> None:
        """Of tokens that lie wholly in the last characters of the reply."""
        while self._unsent and len(self._unsent[-1].chosen.text) <= n_chars:
            n_chars -= len(self._unsent.pop().chosen.text)

    def _reason(self, cause: StopCause) -> FinishReason:
        if self._stop is not None:  # in what came out last
            return FinishReason.STOP
        if cause is StopCause.LENGTH:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self._calls else FinishReason.STOP

    def _take_scored(self) -> tuple[ScoredToken, ...]:
        if not self._unsent:
            return ()
        scored, self._unsent = tuple(self._unsent), []
        return scored

    def _candidate(self, token: int, logprob: float) -> TopToken:
        data = self._tokenizer.detokenize((token,), render_special=True)
        return TopToken(token, data.decode("utf-8", "replace"), data, logprob)

    def _said(self) -> Said:
        calls = tuple(self._read_calls)
        return Said("".join(self._reasoning), "".join(self._text), calls)

    def _call_id(self, call: ReadCall) -> str:
        """The model's own where it writes one, and not one that the conversation has."""
        if not call.id:
            return new_call_id()
        known = {each.id for each in self._calls}
        if self._prompt.conversation is not None:
            messages = self._prompt.conversation.messages
            known |= {each.id for message in messages for each in message.calls}
        return new_call_id() if call.id in known else call.id

    def _call_ids(self) -> list[str]:
        return [call.id for call in self._calls]

    def _remember(self, end_token: int | None) -> None:
        tokens = self._tokens_said()
        if not self._is_remembered or not tokens:
            return
        end = () if end_token is None else (end_token,)
        end_text = self._tokenizer.detokenize(end, render_special=True).decode("utf-8", "replace")
        try:
            self._prompt.remember(tokens, end_text, self._said(), self._call_ids())
        except Exception:  # it costs a prefill later, and the reply is whole
            _log.exception("request=%s is not remembered", self._request_id)

    def _tokens_said(self) -> list[int]:
        """Without those behind a stop string; none where the cut falls into a token."""
        if self._parser is not None and self._parser.is_in_reasoning:
            return []  # the template would close it, and the sampled tokens do not
        if self._stop is None:
            return self._sampled
        said = self._said()
        tokens = list(self._sampled)
        while tokens and len(self._sampled) - len(tokens) <= MAX_TRIMMED:
            text = b"".join(map(self._bytes_of, tokens)).decode("utf-8", "replace")
            if self._read(text) == said:
                return tokens
            tokens.pop()
        return []

    def _stats(self) -> ReplyStats:
        evaluated, account = self._evaluated, self._account
        return ReplyStats(
            n_prompt=len(self._prompt.tokens),
            n_cached=self._n_cached,
            n_generated=len(self._sampled),
            spans=self._spans,
            remembered=self._prompt.remembered,
            n_dropped_messages=self._prompt.n_dropped,
            neutralised=self._prompt.neutralised,
            queue_seconds=evaluated.queue_seconds if evaluated else 0.0,
            restore_seconds=evaluated.restore_seconds if evaluated else 0.0,
            prefill_seconds=evaluated.prefill_seconds if evaluated else 0.0,
            decode_seconds=self._last_token_at - self._first_token_at,
            session=account.session if account else DEFAULT_SESSION,
            rank=account.rank if account else Rank.MAIN,
            n_recomputed=account.n_recomputed if account else 0,
            diagnosis=account.diagnosis if account else Diagnosis(),
            is_explained=account.is_explained if account else False,
            is_kept=self._is_remembered,
        )

    def _end(self, outcome: str) -> None:
        self._ended = True
        if self._evaluated is None and self._sampled:
            self._on_evaluated(self._presumed())
        self._close_account()
        self._observe(self._record(outcome))

    def _presumed(self) -> PromptEvaluated:
        """Of a reply that ended before an upstream told at its end what it had cached."""
        return PromptEvaluated(
            n_prompt=len(self._prompt.tokens),
            n_cached=self._n_cached,
            queue_seconds=0.0,
            prefill_seconds=self._first_token_at - self._submitted_at,
            spans=self._spans,
        )

    def _record(self, outcome: str) -> RequestRecord:
        stats = self._stats()
        first_token_seconds = self._first_token_at - self._submitted_at if self._sampled else None
        return RequestRecord(
            id=self._request_id,
            model=self._account.model if self._account else "",
            namespace=self._prompt.namespace,
            session=stats.session,
            rank=stats.rank,
            started_at=self._started_at,
            n_prompt=stats.n_prompt,
            is_evaluated=self._evaluated is not None,
            spans=stats.spans,
            n_generated=stats.n_generated,
            n_recomputed=stats.n_recomputed,
            n_remembered_turns=stats.n_remembered_turns,
            n_dropped_messages=stats.n_dropped_messages,
            miss=stats.miss,
            build_seconds=self._prompt.build_seconds,
            queue_seconds=stats.queue_seconds,
            restore_seconds=stats.restore_seconds,
            prefill_seconds=stats.prefill_seconds,
            first_token_seconds=first_token_seconds,
            decode_seconds=stats.decode_seconds,
            total_seconds=time.monotonic() - self._submitted_at,
            finish=outcome,
            prompt_text=self._prompt.text,
        )

    def _close_account(self) -> None:
        if self._account is None:
            return
        n_rows = len(self._sampled) - (not self._is_last_computed)
        n_computed = self._n_evaluated + max(n_rows, 0)
        self._account.close(n_computed, self._sampled, self._said(), self._call_ids())


def _as_text(text: str) -> Said:
    return Said("", text, ())
