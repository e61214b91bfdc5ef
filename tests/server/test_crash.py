"""What the next server finds after one was killed at any moment, or stopped by a signal.

`python -m tests.campaigns.crash` kills a thousand times, and other classes of models as well.
"""

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import pytest

from rekindle.cache.entry import BLOCK_TOKENS, Kind, Reason
from rekindle.cache.policy import CHECKPOINT_INTERVAL
from rekindle.cache.tools.directory import read_stored, verify
from tests.campaigns.crash import ARCHITECTURES, CrashRounds, n_recomputed
from tests.conftest import TinyModels
from tests.support.cache_traffic import (
    Caller,
    ColdAnswers,
    Prompt,
    Standby,
    cold_answers,
    eventually,
    random_tokens,
)
from tests.support.faults import Moment
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.tiny_vocabulary import no_words

N_ROUNDS = 8
N_TRIES = 5
SEED = 1

ColdFor = Callable[[TinyArchitecture], ColdAnswers]

every_class = pytest.mark.parametrize("architecture", ARCHITECTURES)


def prompt(name: object, n_tokens: int) -> Prompt:
    return random_tokens(random.Random(f"crash {name}"), n_tokens)


def arguments(model: Path, directory: Path) -> tuple[str, ...]:
    return (
        *(str(model), "--parallel", "2", "--ctx-size", "8192", "--threads", "1"),
        *("--cache-dir", str(directory), "--no-cache-recompute", "--shutdown-grace", "0"),
    )


@pytest.fixture(scope="module")
def cold_for(tiny_models: TinyModels) -> Iterator[ColdFor]:
    with ExitStack() as servers:
        yield cache(lambda kind: servers.enter_context(cold_answers(tiny_models(kind))))


@contextmanager
def running(model: Path, directory: Path) -> Iterator[tuple[ServerProcess, Caller]]:
    with serve(*arguments(model, directory)) as server, closing(Caller(server.url)) as caller:
        server.wait_for_log(" cache: ")  # what is on disk is known
        yield server, caller


def assert_found(caller: Caller, cold: ColdAnswers, wanted: Prompt, *, n_least: int) -> None:
    answer = caller.ask(wanted)
    cold.check(answer, wanted)
    assert answer.n_cached >= n_least


@pytest.mark.long
def test_8_kills_lose_nothing_answered_a_second_before_the_kill(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor
) -> None:
    """And every answer is the cold one, and the directory holds no garbage."""
    kind = TinyArchitecture.LLAMA
    rounds = CrashRounds(
        kind, tiny_models(kind), tmp_path, cold_for(kind), seed=SEED, max_traffic_seconds=2.0
    )
    with closing(rounds):
        for _ in range(N_ROUNDS):
            rounds.run_round()
        rounds.finish()
    assert rounds.tally.n_looked_up >= N_ROUNDS
    found = verify(rounds.directory, lambda *_: None)
    assert not found.problems
    assert found.n_incomplete == 0


@pytest.mark.long
def test_kills_during_eviction_keep_the_budget_and_correct_replies(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor
) -> None:
    kind = TinyArchitecture.LLAMA
    rounds = CrashRounds(
        kind,
        tiny_models(kind),
        tmp_path,
        cold_for(kind),
        seed=SEED,
        max_traffic_seconds=1.5,
        budget_bytes=4 * 2**20,
    )
    with closing(rounds):
        for _ in range(6):
            rounds.run_round()
        rounds.finish()
    assert not verify(rounds.directory, lambda *_: None).problems


@every_class
def test_two_conversations_of_a_killed_process_are_both_found(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor, architecture: TinyArchitecture
) -> None:
    model = tiny_models(architecture)
    cold = cold_for(architecture)
    conversations = [prompt("one", 700), prompt("other", 330)]
    with running(model, tmp_path) as (server, caller):
        for n, conversation in enumerate(conversations):
            answer = caller.ask(conversation, n_tokens=12)
            cold.check(answer, conversation, n_tokens=12)
            conversations[n] += answer.tokens + prompt(f"more {n}", 40)
        for conversation in conversations:
            cold.check(caller.ask(conversation), conversation)
        n_entries = eventually_quiet(caller)
        server.kill()
    assert len(read_stored(tmp_path).inventory.entries) == n_entries
    with running(model, tmp_path) as (server, caller):
        for conversation in conversations:
            n_least = len(conversation) - n_recomputed(architecture)
            assert_found(caller, cold, conversation, n_least=n_least)


def eventually_quiet(caller: Caller) -> int:
    """How many entries are on disk once all that was answered is."""

    def check() -> None:
        caller.export()
        metrics = caller.metrics()
        in_memory, on_disk = (
            metrics[f'rekindle_cache_entries{{tier="{tier}"}}'] for tier in ("memory", "disk")
        )
        assert in_memory == on_disk > 0

    eventually(check)
    return int(caller.metrics()['rekindle_cache_entries{tier="disk"}'])


@every_class
def test_a_prefill_that_was_killed_is_resumed_by_the_retry(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor, architecture: TinyArchitecture
) -> None:
    model = tiny_models(architecture)
    long = prompt("long", 4000)
    n_written = CHECKPOINT_INTERVAL // BLOCK_TOKENS + 2  # a checkpoint, and a block behind it
    with running(model, tmp_path) as (server, caller):
        asking = threading.Thread(target=_ask_in_vain, args=(caller, long))
        asking.start()

        def check() -> None:
            # No cache is counted before the engine has opened it.
            assert caller.metrics().get("rekindle_cache_writes_total", 0) >= n_written

        eventually(check)
        server.kill()
        asking.join()
    with running(model, tmp_path) as (server, caller):
        assert_found(caller, cold_for(architecture), long, n_least=CHECKPOINT_INTERVAL)
        prefilled = caller.metrics()["rekindle_prompt_tokens_prefilled_total"]
        assert prefilled <= len(long) - CHECKPOINT_INTERVAL


def _ask_in_vain(caller: Caller, long: Prompt) -> None:
    with pytest.raises(httpx.TransportError):
        caller.ask(long, n_tokens=3000)  # so that it is still at it when it is killed


def test_a_turn_survives_a_kill_while_its_replacement_is_written(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """A block of the next turn that holds all of this one's: it goes, but not too early."""
    model = tiny_models(TinyArchitecture.LLAMA)
    first = prompt("first", 300)
    with closing(Standby(tmp_path, *arguments(model, tmp_path / "cache"))) as standby:
        with standby.started() as (server, caller):
            second = first + caller.ask(first).tokens + prompt("second", 20)
            eventually_quiet(caller)
            standby.faults.die_at(Moment.WHOLE_FILE)
            with suppress(httpx.TransportError):
                caller.ask(second)
            server.process.wait(timeout=60)
        with standby.started() as (server, caller):
            server.wait_for_log(" cache: ")
            assert caller.ask(second).n_cached >= len(first)


@every_class
def test_sigterm_saves_a_half_finished_reply(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor, architecture: TinyArchitecture
) -> None:
    """At clean shutdown, what no block and no turn has completed."""
    model = tiny_models(architecture)
    asked = prompt("asked", 300)
    with running(model, tmp_path) as (server, caller):
        # Words only: half a character would wait for its other half, which may never come.
        with caller.open_stream(asked, n_tokens=10_000, banned_tokens=no_words()) as stream:
            stream.read(50)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError, match="shutting down"):
                stream.read(None)
        assert server.process.wait(timeout=60) == 0
        assert "Traceback" not in server.log
    told = asked + stream.answer.tokens
    with running(model, tmp_path) as (server, caller):
        assert_found(caller, cold_for(architecture), told, n_least=len(told) - 1)


def test_sigterm_saves_a_long_prompt_even_without_a_memory_tier(
    tiny_models: TinyModels, tmp_path: Path, cold_for: ColdFor
) -> None:
    """Entries pass through memory a few at a time, and shutdown waits for all of them."""
    model = tiny_models(TinyArchitecture.LLAMA)
    long = prompt("long", 4000)
    with serve(*arguments(model, tmp_path), "--cache-ram", "0", "--ubatch-size", "2048") as server:
        with closing(Caller(server.url)) as caller:
            caller.ask(long, n_tokens=1)
        assert server.stop(signal.SIGTERM) == 0
    with running(model, tmp_path) as (server, caller):
        assert_found(caller, cold_for(TinyArchitecture.LLAMA), long, n_least=len(long) - 1)


def test_each_entry_says_why_it_was_saved(tiny_models: TinyModels, tmp_path: Path) -> None:
    """On a machine that stands still, the reason may be another one: not each time."""
    model = tiny_models(TinyArchitecture.QWEN35)
    wanted = Counter(
        [
            (Kind.BLOCK, 256, Reason.PREFILL),
            (Kind.BLOCK, 512, Reason.PREFILL),
            (Kind.CHECKPOINT, 640, Reason.BOUNDARY),
            (Kind.BLOCK, 700, Reason.TURN_END),
            (Kind.CHECKPOINT, 700, Reason.TURN_END),
            (Kind.CHECKPOINT, 192, Reason.BOUNDARY),
            (Kind.BLOCK, 256, Reason.DECODE),
            (Kind.BLOCK, 499, Reason.TURN_END),
            (Kind.CHECKPOINT, 499, Reason.TURN_END),
        ]
    )
    for number in range(N_TRIES):
        saved = saved_for_reasons(model, tmp_path / str(number))
        if saved == wanted:
            break
    assert saved == wanted


def saved_for_reasons(model: Path, directory: Path) -> Counter[tuple[Kind, int, Reason]]:
    with running(model, directory) as (_, caller):
        caller.ask(prompt("long", 700), n_tokens=1)
        caller.ask(prompt("talkative", 200), n_tokens=300)  # long enough for an export
        eventually_quiet(caller)
    headers = [entry.row.header for entry in read_stored(directory).inventory.entries]
    return Counter((header.kind, header.stop, header.reason) for header in headers)
