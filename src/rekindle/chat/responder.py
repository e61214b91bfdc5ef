"""The text side of a request: prompt in, reply events out, one log line that explains it."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from rekindle.chat.conversation import Conversation
from rekindle.chat.detokenizer import StopScanner, Utf8Assembler
from rekindle.chat.prompt import Prompt, PromptBuilder
from rekindle.chat.reply import (
    Candidate,
    FinishReason,
    ReplyDone,
    ReplyEvent,
    ReplyOptions,
    ReplyProgress,
    ReplyStats,
    ReplyText,
    ScoredToken,
)
from rekindle.errors import PromptTooLong, RekindleError
from rekindle.generation import (
    CachedSpan,
    CacheSource,
    Engine,
    EngineStatus,
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptEvaluated,
    Sampling,
    StopCause,
    Tokenizer,
    TokenSampled,
    TokenStream,
)

_log = logging.getLogger("rekindle.request")


class Responder:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        default_sampling: Sampling,
        *,
        default_cache_prompt: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.default_sampling = default_sampling
        self.default_cache_prompt = default_cache_prompt
        self._engine = engine
        self._prompts = prompts

    async def prepare_chat(self, conversation: Conversation) -> Prompt:
        return await asyncio.to_thread(self._prompts.from_conversation, conversation)

    async def prepare_text(self, text: str) -> Prompt:
        return await asyncio.to_thread(self._prompts.from_text, text)

    async def prepare_tokens(self, tokens: Sequence[int]) -> Prompt:
        n_ctx = self._engine.status().n_ctx
        if len(tokens) >= n_ctx:  # before anyone looks at millions of ids
            raise PromptTooLong(n_prompt=len(tokens), n_ctx=n_ctx)
        return await asyncio.to_thread(self._prompts.from_tokens, tokens)

    async def start(
        self, prompt: Prompt, options: ReplyOptions, *, request_id: str
    ) -> "ReplyStream":
        """Everything that can be refused is refused here, before anything is streamed."""
        if options.sampling.grammar is not None:
            await asyncio.to_thread(self._engine.check_grammar, options.sampling.grammar)
        tokens = self._engine.submit(
            GenerationRequest(
                id=request_id,
                prompt=prompt.tokens,
                boundaries=prompt.boundaries,
                sampling=options.sampling,
                max_tokens=options.max_tokens,
                n_top_logprobs=options.n_top_logprobs,
                cache_prompt=options.cache_prompt,
            )
        )
        return ReplyStream(request_id, prompt, tokens, options, self.tokenizer)

    def status(self) -> EngineStatus:
        return self._engine.status()


class ReplyStream:
    """The events of one reply. Iterate it to the end, or close it."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        tokens: TokenStream,
        options: ReplyOptions,
        tokenizer: Tokenizer,
    ) -> None:
        self._request_id = request_id
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._characters = Utf8Assembler()
        self._stops = StopScanner(options.stop)
        self._n_prompt = len(prompt.tokens)
        self._submitted_at = time.monotonic()
        self._evaluated: PromptEvaluated | None = None
        self._first_token_at = self._last_token_at = 0.0
        self._n_generated = 0
        self._n_characters = 0  # of the reply, shown or held back
        self._n_shown = 0
        self._unsent: list[ScoredToken] = []
        self._ended = False

    async def __aiter__(self) -> AsyncIterator[ReplyEvent]:
        try:
            async for event in self._tokens:
                match event:
                    case TokenSampled():
                        for reply_event in self._on_token(event):
                            yield reply_event
                        if self._ended:
                            return
                    case Finished(cause):
                        for reply_event in self._on_finish(cause):
                            yield reply_event
                        return
                    case PromptEvaluated():
                        self._evaluated = event
                    case PrefillProgress():
                        yield ReplyProgress(
                            event.n_done, event.n_total, event.n_cached, event.elapsed_seconds
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
            self._end("cancelled")

    def _on_token(self, event: TokenSampled) -> list[ReplyEvent]:
        self._last_token_at = time.monotonic()
        if self._n_generated == 0:
            self._first_token_at = self._last_token_at
        self._n_generated += 1
        text = self._characters.feed(self._tokenizer.piece(event.token))
        if event.logprobs is not None:
            chosen = self._candidate(event.token, event.logprobs.logprob)
            top = tuple(self._candidate(token, value) for token, value in event.logprobs.top)
            self._unsent.append(ScoredToken(chosen, top, self._n_characters))
        self._n_characters += len(text)
        scan = self._stops.feed(text)
        if scan.stopped:
            return self._finish_at_stop(scan.text)
        self._n_shown += len(scan.text)
        return [ReplyText(scan.text, self._take_scored())] if scan.text else []

    def _on_finish(self, cause: StopCause) -> list[ReplyEvent]:
        tail = self._characters.flush()
        scan = self._stops.feed(tail)
        if scan.stopped:
            return self._finish_at_stop(scan.text)
        by_length = cause is StopCause.LENGTH
        reason = FinishReason.LENGTH if by_length else FinishReason.STOP
        return self._finish(scan.text + self._stops.flush(), reason)

    def _finish_at_stop(self, text: str) -> list[ReplyEvent]:
        n_shown = self._n_shown + len(text)
        self._unsent = [token for token in self._unsent if token.text_offset < n_shown]
        return self._finish(text, FinishReason.STOP)

    def _finish(self, text: str, reason: FinishReason) -> list[ReplyEvent]:
        scored = self._take_scored()
        events: list[ReplyEvent] = [ReplyText(text, scored)] if text or scored else []
        self._end(reason.value)
        return [*events, ReplyDone(reason, self._stats())]

    def _take_scored(self) -> tuple[ScoredToken, ...]:
        if not self._unsent:
            return ()
        scored, self._unsent = tuple(self._unsent), []
        return scored

    def _candidate(self, token: int, logprob: float) -> Candidate:
        data = self._tokenizer.detokenize((token,), render_special=True)
        return Candidate(token, data.decode("utf-8", "replace"), data, logprob)

    def _stats(self) -> ReplyStats:
        evaluated = self._evaluated
        return ReplyStats(
            n_prompt=self._n_prompt,
            n_cached=evaluated.n_cached if evaluated else 0,
            n_generated=self._n_generated,
            spans=evaluated.spans if evaluated else (),
            queue_seconds=evaluated.queue_seconds if evaluated else 0.0,
            restore_seconds=evaluated.restore_seconds if evaluated else 0.0,
            prefill_seconds=evaluated.prefill_seconds if evaluated else 0.0,
            decode_seconds=self._last_token_at - self._first_token_at,
        )

    def _end(self, outcome: str) -> None:
        self._ended = True
        stats = self._stats()
        first_token_ms = (self._first_token_at - self._submitted_at) * 1e3
        _log.info(
            "request=%s prompt=%d cached=%d from=%s prefilled=%d queue_ms=%.0f restore_ms=%.1f"
            " first_token_ms=%s generated=%d tokens_per_s=%s finish=%s",
            self._request_id,
            stats.n_prompt,
            stats.n_cached,
            _by_source(stats.spans),
            stats.n_prefilled if self._evaluated else 0,
            stats.queue_seconds * 1e3,
            stats.restore_seconds * 1e3,
            f"{first_token_ms:.0f}" if self._n_generated else "-",
            stats.n_generated,
            f"{(stats.n_generated - 1) / stats.decode_seconds:.1f}"
            if stats.decode_seconds > 0
            else "-",
            outcome,
        )


def _by_source(spans: Sequence[CachedSpan]) -> str:
    """`live:512,disk:1024`; a source may have several spans."""
    counts: Counter[CacheSource] = Counter()
    for span in spans:
        counts[span.source] += span.stop - span.start
    parts = [f"{source}:{counts[source]}" for source in CacheSource if source in counts]
    return ",".join(parts) or "-"
