"""Conversations: their turns are remembered, and one of them continues.

Each conversation has two turns, so the largest size fills the turn store (20,000 turns). Ten of
them are real and continue. The others are copies of their turns under other ids.
"""

import gc
import random
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import count, cycle
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
from bench.prompt_building import NAMES, WORDS, AgentChat, answered, tool_of
from rekindle.cache.turns.database import TurnDatabase
from rekindle.cache.turns.recent import MemoryTurns
from rekindle.chat.accounts.accounts import Accounts
from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.prompt.prompt import PromptBuilder
from rekindle.generation.forgetting import Tombstones
from rekindle.generation.stored_turns import StoredTurn, TurnStore
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model

NAME = "conversations"
ABOUT = "conversations with two remembered turns each"
SIZES = (10, 100, 1_000, 10_000)
QUICK_SIZES = (10, 100)
N_REAL = 10  # they continue in turn, and have not been used for longest
SYSTEM = Message(Role.SYSTEM, (Text(WORDS),))
TOOLS = tuple(tool_of(name, "A tool.") for name in NAMES)
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
            asked = [_two_turns(chat, builder, number) for number in range(N_REAL)]
            _add_others(store, _some_turns(chat), n_conversations - N_REAL)
            continue_ms = cpu_milliseconds(partial(_build, lambda: builder, cycle(asked)))
            prompt = builder.from_conversation(asked[0])
            turns = count(2 * N_REAL)
            remember_ms = cpu_milliseconds(lambda: chat.sampled(prompt, next(turns)))
        with closing(_database(folder)) as store:
            # A new builder each time: nothing but the store is known.
            make = partial(chat.builder, store)
            fresh_ms = cpu_milliseconds(partial(_build, make, cycle(asked)))
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
    question = Message(Role.USER, (Text(f"Question {number}: {WORDS}"),))
    conversation = Conversation((SYSTEM, question), TOOLS)
    for turn in (2 * number, 2 * number + 1):
        prompt = builder.from_conversation(conversation)
        call, _ = chat.sampled(prompt, turn)
        conversation = answered(conversation, call, turn, RESULT_TOKENS)
    return conversation


def _build(make: Callable[[], PromptBuilder], asked: Iterator[Conversation]) -> None:
    prompt = make().from_conversation(next(asked))
    assert len(prompt.remembered) == 2


class _Recorder(MemoryTurns):
    """Lists the turns that it keeps."""

    def __init__(self) -> None:
        super().__init__(Tombstones())
        self.kept: list[StoredTurn] = []

    def keep(self, turn: StoredTurn) -> None:
        self.kept.append(turn)
        super().keep(turn)


def _some_turns(chat: AgentChat) -> list[StoredTurn]:
    recorder = _Recorder()
    _two_turns(chat, chat.builder(recorder), N_REAL)
    return recorder.kept


def _add_others(store: TurnStore, turns: Sequence[StoredTurn], n_conversations: int) -> None:
    noise = random.Random(1)
    for _ in range(n_conversations):
        for turn in turns:
            keys = tuple(noise.randbytes(len(key)) for key in turn.keys)
            store.keep(
                StoredTurn(
                    noise.randbytes(len(turn.id)), keys, bytes(bytearray(turn.data)), turn.owner
                )
            )


def _account_milliseconds(n_conversations: int) -> float:
    accounts = Accounts(Tombstones())
    for number in range(n_conversations):
        account_for(accounts, prompt_of(ACCOUNT_TOKENS, seed=number), n_cached=0)
    prompt = prompt_of(ACCOUNT_TOKENS, seed=n_conversations - 1)
    return cpu_milliseconds(lambda: account_for(accounts, prompt, n_cached=ACCOUNT_TOKENS // 2))


def _memory_bytes(chat: AgentChat, n_conversations: int) -> float:
    """Return what Python allocates for the turns of a server without a disk."""
    turns = _some_turns(chat)
    gc.collect()
    tracemalloc.start()
    try:
        store = MemoryTurns(Tombstones())
        _add_others(store, turns, n_conversations)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
