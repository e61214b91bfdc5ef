"""The accounts of requests, with a real template and an engine that keeps everything."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.accounts.sessions import Ledger
from rekindle.chat.conversation import Conversation, Message, Role, Text, Tool
from rekindle.chat.reply.events import ReplyDone, ReplyOptions, ReplyProgress, ReplyStats
from rekindle.chat.responder import Responder
from rekindle.chat.template.guard import Guard
from rekindle.chat.template.template import CHATML, ChatTemplate
from rekindle.generation.events import (
    NO_SPANS,
    CacheSource,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    StopCause,
    TokenEvent,
    TokenSampled,
)
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.request import CacheTerms, GenerationRequest, Rank, Sampling
from rekindle.observe.request_record import MissReason
from tests.chat.test_responder import ByteTokenizer, RecordingEngine, ScriptedStream
from tests.support.chat import chat_responder
from tests.support.dialects import dialect_of
from tests.support.workloads import ReferenceFloor

REPLY = "That is a long story, and here it is."
SYSTEM = Message(Role.SYSTEM, (Text("You are an agent of few words, and they are kind."),))
TOOLS = (Tool("look", '{"type": "function", "function": {"name": "look", "parameters": {}}}'),)


class EndlessStream(ScriptedStream):
    """Stays where it is after its last event."""

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        async for event in super().__aiter__():
            yield event
        await asyncio.Event().wait()


class KeepingEngine(RecordingEngine):
    """Computes no token twice until `kept` is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = ReferenceFloor()
        self.is_stuck = False  # in the middle of a prompt

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        self.requests.append(request)
        n_prompt = len(request.prompt)
        n_cached = n_prompt - self.kept.n_new(request.prompt) if request.cache_prompt else 0
        if self.is_stuck:
            return EndlessStream([PrefillProgress(n_prompt // 2, n_prompt, 0.0)])
        reply = list(REPLY.encode())
        if request.cache_prompt:
            self.kept.learn([*request.prompt, *reply])
        sampled = [TokenSampled(token) for token in reply]
        spans = NO_SPANS.extended(CacheSource.LIVE, n_cached)
        evaluated = PromptEvaluated(n_prompt, n_cached, 0.0, 1.0, spans=spans)
        return ScriptedStream([evaluated, *sampled, Finished(StopCause.END_OF_TURN)])


class Bench:
    def __init__(self, engine: KeepingEngine | None = None) -> None:
        self.engine = engine or KeepingEngine()
        self.accounts = Accounts(Tombstones())
        self.responder = self.responder_of("a")

    def responder_of(self, model: str) -> Responder:
        tokenizer = ByteTokenizer()
        template = ChatTemplate(CHATML, bos_text="", eos_text="", guard=Guard(()))
        dialect = dialect_of(CHATML)
        return chat_responder(
            self.engine, tokenizer, template, dialect, model=model, accounts=self.accounts
        )

    def ask(
        self,
        *texts: str,
        session: str = "s",
        tools: Sequence[Tool] = (),
        options: ReplyOptions | None = None,
    ) -> ReplyStats:
        return asyncio.run(self._ask(conversation(texts, tools), session, options))

    async def _ask(
        self, asked: Conversation, session: str, options: ReplyOptions | None
    ) -> ReplyStats:
        options = options or ReplyOptions(sampling=Sampling())
        options = replace(options, terms=CacheTerms(session=session))
        prompt = await self.responder.prepare_chat(asked)
        stream = await self.responder.start(prompt, options, request_id="id")
        events = [event async for event in stream]
        done = events[-1]
        assert isinstance(done, ReplyDone)
        [told] = [each.diagnosis for each in events if isinstance(each, ReplyProgress)]
        assert told == done.stats.diagnosis
        return done.stats


def conversation(texts: Sequence[str], tools: Sequence[Tool] = ()) -> Conversation:
    """User and assistant take turns."""
    roles = (Role.USER, Role.ASSISTANT)
    messages = [Message(roles[i % 2], (Text(text),)) for i, text in enumerate(texts)]
    return Conversation((SYSTEM, *messages), tuple(tools))


def reason_of(stats: ReplyStats) -> MissReason | None:
    return stats.miss.reason if stats.miss else None


def test_accounts_of_a_chat_from_its_first_request() -> None:
    bench = Bench()
    first = bench.ask("Tell me.")
    assert reason_of(first) is MissReason.FIRST_REQUEST
    second = bench.ask("Tell me.", REPLY, "Go on, please do.")
    assert second.miss is None
    assert second.n_cached > 0
    changed = bench.ask("Tell me.", REPLY.upper(), "Go on, please do.", "Yes.", "And then?")
    assert changed.miss is not None
    assert (changed.miss.reason, changed.miss.message) == (MissReason.TEXT_CHANGED, 2)
    assert changed.miss.expected.startswith(REPLY[1:5])
    assert bench.ask("Something else.").miss is None
    assert all(s.ledger.prefilled_twice_tokens == 0 for s in bench.accounts.sessions.list(""))


def test_recomputed_tokens_are_counted_as_prefilled_twice() -> None:
    bench = Bench()
    bench.ask("Tell me.", session="one")
    bench.engine.kept = ReferenceFloor()
    again = bench.ask("Tell me.", session="two")
    assert reason_of(again) is MissReason.EVICTED
    assert again.miss is not None
    assert 0 < again.n_prompt - again.n_recomputed <= 16
    assert again.miss.tokens_lost == again.n_recomputed
    two, one = bench.accounts.sessions.list("")
    assert (one.id, one.ledger.prefilled_twice_tokens) == ("one", 0)
    n_prompt = again.n_prompt
    assert two.ledger == Ledger(
        requests=1,
        prompt_tokens=n_prompt,
        prefilled_tokens=n_prompt,
        prefilled_twice_tokens=again.n_recomputed,
    )


def test_only_computed_tokens_of_a_cancelled_prompt_are_known() -> None:
    bench = Bench()
    bench.engine.is_stuck = True

    async def leave() -> int:
        prompt = await bench.responder.prepare_chat(conversation(["Tell me."]))
        options = ReplyOptions(sampling=Sampling())
        stream = await bench.responder.start(prompt, options, request_id="id")
        async for _ in stream:
            break
        stream.close()
        return len(prompt.tokens)

    n_half = asyncio.run(leave()) // 2
    bench.engine.is_stuck = False
    assert bench.ask("Tell me.").n_recomputed == n_half // 16 * 16


def test_tokens_computed_without_the_cache_are_not_missed_later() -> None:
    bench = Bench()
    options = ReplyOptions(sampling=Sampling(), cache_prompt=False)
    off = bench.ask("Tell me.", options=options)
    assert (reason_of(off), off.n_written) == (MissReason.CACHE_OFF, 0)
    on = bench.ask("Tell me.")
    assert (reason_of(on), on.n_written) == (MissReason.FIRST_REQUEST, on.n_prompt)


def test_a_reply_can_be_named_to_compare_with() -> None:
    bench = Bench()
    plain = ReplyOptions(sampling=Sampling(), max_tokens=100)
    bench.ask("Tell me.", options=replace(plain, reply_id="msg_1"))
    bench.ask("Now tell me.", options=replace(plain, reply_id="msg_2"))
    asked = ("Well, tell me.", REPLY, "Go on, please do.")
    named = bench.ask(*asked, options=replace(plain, compare_with="msg_1"))
    assert named.miss is not None
    assert (named.miss.reason, named.miss.expected[:7]) == (MissReason.TEXT_CHANGED, "Tell me")
    unknown = bench.ask(*asked, options=replace(plain, compare_with="msg_3"))
    assert not unknown.diagnosis.is_compared
    assert named.diagnosis.is_compared


def test_another_model_is_named_as_the_reason() -> None:
    bench = Bench()
    bench.ask("Tell me.")
    bench.engine.kept = ReferenceFloor()
    bench.responder = bench.responder_of("b")
    assert reason_of(bench.ask("Tell me.", REPLY, "Go on.")) is MissReason.OTHER_MODEL


def test_side_requests_reach_the_engine_with_their_class() -> None:
    bench = Bench()
    bench.ask("Make a title of it.", session="s")
    bench.ask("Do it.", session="s", tools=TOOLS)
    title = bench.ask("Make a title of it.", session="s")
    bench.ask("Make a title of it.", session="other")
    declared = ReplyOptions(sampling=Sampling(), rank=Rank.EPHEMERAL)
    bench.ask("Do it.", session="s", tools=TOOLS, options=declared)
    ranks = [request.terms.rank for request in bench.engine.requests]
    assert ranks == [Rank.MAIN, Rank.MAIN, Rank.BACKGROUND, Rank.MAIN, Rank.EPHEMERAL]
    assert (title.rank, title.session) == (Rank.BACKGROUND, "s")


def test_the_log_line_has_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level("INFO", logger="rekindle.request"):
        bench.ask("Tell me.")
        bench.ask("Tell me.", REPLY, "Go on, please do.")
        bench.engine.kept = ReferenceFloor()
        gone = bench.ask("Tell me.", REPLY, "Go on, please do.")
    first, second, third = caplog.messages
    assert " miss=first_request lost=0 " in first
    assert " miss=- " in second
    assert f" miss=evicted lost={gone.n_recomputed} " in third
