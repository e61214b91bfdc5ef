"""Compare conversations that move between three servers with one store to a single server.

    python -m tests.campaigns.fleet --conversations 500 --seed 1

Every answer must be the cold one, whichever server gives it and wherever its prefix was
computed. Beside them the store is killed and started again now and then.
"""
# ruff: noqa: T201

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cache_traffic import (
    Answer,
    Caller,
    ColdAnswers,
    Prompt,
    cold_answers,
    disagreement,
    random_tokens,
)
from tests.support.redis_server import RedisServer, redis_server
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

ARCHITECTURES = (TinyArchitecture.LLAMA, TinyArchitecture.GEMMA3, TinyArchitecture.QWEN35)
N_SERVERS = 3
N_TALKERS = 4
MAX_TURNS = 5
REPLY_TOKENS = 8


@dataclass(slots=True)
class Ledger:
    n_answers: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_failed: int = 0
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, prompt: Prompt, answer: Answer, wrong: str | None) -> None:
        with self._lock:
            self.n_answers += 1
            self.n_prompt += len(prompt)
            self.n_cached += answer.n_cached
            if wrong is not None:
                self.wrong.append(f"{len(prompt)} tokens, {answer.n_cached} cached: {wrong}")

    def line(self) -> str:
        return (
            f"{self.n_answers} answers, {self.n_prompt} prompt tokens, {self.n_cached} cached,"
            f" {len(self.wrong)} wrong"
        )


@contextmanager
def fleet(model: Path, url: str, folder: Path) -> Iterator[list[Caller]]:
    """Small memories: most of what comes back comes from disk or from the store."""
    with ExitStack() as stack:
        callers = []
        for number in range(N_SERVERS):
            server = stack.enter_context(
                serve(
                    str(model),
                    *("--parallel", "2", "--threads", "1", "--cache-ram", "2MB"),
                    *("--cache-shared", url, "--cache-dir", str(folder / f"cache-{number}")),
                )
            )
            callers.append(stack.enter_context(closing(Caller(server.url))))
        yield callers


def converse(
    noise: random.Random,
    servers: list[Caller],
    cold: ColdAnswers,
    ledger: Ledger,
    systems: list[Prompt],
) -> None:
    prompt = noise.choice(systems) + random_tokens(noise, noise.randrange(20, 400))
    for _ in range(noise.randrange(2, MAX_TURNS + 1)):
        answer = noise.choice(servers).ask(prompt, n_tokens=REPLY_TOKENS)
        wrong = disagreement(answer, cold.get(prompt, n_tokens=REPLY_TOKENS))
        ledger.add(prompt, answer, wrong)
        prompt = prompt + answer.tokens + random_tokens(noise, noise.randrange(1, 120))
        time.sleep(noise.random() * 0.05)


@contextmanager
def troubled(redis: RedisServer, every_seconds: float, servers: list[Caller]) -> Iterator[None]:
    """Kills the store and brings it back, empty, until the end. Not before it was of use."""
    is_over = threading.Event()

    def trouble() -> None:
        while not is_over.wait(every_seconds):
            if not n_shared(servers):
                continue
            redis.kill()
            is_over.wait(every_seconds / 4)
            redis.start()

    thread = threading.Thread(target=trouble)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def n_shared(servers: list[Caller]) -> float:
    """Return how many tokens came from the store."""
    name = 'rekindle_prompt_tokens_reused_total{source="shared"}'
    return sum(server.metrics().get(name, 0) for server in servers)


def run(
    architecture: TinyArchitecture,
    *,
    n_conversations: int,
    seed: int,
    trouble_seconds: float,
    folder: Path,
) -> Ledger:
    model = folder / f"{architecture.value}.gguf"
    write_tiny_model(model, architecture)
    ledger = Ledger()
    noise = random.Random(seed)
    systems = [random_tokens(noise, n) for n in (70, 300, 520)]
    with (
        redis_server(folder) as redis,
        fleet(model, redis.url, folder) as servers,
        cold_answers(model) as cold,
        troubled(redis, trouble_seconds, servers),
        ThreadPoolExecutor(N_TALKERS) as pool,
    ):
        seeds = [noise.randrange(2**32) for _ in range(n_conversations)]
        for done in [
            pool.submit(converse, random.Random(each), servers, cold, ledger, systems)
            for each in seeds
        ]:
            done.result()
        shared = n_shared(servers)
        print(f"{architecture.value}: {ledger.line()}, {shared:.0f} tokens from the store")
        assert shared > 0
    return ledger


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trouble-seconds", type=float, default=8.0)
    options = parser.parse_args()
    n_each = -(-options.conversations // len(ARCHITECTURES))
    n_wrong = 0
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            ledger = run(
                architecture,
                n_conversations=n_each,
                seed=options.seed,
                trouble_seconds=options.trouble_seconds,
                folder=Path(folder),
            )
        for wrong in ledger.wrong:
            print(f"wrong: {wrong}")
        n_wrong += len(ledger.wrong)
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
