"""Conversations: their turns are remembered, and one of them continues.

Each conversation has two turns, so the largest size fills the turn store (20,000 turns). The
conversations share system prompt and tools, as the windows of one client do.
"""

import gc
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path

from bench.curves.curve import (
    BYTES,
    FLAT,
    LINEAR,
    MILLISECONDS,
    Curve,
    Measured,
    cpu_milliseconds,
    curves_of,
)
from bench.lookup import account_for, prompt_of
from bench.prompt_building import WORDS, AgentChat, answered, begun
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.stored_turns import TurnStore
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model

NAME = "conversations"
ABOUT = "conversations with two remembered turns each"
SIZES = (10, 100, 1_000, 10_000)
QUICK_SIZES = (10, 100)
N_CONTINUED = 20  # conversations that continue in turn
RESULT_TOKENS = 64
ACCOUNT_TOKENS = 256
CONTINUE, FRESH = "build the next prompt", "the same, turns read from disk"
REMEMBER, ACCOUNT, MEMORY = "remember a turn", "account for a request", "turns in memory"
MEASURES = (
    Measured(CONTINUE, MILLISECONDS, FLAT),
    Measured(FRESH, MILLISECONDS, FLAT),
    Measured(REMEMBER, MILLISECONDS, FLAT),
    Measured(ACCOUNT, MILLISECONDS, FLAT, "grows up to 512 past prompts, then stays"),
    Measured(MEMORY, BYTES, LINEAR),
)


def measure(sizes: Sequence[int]) -> list[Curve]:
    with closing(GgufModel(resolve_model(None).path, gpu_layers=0)) as model:
        chat = AgentChat(model.vocabulary)
        values = {n: _measured(chat, n) for n in sizes}
    return curves_of(NAME, MEASURES, values)


def _measured(chat: AgentChat, n_conversations: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        with closing(_database(folder)) as store:
            builder = chat.builder(store)
            asked = [_two_turns(chat, builder, number) for number in range(n_conversations)]
            continue_ms = cpu_milliseconds(_next_build(builder, asked))
            prompt = builder.from_conversation(asked[0])
            turns = iter(range(10**6, 10**7))  # each remembers another turn
            remember_ms = cpu_milliseconds(lambda: chat.sampled(prompt, next(turns)))
        with closing(_database(folder)) as store:
            fresh_ms = cpu_milliseconds(_next_fresh_build(partial(chat.builder, store), asked))
    return {
        CONTINUE: continue_ms,
        FRESH: fresh_ms,
        REMEMBER: remember_ms,
        ACCOUNT: _account_milliseconds(n_conversations),
        MEMORY: _memory_bytes(chat, n_conversations),
    }


def _database(folder: str) -> TurnDatabase:
    return TurnDatabase(Path(folder), fingerprint=b"b" * 16, forgotten=Tombstones())


def _two_turns(chat: AgentChat, builder: PromptBuilder, number: int) -> Conversation:
    """Play two turns of a conversation and return what its client sends for the third."""
    system, _ = begun().messages
    question = Message(Role.USER, (Text(f"Question {number}: {WORDS}"),))
    conversation = Conversation((system, question), begun().tools)
    for turn in (2 * number, 2 * number + 1):
        prompt = builder.from_conversation(conversation)
        call, _ = chat.sampled(prompt, turn)
        conversation = answered(conversation, call, turn, RESULT_TOKENS)
    return conversation


def _next_build(builder: PromptBuilder, asked: Sequence[Conversation]) -> Callable[[], None]:
    return partial(_build, lambda: builder, _spread(asked))


def _next_fresh_build(
    make: Callable[[], PromptBuilder], asked: Sequence[Conversation]
) -> Callable[[], None]:
    """Build with a new builder each time: nothing but the store is known."""
    return partial(_build, make, _spread(asked))


def _build(make: Callable[[], PromptBuilder], asked: Iterator[Conversation]) -> None:
    prompt = make().from_conversation(next(asked))
    assert len(prompt.remembered) == 2


def _spread(asked: Sequence[Conversation]) -> Iterator[Conversation]:
    """Return conversations from everywhere in the list, in turn, for ever."""
    return cycle(asked[:: max(len(asked) // N_CONTINUED, 1)])


def _account_milliseconds(n_conversations: int) -> float:
    accounts = Accounts(Tombstones())
    for number in range(n_conversations):
        account_for(accounts, prompt_of(ACCOUNT_TOKENS, seed=number), n_cached=0)
    prompt = prompt_of(ACCOUNT_TOKENS, seed=n_conversations - 1)
    return cpu_milliseconds(lambda: account_for(accounts, prompt, n_cached=ACCOUNT_TOKENS // 2))


def _memory_bytes(chat: AgentChat, n_conversations: int) -> float:
    """Return what Python allocates for the turns of a server without a disk."""
    store: TurnStore = MemoryTurns(Tombstones())
    prompt = chat.builder(store).from_conversation(begun())
    gc.collect()
    tracemalloc.start()
    try:
        for turn in range(2 * n_conversations):
            chat.sampled(prompt, turn)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
