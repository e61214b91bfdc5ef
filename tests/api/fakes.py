"""A Responder that follows a script: no model, no template, one byte is one token."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from rekindle.api.admission.keys import Keys
from rekindle.api.http.context import ApiSettings
from rekindle.api.http.usage_window import usage_windows
from rekindle.api.models import Lease
from rekindle.api.replies import Envelope, WantedReply
from rekindle.chat.accounts.miss_reasons import Diagnosis
from rekindle.chat.accounts.sessions import Sessions
from rekindle.chat.conversation import Conversation
from rekindle.chat.dialects.choice import chosen
from rekindle.chat.dialects.families import GENERIC
from rekindle.chat.embeddings import EmbeddingInput, Embeddings
from rekindle.chat.infill import Infill, infill_tokens
from rekindle.chat.mixed_tokens import mixed_tokens
from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.events import (
    FinishReason,
    ReplyCall,
    ReplyCallArguments,
    ReplyCallBegan,
    ReplyDone,
    ReplyEvent,
    ReplyOptions,
    ReplyStats,
    ReplyText,
    ScoredToken,
)
from rekindle.chat.reply.tool_use import GrammarProof
from rekindle.chat.rerank import Ranking
from rekindle.chat.responder import Responder
from rekindle.config.choices import MediaPolicy, Overflow
from rekindle.errors import InvalidRequest, NotSupported, RekindleError, UnknownModel
from rekindle.generation.drafts import DraftCounts
from rekindle.generation.events import CachedSpan, CacheSource, Spans
from rekindle.generation.forgetting import Deleted, Place
from rekindle.generation.questions import (
    AnyQuestion,
    Forget,
    ForgetKey,
    ListBranches,
    ListStored,
    LookUp,
    PinStored,
    Quarantine,
    Question,
    ReadTokens,
)
from rekindle.generation.request import DEFAULT_SESSION, Rank, Sampling
from rekindle.generation.status import (
    CacheStatus,
    EmbedderStatus,
    EngineStatus,
    Forecast,
    StoredBranch,
    StoredPrefix,
)
from rekindle.generation.tokenizer import NO_INFILL
from rekindle.models.card import FileCard, ListedModel, ModelCard, ModelState
from rekindle.observe.request_record import Miss

T = TypeVar("T")

N_BYTES = 256
BOS, END_OF_TURN = 256, 257
SPECIAL = {BOS: "<s>", END_OF_TURN: "<|im_end|>"}
END_OF_TURN_TEXT = SPECIAL[END_OF_TURN]

CARD = ModelCard(
    id="tiny",
    path="/models/tiny.gguf",
    created=1700000000,
    n_ctx=512,
    n_ctx_train=2048,
    n_vocab=258,
    vocab_type=2,
    n_embd=576,
    n_params=135_000_000,
    size_bytes=1_000_000,
    architecture="llama",
    quantization="Q8_0",
    chat_template="{{ messages }}",
    bos_text="<s>",
    eos_text="<|im_end|>",
)


class ByteTokenizer:
    n_vocab = 258
    special_strings = tuple(SPECIAL.values())
    bos_text = "<s>"
    eos_text = "<|im_end|>"
    bos_token: int | None = BOS
    end_strings = ("<|im_end|>",)
    infill = NO_INFILL

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if parse_special and END_OF_TURN_TEXT in text:
            before, _, after = text.partition(END_OF_TURN_TEXT)
            return [*before.encode(), END_OF_TURN, *self.tokenize(after, parse_special=True)]
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes((token,)) if token < N_BYTES else b""

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        return b"".join(
            bytes((token,)) if token < N_BYTES else SPECIAL[token].encode() * render_special
            for token in tokens
        )


def api_settings(
    *,
    api_keys: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    server_names: tuple[str, ...] = ("test",),
    receive_seconds: float = 20.0,
    body_limit_bytes: int = 2**20,
    ping_seconds: float = 10.0,
    admin_key: str | None = None,
    admin_metrics: bool = False,
    separates_keys: bool = False,
    serves_slots: bool = True,
    serves_dashboard: bool = True,
    media: MediaPolicy = MediaPolicy.TEXT,
    usage_window: tuple[str, ...] = (),
) -> ApiSettings:
    return ApiSettings(
        keys=Keys(api_keys, admin_key),
        admin_metrics=admin_metrics,
        cors_origins=cors_origins,
        server_names=server_names,
        receive_seconds=receive_seconds,
        body_limit_bytes=body_limit_bytes,
        ping_seconds=ping_seconds,
        separates_keys=separates_keys,
        serves_slots=serves_slots,
        serves_dashboard=serves_dashboard,
        explains=False,
        media=media,
        usage_windows=usage_windows(usage_window),
    )


def envelope(**options: Any) -> Envelope:
    """Of one reply, with these options."""
    wanted = WantedReply(Prompt((), (), ""), ReplyOptions(sampling=Sampling(), **options))
    return Envelope(id="x_1", key="1", created=1700000000, model="tiny", wanted=[wanted])


@dataclass(frozen=True)
class Wait:
    """Nothing comes for a while: by default until the client has gone."""

    seconds: float = 3600


Script = Sequence[ReplyEvent | Exception | Wait]


def calling(
    index: int,
    call_id: str,
    name: str,
    *pieces: str,
    scored: tuple[ScoredToken, ...] = (),
    is_cut: bool = False,
) -> list[ReplyEvent]:
    """Return the events of one call, with a piece of arguments per event."""
    arguments = [ReplyCallArguments(index, piece) for piece in pieces]
    whole = ReplyCall(index, call_id, name, "".join(pieces), is_cut=is_cut)
    return [ReplyCallBegan(index, call_id, name, scored), *arguments, whole]


def done(
    n_generated: int = 2,
    *,
    finish: FinishReason = FinishReason.STOP,
    n_prompt: int = 10,
    n_cached: int = 4,
    spans: tuple[CachedSpan, ...] | None = None,
    remembered: tuple[tuple[int, int], ...] = (),
    n_reasoning: int = 0,
    drafts: DraftCounts | None = None,
) -> ReplyDone:
    live = (CachedSpan(CacheSource.LIVE, 0, n_cached),) if n_cached else ()
    stats = ReplyStats(
        id="x_1",
        model="tiny",
        namespace="",
        session=DEFAULT_SESSION,
        asked_at=0.0,
        rank=Rank.MAIN,
        started_at=1700000000.0,
        n_prompt=n_prompt,
        is_evaluated=True,
        spans=Spans(live if spans is None else spans),
        n_generated=n_generated,
        drafts=DraftCounts() if drafts is None else drafts,
        n_recomputed=0,
        n_remembered_turns=len(remembered),
        n_dropped_messages=0,
        n_media_omitted=0,
        n_sticky_saved=0,
        miss=None,
        build_seconds=0.0,
        queue_seconds=0.0,
        restore_seconds=0.0012,
        prefill_seconds=0.5,
        first_token_seconds=0.5012,
        decode_seconds=0.25,
        total_seconds=0.7512,
        finish=finish.value,
        prompt_text="",
        n_reasoning=n_reasoning,
        remembered=remembered,
        neutralised=(),
        diagnosis=Diagnosis(),
        is_explained=False,
        is_kept=True,
        media_omitted=(),
        sticky=None,
    )
    return ReplyDone(finish, stats)


HELLO: Script = (ReplyText("Hel"), ReplyText("lo"), done())


@dataclass
class FakeStream:
    script: Script
    closed: threading.Event = field(default_factory=threading.Event)  # tests wait elsewhere

    async def __aiter__(self) -> AsyncIterator[ReplyEvent]:
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            else:
                await asyncio.sleep(0)
                yield step

    def close(self) -> None:
        self.closed.set()


@dataclass(frozen=True)
class Started:
    prompt: Prompt
    options: ReplyOptions
    request_id: str
    stream: FakeStream


class FakeResponder:
    """Every reply follows `script`, or `script(i)`; what was asked for is kept."""

    def __init__(self, script: Script | Callable[[int], Script] = HELLO) -> None:
        self.tokenizer = ByteTokenizer()
        self.default_sampling = Sampling(top_k=20)
        self.default_cache_prompt = True
        self.default_max_tokens: int | None = None
        self.reasoning_limit: int | None = None
        self.dialect_choice = chosen(GENERIC)
        self.ranks = False
        self.grammar_proof = GrammarProof(n_accepted=0, refused=(), constrains=True)
        self.cache: CacheStatus | None = None
        self.no_drafts_because: str | None = None
        self.store = FakeStore()
        self.sessions = Sessions()
        self.namespaces: list[str] = []  # of the prompts
        self.looked_up_for: list[str] = []  # sessions
        self.conversations: list[Conversation] = []
        self.started: list[Started] = []
        self.embedded: list[Sequence[EmbeddingInput]] = []
        self.asked = threading.Event()
        self.embedding_left = threading.Event()
        self._script = script

    def prove_grammars(self) -> None:
        """There are none."""

    async def prepare_chat(
        self,
        conversation: Conversation,
        *,
        cache_prompt: bool = True,
        overflow: Overflow | None = None,
        namespace: str = "",
        session: str | None = None,
    ) -> Prompt:
        self.overflow = overflow
        self.namespaces.append(namespace)
        self.conversations.append(conversation)
        texts = [f"[{message.role}]{message.text}" for message in conversation.messages]
        prompt = self._prompt("".join(texts))
        return replace(
            prompt,
            conversation=conversation,
            namespace=namespace,
            locate=lambda n: len("".join(texts[:n]).encode()),
        )

    async def prepare_text(
        self, text: str, *, cache_prompt: bool = True, namespace: str = ""
    ) -> Prompt:
        self.namespaces.append(namespace)
        return replace(self._prompt(text), namespace=namespace)

    async def look_up(self, prompt: Prompt, *, session: str) -> tuple[Forecast, Miss | None]:
        self.looked_up_for.append(session)
        return self.store.look_up(prompt.tokens, namespace=prompt.namespace), None

    async def ask(self, question: Question[T]) -> T:
        return cast(T, self.store.answer(cast(AnyQuestion, question)))

    async def prepare_tokens(self, tokens: Sequence[int], *, namespace: str = "") -> Prompt:
        for index, token in enumerate(tokens):
            if not 0 <= token < self.tokenizer.n_vocab:
                raise InvalidRequest(f"{token} is not a token.", f"prompt.{index}")
        text = self.tokenizer.detokenize(tokens, render_special=True).decode()
        return Prompt(tuple(tokens), (), text)

    async def prepare_after(
        self, tokens: Sequence[int], conversation: Conversation, *, namespace: str = ""
    ) -> Prompt:
        earlier = await self.prepare_tokens(tokens)
        prompt = await self.prepare_chat(conversation, namespace=namespace)
        return replace(
            prompt, tokens=earlier.tokens + prompt.tokens, text=earlier.text + prompt.text
        )

    async def prepare_mixed(self, parts: Sequence[int | str], *, namespace: str = "") -> Prompt:
        tokens = mixed_tokens(parts, self.tokenizer, parse_special=True, path="prompt")
        return await self.prepare_tokens(tokens, namespace=namespace)

    async def prepare_infill(self, infill: Infill, *, namespace: str = "") -> Prompt:
        tokens, _ = infill_tokens(infill, self.tokenizer, n_ctx=CARD.n_ctx, batch_size=256)
        return await self.prepare_tokens(tokens, namespace=namespace)

    async def start(self, prompt: Prompt, options: ReplyOptions, *, request_id: str) -> FakeStream:
        script = self._script(len(self.started)) if callable(self._script) else self._script
        if script and isinstance(script[0], RekindleError):
            raise script[0]
        stream = FakeStream(script)
        self.started.append(Started(prompt, options, request_id, stream))
        self.asked.set()
        return stream

    async def embed(
        self, inputs: Sequence[EmbeddingInput], *, request_id: str, truncates: bool = False
    ) -> Embeddings:
        """(3, 4, index) / length, whatever the input; or what the script begins with."""
        self.embedded.append(inputs)
        self.truncates = truncates
        self.asked.set()
        script = self._script(0) if callable(self._script) else self._script
        try:
            async for _ in FakeStream(script):
                break
        except asyncio.CancelledError:
            self.embedding_left.set()
            raise
        vectors = np.array([(3, 4, index) for index in range(len(inputs))], dtype="<f4")
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return Embeddings(
            tuple(vector.tobytes() for vector in vectors), sum(len(each.content) for each in inputs)
        )

    async def rank(
        self, query: str, documents: Sequence[str], *, field: str, request_id: str
    ) -> Ranking:
        """The longer, the better."""
        if not self.ranks:
            raise NotSupported("This model does not rank.")
        lengths = [len(each) for each in documents]
        return Ranking(tuple(map(float, lengths)), len(query) * len(documents) + sum(lengths))

    def status(self) -> EngineStatus:
        return EngineStatus(
            n_slots=4,
            n_running=0,
            n_waiting=0,
            max_waiting=64,
            n_ctx=512,
            n_cells=2048,
            n_cells_used=0,
            cache=self.cache,
            no_drafts_because=self.no_drafts_because,
            embedder=EmbedderStatus(n_ctx=64, n_dimensions=3, n_requests=0),
        )

    def _prompt(self, text: str) -> Prompt:
        return Prompt(tuple(self.tokenizer.tokenize(text, parse_special=True)), (), text)


def as_responder(fake: FakeResponder) -> Responder:
    return cast(Responder, fake)


@dataclass
class FakeStore:
    """Holds what it is told to; what was asked is kept."""

    stored: list[StoredPrefix] = field(default_factory=list)
    forecast: Forecast = Forecast(0, Spans(), None, None)  # noqa: RUF009 - it is frozen
    branches: list[StoredBranch] = field(default_factory=list)
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def answer(self, question: AnyQuestion) -> object:
        match question:
            case LookUp(tokens=tokens, namespace=namespace):
                return self.look_up(tokens, namespace=namespace)
            case ListStored(limit=limit, namespace=namespace):
                return self.list_stored(namespace=namespace, limit=limit)
            case ListBranches(limit=limit, namespace=namespace):
                return self.forest(namespace=namespace, limit=limit)
            case ReadTokens(key=key, namespace=namespace):
                return self.stored_tokens(key, namespace=namespace)
            case PinStored(key=key, seconds=seconds, namespace=namespace):
                return self.pin(key, seconds=seconds, namespace=namespace)
            case ForgetKey(key=key, namespace=namespace):
                return self.forget(key, namespace)
            case Forget(tombstone=tombstone):
                return self.forget(None, tombstone.scope.namespace)
            case Quarantine():
                raise AssertionError("only the supervisor sets entries aside")

    def look_up(self, tokens: Sequence[int], *, namespace: str) -> Forecast:
        self.asked.append(("look_up", bytes(tokens).decode(), namespace))
        return self.forecast

    def list_stored(self, *, namespace: str, limit: int) -> Sequence[StoredPrefix]:
        self.asked.append(("list", limit, namespace))
        return self.stored[:limit]

    def forest(self, *, namespace: str, limit: int) -> Sequence[StoredBranch]:
        self.asked.append(("forest", limit, namespace))
        return self.branches[:limit]

    def stored_tokens(self, key: str, *, namespace: str) -> tuple[int, ...] | None:
        self.asked.append(("tokens", key, namespace))
        return tuple(key.encode()) if self._has(key) else None

    def pin(self, key: str, *, seconds: float, namespace: str) -> bool:
        self.asked.append(("pin", key, seconds, namespace))
        return self._has(key)

    def forget(self, key: str | None, namespace: str | None) -> Deleted:
        self.asked.append(("forget", key, namespace))
        gone = [each for each in self.stored if key in (None, each.key, each.name)]
        self.stored = [each for each in self.stored if each not in gone]
        return Deleted(counts={Place.MEMORY: len(gone)})

    def _has(self, key: str) -> bool:
        return key in [*(each.key for each in self.stored), *(each.key for each in self.branches)]


class FixedModels:
    """One model that is always loaded and answers to every name; counts who uses it."""

    def __init__(self, responder: FakeResponder, card: ModelCard) -> None:
        self.n_uses = 0
        self.n_leases = 0  # ever
        self.unloads: list[str] = []
        self.kept_alive: list[tuple[str | None, float]] = []
        self._responder = responder
        self._card = card

    def begin(self) -> None:
        self.n_uses += 1
        self.n_leases += 1

    def end(self) -> None:
        self.n_uses -= 1

    async def lease(self, name: str | None) -> Lease:
        return Lease(as_responder(self._responder), self._card, self)

    def listed(self) -> list[ListedModel]:
        return [self.find(self._card.id)]

    def find(self, name: str) -> ListedModel:
        if name.removesuffix(":latest") != self._card.id:
            raise UnknownModel(name, [self._card.id])
        return ListedModel(self._card.id, self._card.created, ModelState.LOADED, self._card)

    async def file_card(self, name: str) -> FileCard | None:
        return self.find(name).card

    async def load(self, name: str) -> None:
        self.find(name)

    async def unload(self, name: str) -> None:
        self.unloads.append(self.find(name).id)

    def keep_alive(self, name: str | None, seconds: float) -> None:
        self.kept_alive.append((name, seconds))

    def status(self, name: str | None) -> EngineStatus:
        return self._responder.status()

    async def refresh(self) -> None: ...
