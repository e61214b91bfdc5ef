"""Kill a server at random moments, many times, on one cache directory for each model.

    python -m tests.campaigns.crash --rounds 1000 --seed 1

After every start: each answer is the cold one, whatever was answered more than a second before
the kill is found, and the directory holds nothing but sound entries, within the budget.
"""
# ruff: noqa: T201

import argparse
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.cache.entries import bytes_by_du
from tests.support.cache_traffic import (
    Answer,
    Caller,
    ColdAnswers,
    Prompt,
    Standby,
    cold_answers,
    eventually,
    random_tokens,
)
from tests.support.faults import Faults, Moment
from tests.support.server_process import ServerProcess
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

ARCHITECTURES = (
    TinyArchitecture.LLAMA,
    TinyArchitecture.GEMMA3,
    TinyArchitecture.QWEN35,
    TinyArchitecture.MAMBA2,
)
SAFE_SECONDS = 1.0  # before a kill; what was answered earlier must survive it
N_TALKERS = 6
N_SLOTS = 4
MAX_PROMPT = 600
STILLBORN_SHARE = 0.15  # of rounds, that begin with a server that is killed while it starts
N_OLD = 4  # exchanges of earlier rounds that are looked up again in each
BUDGET_BYTES = 8 * 2**30
CATALOG, TURNS = "catalog.sqlite3", "turns.sqlite3"
START_SECONDS = 0.6  # from its first line to its first answer, about


@dataclass(frozen=True, slots=True)
class Exchange:
    prompt: Prompt
    n_tokens: int
    answer: Answer
    ended_at: float


@dataclass(frozen=True, slots=True)
class Ending:
    """After some seconds of traffic: a kill, a kill inside a write, or a clean end."""

    seconds: float
    moment: Moment | None = None
    is_clean: bool = False


@dataclass(slots=True)
class Tally:
    n_rounds: int = 0
    n_answers: int = 0
    n_looked_up: int = 0
    endings: dict[str, int] = field(default_factory=dict)


def n_recomputed(architecture: TinyArchitecture) -> int:
    """Return how many tokens of a stored prompt are computed again: those behind a checkpoint."""
    return 1 if architecture is TinyArchitecture.LLAMA else 64


class CrashRounds:
    def __init__(
        self,
        architecture: TinyArchitecture,
        model: Path,
        folder: Path,
        cold: ColdAnswers,
        *,
        seed: int,
        max_traffic_seconds: float,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        """With a smaller budget there are evictions, and nobody knows what must be found."""
        self.directory = folder / "cache"
        self.tally = Tally()
        self._architecture = architecture
        self._cold = cold
        self._seed = seed
        self._max_traffic_seconds = max_traffic_seconds
        self._budget_bytes = budget_bytes
        self._systems = [random_tokens(random.Random(n), 100 + 120 * n) for n in range(2)]
        self._due: list[Exchange] = []  # of the last round
        self._old: list[Exchange] = []
        # Beside the rounds: a cold answer takes longer than any other.
        self._checker = ThreadPoolExecutor(1)
        self._checks: list[Future[None]] = []
        self._standby = Standby(
            folder,
            *(str(model), "--parallel", str(N_SLOTS), "--ctx-size", "4096", "--threads", "1"),
            *("--cache-dir", str(self.directory), "--cache-disk", str(budget_bytes)),
            *("--cache-write-budget", "0", "--no-cache-recompute", "--shutdown-grace", "0.2"),
        )

    def close(self) -> None:
        self._standby.close()
        self._checker.shutdown(cancel_futures=True)

    def run_round(self) -> None:
        number = self.tally.n_rounds
        noise = random.Random(f"{self._seed} {self._architecture} {number}")
        ending = self._choose_ending(noise)
        if noise.random() < STILLBORN_SHARE:
            self._standby.kill_while_starting(noise.uniform(0, START_SECONDS))
        with self._served(f"round {number}, {ending}") as (server, caller):
            self._look_up(caller, noise)
            eventually(self.check_directory)
            self._talk_until(ending, server, caller, noise)
            self._finish_checks(N_TALKERS)
        self.tally.n_rounds += 1
        kind = "clean" if ending.is_clean else ending.moment.name if ending.moment else "timed"
        self.tally.endings[kind] = self.tally.endings.get(kind, 0) + 1

    def finish(self) -> None:
        """One more start, and everything that must be there is looked up."""
        with self._served("the end") as (_, caller):
            self._look_up(caller, random.Random(self._seed))
            eventually(self.check_directory)
            self._finish_checks(0)

    @contextmanager
    def _served(self, when: str) -> Iterator[tuple[ServerProcess, Caller]]:
        with self._standby.started() as (server, caller):
            try:
                eventually(lambda: self._check_all_is_listed(caller))
                yield server, caller
            except BaseException:
                print(f"{self._architecture}, seed {self._seed}, {when}")
                print(f"cache and logs are in {self.directory.parent}\n{server.log}", flush=True)
                raise

    def _choose_ending(self, noise: random.Random) -> Ending:
        seconds = noise.uniform(0.1, self._max_traffic_seconds)
        match noise.randrange(10):
            case 0:
                return Ending(seconds, is_clean=True)
            case 1 | 2 | 3 | 4:
                return Ending(seconds)
            case _:
                return Ending(seconds, moment=noise.choice(list(Moment)))

    def _look_up(self, caller: Caller, noise: random.Random) -> None:
        old = noise.sample(self._old, min(N_OLD, len(self._old)))
        with ThreadPoolExecutor(N_SLOTS) as pool:
            list(pool.map(lambda exchange: self._find(caller, exchange), self._due + old))
        self._old += self._due
        self._due = []

    def _find(self, caller: Caller, exchange: Exchange) -> None:
        n_prompt = len(exchange.prompt)
        answer = caller.ask(exchange.prompt, n_tokens=exchange.n_tokens)
        self.tally.n_looked_up += 1
        self._check_later(exchange.prompt, exchange.n_tokens, answer)
        if self._budget_bytes < BUDGET_BYTES:
            return
        n_least = n_prompt - n_recomputed(self._architecture)
        assert answer.n_cached >= n_least, f"{answer.n_cached} of {n_prompt} tokens were found"

    def _check_later(self, prompt: Prompt, n_tokens: int, answer: Answer) -> None:
        self._checks.append(
            self._checker.submit(self._cold.check, answer, prompt, n_tokens=n_tokens)
        )

    def _finish_checks(self, n_left: int) -> None:
        while len(self._checks) > n_left:
            self._checks.pop(0).result()

    def _check_all_is_listed(self, caller: Caller) -> None:
        """The index of a large directory is still being read when the first request comes."""
        assert (self.directory / CATALOG).exists()
        with self._catalog() as connection:
            assert connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            [[n_rows]] = connection.execute("SELECT n_entries FROM totals").fetchall() or [[0]]
        # No cache is counted before the engine has opened it.
        assert caller.metrics().get('rekindle_cache_entries{tier="disk"}') == n_rows

    @contextmanager
    def _catalog(self) -> Iterator[sqlite3.Connection]:
        path = f"file:{self.directory / CATALOG}?mode=ro"
        with closing(sqlite3.connect(path, uri=True)) as connection:
            yield connection

    def check_directory(self) -> None:
        names = {path.name for path in self.directory.iterdir()}
        assert names <= {
            *("entries", "quarantine", "weights.json"),
            *(CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm"),
            *(TURNS, f"{TURNS}-wal", f"{TURNS}-shm"),
        }
        assert not list((self.directory / "quarantine").iterdir())
        files = {path.name for path in (self.directory / "entries").glob("*/*")}
        with self._catalog() as connection:
            assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            rows = {f"{key.hex()}.kv" for (key,) in connection.execute("SELECT key FROM entries")}
        assert rows == files
        assert bytes_by_du(self.directory) <= self._budget_bytes

    def _talk_until(
        self, ending: Ending, server: ServerProcess, caller: Caller, noise: random.Random
    ) -> None:
        ended = threading.Event()
        exchanges: list[Exchange] = []
        seeds = [noise.random() for _ in range(N_TALKERS)]
        with ThreadPoolExecutor(N_TALKERS) as pool:
            try:
                talkers = [
                    pool.submit(self._talk, random.Random(seed), server, caller, ended, exchanges)
                    for seed in seeds
                ]
                _sleep_unless_failed(ending.seconds, talkers)
                ended_at = _end(server, self._standby.faults, ending, ended)
            finally:
                ended.set()
                server.kill()
        for talker in talkers:
            talker.result()
        self.tally.n_answers += len(exchanges)
        for each in exchanges:
            self._check_later(each.prompt, each.n_tokens, each.answer)
        safe = 0.0 if ending.is_clean else SAFE_SECONDS
        self._due = [each for each in exchanges if each.ended_at < ended_at - safe]

    def _talk(
        self,
        noise: random.Random,
        server: ServerProcess,
        caller: Caller,
        ended: threading.Event,
        exchanges: list[Exchange],
    ) -> None:
        """One conversation after the other, each turn of one behind the reply before it."""
        prompt: Prompt = ()
        while not ended.is_set():
            if not prompt or len(prompt) > MAX_PROMPT:
                system = noise.choice(self._systems)
                prompt = system + random_tokens(noise, noise.randrange(20, 200))
            n_tokens = noise.choice((1, 6, 30))
            try:
                answer = _exchange(prompt, n_tokens, noise, caller)
            except (httpx.TransportError, httpx.HTTPStatusError):
                if ended.is_set() or _has_ended(server):
                    return
                raise
            exchanges.append(Exchange(prompt, n_tokens, answer, time.monotonic()))
            prompt += answer.tokens + random_tokens(noise, noise.randrange(5, 120))
            time.sleep(noise.choice((0.0, 0.05, 0.2)))  # a user reads


def _exchange(prompt: Prompt, n_tokens: int, noise: random.Random, caller: Caller) -> Answer:
    match noise.randrange(4):
        case 0:
            return caller.stream(prompt, n_tokens=n_tokens)
        case 1:
            return caller.stream(prompt, n_tokens=n_tokens, leave_after=1)
        case _:
            return caller.ask(prompt, n_tokens=n_tokens)


def _sleep_unless_failed(seconds: float, talkers: list[Future[None]]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not any(talker.done() for talker in talkers):
        time.sleep(0.01)


def _end(server: ServerProcess, faults: Faults, ending: Ending, ended: threading.Event) -> float:
    """When it was."""
    if ending.moment is not None:
        faults.die_at(ending.moment)
        deadline = time.monotonic() + 1
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    ended_at = time.monotonic()
    ended.set()
    if ending.is_clean:
        assert server.stop(signal.SIGTERM) == 0
    else:
        server.kill()
    return ended_at


def _has_ended(server: ServerProcess) -> bool:
    """A connection breaks a moment before the process can be waited for."""
    deadline = time.monotonic() + 2
    while server.process.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def folder_kept_on_failure() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rekindle-crash-"))
    yield folder
    shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1000, help="over all models together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="most traffic in a round")
    options = parser.parse_args()
    n_rounds = -(-options.rounds // len(ARCHITECTURES))
    for architecture in ARCHITECTURES:
        with folder_kept_on_failure() as folder:
            model = write_tiny_model(folder / "model.gguf", architecture)
            with cold_answers(model) as cold:
                rounds = CrashRounds(
                    architecture,
                    model,
                    folder,
                    cold,
                    seed=options.seed,
                    max_traffic_seconds=options.seconds,
                )
                with closing(rounds):
                    for number in range(n_rounds):
                        rounds.run_round()
                        if number % 25 == 24:
                            print(architecture, rounds.tally, flush=True)
                    rounds.finish()
                print(architecture, rounds.tally, bytes_by_du(rounds.directory), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
