"""The text side of a request: conversations become prompts, tokens become replies."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.accounts.recent_prompts import PastPrompt, past_prompt
from rekindle.chat.accounts.request_log import log_request
from rekindle.chat.accounts.sticky_tools import described, stuck
from rekindle.chat.conversation import Conversation, ToolsChange
from rekindle.chat.dialects.choice import DialectChoice
from rekindle.chat.embeddings import EmbeddingInput, EmbeddingMaker, Embeddings
from rekindle.chat.infill import Infill, infill_tokens
from rekindle.chat.mixed_tokens import mixed_tokens, with_bos
from rekindle.chat.prompt.meaning import clear_known
from rekindle.chat.prompt.prompt import Prompt, PromptBuilder
from rekindle.chat.reply.assembler import ReplyReader
from rekindle.chat.reply.events import ReplyOptions, ToolChoice, ToolMode
from rekindle.chat.reply.grammar_work import GrammarWork
from rekindle.chat.reply.stream import ReplyStream
from rekindle.chat.reply.tool_use import GrammarProof, ToolUse, ToolUses
from rekindle.chat.rerank import Ranking, Reranker, RerankFormat
from rekindle.chat.rewarm import Rewarmer
from rekindle.config.choices import Overflow
from rekindle.errors import PromptTooLong
from rekindle.generation.engine import Engine
from rekindle.generation.forgetting import Tombstone
from rekindle.generation.questions import LookUp, Question
from rekindle.generation.request import CacheTerms, GenerationRequest, Sampling
from rekindle.generation.status import EngineStatus, Forecast
from rekindle.generation.tokenizer import Tokenizer
from rekindle.observe.request_record import Miss, Observer, RequestRecord

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Threads that wait for grammars. Large new ones have their own: others do not wait for them.
MAX_PLANNERS, MAX_LARGE_PLANNERS = 16, 8  # picked
ROOM_SHARE = 1 / 4  # of the context that sticky tools leave for a summary; picked
LARGE_BYTES = 32 * 2**10  # of a schema, or of all tools; picked


class Responder:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompts: PromptBuilder,
        choice: DialectChoice,
        default_sampling: Sampling,
        *,
        default_cache_prompt: bool,
        default_overflow: Overflow,
        default_max_tokens: int | None,  # None: until the context ends
        template_kwargs: Mapping[str, Any],  # where a conversation has none of that name
        reasoning_limit: int | None,  # reasoning tokens of a reply; None: unlimited
        stream_calls: bool,
        sticky_tools: bool,
        rewarmer: Rewarmer | None,
        embedding_end_token: int | None,
        rerank_format: RerankFormat,
        batch_size: int,  # bounds the text around a gap
        model: str,
        accounts: Accounts,  # of all models
        observers: Sequence[Observer],
    ) -> None:
        self.tokenizer = tokenizer
        self.sessions = accounts.sessions
        self.default_sampling = default_sampling
        self.default_cache_prompt = default_cache_prompt
        self.default_max_tokens = default_max_tokens
        self.reasoning_limit = reasoning_limit
        self._default_overflow = default_overflow
        self._template_kwargs = dict(template_kwargs)
        self._engine = engine
        self._prompts = prompts
        self.dialect_choice = choice
        self._dialect = choice.dialect
        self._sticky_tools = sticky_tools
        self._rewarmer = rewarmer
        self._batch_size = batch_size
        self._model = model
        self._accounts = accounts
        self._observers = (log_request, *observers)
        self._tool_uses = ToolUses(
            choice,
            tokenizer,
            lambda grammar: engine.check_grammar(grammar).result(),
            finishes_calls=engine.finishes_calls and stream_calls,
        )
        self._embeddings = EmbeddingMaker(engine, tokenizer, end_token=embedding_end_token)
        self._reranker = Reranker(self._embeddings, tokenizer, rerank_format)
        self._marks = self._tool_uses.mark_bytes()
        self._planners = ThreadPoolExecutor(MAX_PLANNERS, thread_name_prefix="plan")
        self._large_planners = ThreadPoolExecutor(
            MAX_LARGE_PLANNERS, thread_name_prefix="plan-large"
        )

    def prove_grammars(self) -> None:
        """Prove in the background that the grammars of calls accept what the template writes."""
        self._planners.submit(self._tool_uses.prove).add_done_callback(_log_failure)

    @property
    def grammar_proof(self) -> GrammarProof | None:
        """What the proof has shown; None: it is not done."""
        return self._tool_uses.proof

    async def prepare_chat(
        self,
        conversation: Conversation,
        *,
        cache_prompt: bool = True,
        overflow: Overflow | None = None,  # None: the server's setting
        namespace: str = "",
        session: str | None = None,  # None: whose tools do not matter
    ) -> Prompt:
        prompts = self._prompts.within(namespace)
        conversation = self._with_template_kwargs(conversation)
        n_ctx = self._engine.status().n_ctx
        if (overflow or self._default_overflow) is Overflow.TRIM:
            build = partial(prompts.from_trimmed, n_ctx=n_ctx)
        else:
            build = partial(prompts.from_conversation)
        earlier: list[PastPrompt] = []
        if self._sticky_tools and cache_prompt and session is not None:
            earlier = self._accounts.recent.of_session(namespace, session, model=self._model)
        if not earlier:
            return await _timed(build, conversation, recalls=cache_prompt)

        def with_sticky_tools() -> Prompt:
            as_sent = build(conversation, recalls=True)
            neutral, _ = prompts.volatile.neutralise(conversation)
            found = stuck(conversation, neutral, earlier)
            if found is None:
                return as_sent
            prompt = build(found.conversation, recalls=True)
            has_room = len(prompt.tokens) <= n_ctx * (1 - ROOM_SHARE)
            if prompt.n_dropped > as_sent.n_dropped or not has_room:
                return as_sent
            return replace(prompt, sticky=described(found, as_sent))

        return await _timed(with_sticky_tools)

    async def prepare_text(
        self, text: str, *, cache_prompt: bool = True, namespace: str = ""
    ) -> Prompt:
        prompts = self._prompts.within(namespace)
        return await _timed(prompts.from_text, text, recalls=cache_prompt)

    async def prepare_tokens(self, tokens: Sequence[int], *, namespace: str = "") -> Prompt:
        self._check_size(tokens)
        prompts = self._prompts.within(namespace)
        return await _timed(prompts.from_tokens, tokens)

    async def prepare_after(
        self, tokens: Sequence[int], conversation: Conversation, *, namespace: str = ""
    ) -> Prompt:
        """Build the prompt of messages that follow these tokens, which end in a reply."""
        self._check_size(tokens)
        prompts = self._prompts.within(namespace)
        conversation = self._with_template_kwargs(conversation)
        return await _timed(prompts.after_tokens, tokens, conversation)

    def _with_template_kwargs(self, conversation: Conversation) -> Conversation:
        kwargs = self._template_kwargs | conversation.template_kwargs
        return replace(conversation, template_kwargs=kwargs) if kwargs else conversation

    async def prepare_mixed(self, parts: Sequence[int | str], *, namespace: str = "") -> Prompt:
        """Prepare texts and token ids in one list. Control strings in the texts are tokens."""

        def build() -> Prompt:
            whole = with_bos(parts, self.tokenizer)
            tokens = mixed_tokens(whole, self.tokenizer, parse_special=True, path="prompt")
            return self._prompts.within(namespace).from_tokens(tokens)

        return await _timed(build)

    async def prepare_infill(self, infill: Infill, *, namespace: str = "") -> Prompt:
        """Raise NotSupported if the model has no tokens for it."""
        n_ctx = self._engine.status().n_ctx

        def build() -> Prompt:
            tokens, boundaries = infill_tokens(
                infill, self.tokenizer, n_ctx=n_ctx, batch_size=self._batch_size
            )
            prompt = self._prompts.within(namespace).from_tokens(tokens)
            # Nobody continues the text behind the middle, so its turn is not remembered.
            return replace(prompt, boundaries=boundaries, remember=lambda *_: None)

        return await _timed(build)

    async def start(self, prompt: Prompt, options: ReplyOptions, *, request_id: str) -> ReplyStream:
        """Submit the request. Raises every refusal here, before the reply is streamed."""
        if prompt.sticky is not None and prompt.sticky.change is ToolsChange.DROPPED:
            options = replace(options, tool_choice=ToolChoice(ToolMode.NONE))
        status = self._engine.status()
        if len(prompt.tokens) >= status.n_ctx:  # before its grammars are compiled
            raise PromptTooLong(n_prompt=len(prompt.tokens), n_ctx=status.n_ctx)
        use, asked = await self._planned(prompt, options)
        if self._accounts.is_deleted(asked):  # it has waited, for instance for its model's load
            options = replace(options, cache_prompt=False)
        can_store = status.cache is None or status.cache.off_because is None
        account = self._accounts.open(
            asked, options, self._text_of, can_store=can_store, n_ctx=status.n_ctx
        )
        terms = replace(options.terms, rank=account.rank)
        on_end = None
        if self._rewarmer is not None and options.cache_prompt and not prompt.n_before:
            on_end = partial(self._rewarmer.after, terms=terms)
        max_tokens = options.max_tokens
        if max_tokens is None:
            max_tokens = self.default_max_tokens
        tokens = self._engine.submit(
            GenerationRequest(
                id=request_id,
                prompt=prompt.tokens,
                # A pinned prefix ends at a boundary: models with checkpoints take one there.
                boundaries=tuple(sorted({*prompt.boundaries, *(p.n_tokens for p in terms.pins)})),
                sampling=use.sampling,
                max_tokens=max_tokens,
                n_top_logprobs=options.n_top_logprobs,
                cache_prompt=options.cache_prompt,
                speculate=options.speculate,
                terms=terms,
            )
        )
        reader = None
        if prompt.conversation is not None:
            room = status.n_ctx - len(prompt.tokens)
            reader = ReplyReader(
                self._dialect,
                use.schemas,
                prompt.begins_in_reasoning,
                self._bytes_of,
                streams_calls=use.streams and options.streams,
                max_tokens=room if max_tokens is None else min(room, max_tokens),
            )
        return ReplyStream(
            request_id,
            prompt,
            tokens,
            self.tokenizer,
            stop=options.stop,
            line_limits=options.line_limits,
            shows_tokens=options.shows_tokens,
            reader=reader,
            is_remembered=options.cache_prompt,
            on_end=on_end,
            account=account,
            observe=self._observe,
        )

    async def embed(
        self, inputs: Sequence[EmbeddingInput], *, request_id: str, truncates: bool = False
    ) -> Embeddings:
        """Make the vectors. `truncates`: of a text that is too long, the beginning is embedded."""
        return await self._embeddings.make(inputs, request_id=request_id, truncates=truncates)

    async def rank(
        self, query: str, documents: Sequence[str], *, field: str, request_id: str
    ) -> Ranking:
        return await self._reranker.rank(query, documents, field=field, request_id=request_id)

    async def look_up(self, prompt: Prompt, *, session: str) -> tuple[Forecast, Miss | None]:
        """Return what this prompt would find in the cache now, and why it would find no more.

        Nothing is computed or changed. Raises PromptTooLong, as `start` does.
        """
        self._check_size(prompt.tokens)
        forecast = await self.ask(LookUp(tokens=tuple(prompt.tokens), namespace=prompt.namespace))
        terms = CacheTerms(namespace=prompt.namespace, session=session)
        asked = await asyncio.to_thread(past_prompt, prompt, terms, model=self._model)
        return forecast, self._accounts.forecast_miss(asked, forecast, self._text_of)

    def forget(self, tombstone: Tombstone) -> None:
        """Drop what this process keeps of the texts that the deletion covers. On the event loop.

        These are caches: dropping too much of them only costs time.
        """
        if self._rewarmer is not None:
            self._rewarmer.forget(tombstone)
        self._prompts.clear(tombstone.scope.namespace)
        self._tool_uses.clear()
        clear_known()

    async def ask(self, question: Question[T]) -> T:
        return await self._engine.ask(question)

    def status(self) -> EngineStatus:
        return self._engine.status()

    def _check_size(self, tokens: Sequence[int]) -> None:
        """Raise PromptTooLong before millions of ids are checked or sent to the engine."""
        n_ctx = self._engine.status().n_ctx
        if len(tokens) >= n_ctx:
            raise PromptTooLong(n_prompt=len(tokens), n_ctx=n_ctx)

    async def _planned(self, prompt: Prompt, options: ReplyOptions) -> tuple[ToolUse, PastPrompt]:
        """Plan the reply on a worker thread.

        A plan with a grammar waits for the engine, which may be restarting. Such plans have their
        own threads, so that other requests do not wait as well. A client that leaves cancels its
        plan.
        """
        tools = prompt.conversation.callable_tools if prompt.conversation is not None else ()
        grammar = options.sampling.grammar
        n_bytes = sum(len(tool.definition_json) for tool in tools)
        n_bytes += len(grammar.source) if grammar else 0
        executor = None
        if n_bytes:
            is_large = n_bytes > LARGE_BYTES and not self._tool_uses.is_settled(prompt, options)
            executor = self._large_planners if is_large else self._planners
        work = GrammarWork(self._engine.check_grammar)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, self._plan, prompt, options, work)
        except asyncio.CancelledError:
            work.cancel()
            raise

    def _plan(
        self, prompt: Prompt, options: ReplyOptions, work: GrammarWork
    ) -> tuple[ToolUse, PastPrompt]:
        use = self._tool_uses.plan(prompt, options, work.check)
        asked = past_prompt(prompt, options.terms, model=self._model, reply_id=options.reply_id)
        return use, asked

    def _observe(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer(record)
            except Exception:  # an observer must not break a reply
                _log.exception("request=%s observer failed", record.id)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        return self._marks.get(token) or self.tokenizer.piece(token)


def _log_failure(done: Future[GrammarProof]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _log.warning("tools: the grammars of calls were not tried yet: %s", error)


async def _timed(build: Callable[..., Prompt], *args: Any, **options: Any) -> Prompt:
    """Build the prompt in a thread, since that takes milliseconds."""
    began = time.perf_counter()
    prompt = await asyncio.to_thread(build, *args, **options)
    return replace(prompt, build_seconds=time.perf_counter() - began)
