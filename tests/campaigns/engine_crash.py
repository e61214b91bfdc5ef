"""Kill the engine process of a server at random moments while 8 clients read mixed replies.

    python -m tests.campaigns.engine_crash --deaths 1000 --seed 1 --models embedded gemma3

Every reply must be the one that the undisturbed server gave, every death must be counted under
its cause, and at the end no slot, file, descriptor or process may be left over.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import sub
from pathlib import Path

import httpx

from rekindle.supervisor.journal import FATAL_DEATHS
from tests.support.crash_requests import EMBEDDED, FIRST_SALTS, CrashRequest, crash_requests
from tests.support.engine_processes import (
    CAUSES,
    RUNNING,
    deaths_by_cause,
    engine_health,
    engines_of,
    state_of,
    wait_for,
    zombies_of,
)
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.wire_replies import BrokenReply, Reply, ask

MODELS = (EMBEDDED, *FIRST_SALTS)
N_CLIENTS = 8
# Without a step. On a machine under load, a step of the embedded model takes some seconds.
HANG_SECONDS = {EMBEDDED: 10.0}
TINY_HANG_SECONDS = 3.0
UBATCH = "128"  # the long prompt is computed in several steps
MAX_WAIT_SECONDS = 3.0  # before a kill
MAX_START_SECONDS = 1.5  # of an engine process, about
REQUEST_SECONDS = 600  # a machine under load; nothing is measured here
SIGNALS = tuple(CAUSES)
TELL_SECONDS = 10.0
# That one request sees. With one more, and no token between them, it would be taken for poison.
MAX_SEEN_DEATHS = FATAL_DEATHS - 1
REPLY_LOOK_SECONDS = 0.05
VECTOR_NOISE = 1e-4


@dataclass(frozen=True, slots=True)
class Death:
    """A signal some seconds after the last engine process came up, or while it starts."""

    number: signal.Signals
    seconds: float
    is_early: bool


def deaths(n_deaths: int, noise: random.Random) -> Iterator[Death]:
    """One in five dies while it starts. A process that starts has no step that could hang."""
    was_early = False
    for _ in range(n_deaths):
        # Never twice: a process that dies young again and again is given up.
        was_early = not was_early and noise.random() < 0.2
        if was_early:
            number = noise.choice([each for each in SIGNALS if each != signal.SIGSTOP])
            yield Death(number, noise.uniform(0, MAX_START_SECONDS), is_early=True)
        else:
            yield Death(noise.choice(SIGNALS), noise.uniform(0.1, MAX_WAIT_SECONDS), is_early=False)


@dataclass(slots=True)
class Tally:
    n_replies: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)


class EngineCrashes:
    """One server, what it answers undisturbed, and what it answers while its engine dies."""

    def __init__(
        self,
        server: ServerProcess,
        model: str,
        cache: Path,
        *,
        seed: int,
        only: tuple[str, ...] = (),
    ) -> None:
        self.tally = Tally()
        self._server = server
        self._model = model
        self._cache = cache
        self._seed = seed
        # uvicorn closes idle connections after 5 seconds; one that is used just then breaks.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
        self._http = httpx.Client(base_url=server.url, timeout=REQUEST_SECONDS, limits=limits)
        requests = crash_requests(self._http, model)
        self._requests = [each for each in requests if not only or each.name in only]
        self._expected: dict[str, Reply] = {}
        self._n_deaths = 0
        self._begun: dict[int, int] = {}  # by client: deaths when its request began

    def close(self) -> None:
        self._http.close()

    def record(self, *, n_times: int) -> None:
        """Ask for each reply undisturbed: alone, then again from all clients at once."""
        for request in self._requests:
            self._expected[request.name] = ask(self._http, request.route, request.body)
        again = self._requests * (n_times - 1)
        random.Random(self._seed).shuffle(again)
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            list(pool.map(self._check, again))
        self._wait_until_idle()
        self._n_descriptors = self._server.n_file_descriptors

    def disturb(self, n_deaths: int) -> None:
        """Kill that many times. Each client asks on until then and reads its last reply."""
        ended = threading.Event()
        noise = random.Random(f"{self._seed} {self._model}")
        orders = [random.Random(noise.random()) for _ in range(N_CLIENTS)]
        with ThreadPoolExecutor(N_CLIENTS) as pool:
            clients = [pool.submit(self._replay, order, ended) for order in orders]
            try:
                self._kill(deaths(n_deaths, noise), n_deaths, clients)
            finally:
                ended.set()
        for client in clients:
            client.result()

    def check_nothing_is_left(self) -> None:
        self._wait_until_idle()
        pid = self._server.process.pid
        wait_for(lambda: len(engines_of(pid)) == 1, "one engine process")
        wait_for(lambda: not zombies_of(pid), "no zombie")
        self._server.wait_for_descriptors(self._n_descriptors)
        wait_for(lambda: not self._unfinished_files(), "no unfinished file in the cache")
        assert deaths_by_cause(self._server.url) == self.tally.causes
        metrics = self._http.get("/metrics").text
        assert "\nrekindle_requests_waiting 0.0" in metrics

    def _unfinished_files(self) -> list[Path]:
        return [path for path in self._cache.rglob("*") if path.suffix in (".tmp", ".new")]

    def _wait_until_idle(self) -> None:
        self._server.wait_until_idle()

    def _replay(self, order: random.Random, ended: threading.Event) -> None:
        while not ended.is_set():
            for request in order.sample(self._requests, len(self._requests)):
                if ended.is_set():
                    return
                self._check(request)

    def _check(self, request: CrashRequest) -> None:
        client = threading.get_ident()
        self._begun[client] = self._n_deaths
        try:
            reply = ask(self._http, request.route, request.body)
        except (BrokenReply, httpx.HTTPError) as error:
            raise AssertionError(f"{request.name}: {error!r}") from error
        finally:
            del self._begun[client]
        difference = compare(reply, self._expected[request.name])
        assert difference is None, f"{self._model}, {request.name}: {difference}"
        self.tally.n_replies += 1
        self.tally.kinds[request.name] += 1

    def _kill(self, planned: Iterator[Death], n_deaths: int, clients: list[Future[None]]) -> None:
        """Signal one engine process after the other.

        A request that sees three deaths without a token between them is taken for their cause. So
        a request that has seen two of them is read to its end first.
        """
        pid, last = self._server.process.pid, 0
        told_at = time.monotonic()
        for number, death in enumerate(planned, 1):
            last = self._next_engine(pid, last)
            if not death.is_early:
                self._wait_until_up()
            _sleep(death.seconds, clients)
            while self._most_seen_deaths() >= MAX_SEEN_DEATHS:
                _sleep(REPLY_LOOK_SECONDS, clients)
            if state_of(last):
                _signal(last, death.number)
            wait_for(partial(_has_ended, last), f"the end after {death}")
            self.tally.causes[CAUSES[death.number]] += 1
            self._n_deaths = number
            if time.monotonic() > told_at + TELL_SECONDS:
                told_at = time.monotonic()
                tell(
                    f"{self._model}: {number} of {n_deaths} deaths, {self.tally.n_replies} replies"
                )
        self._next_engine(pid, last)
        self._wait_until_up()

    def _most_seen_deaths(self) -> int:
        """Return how many deaths one of the running requests has seen."""
        return self._n_deaths - min(list(self._begun.values()), default=self._n_deaths)

    def _next_engine(self, server: int, last: int) -> int:
        """Return the engine process that follows the last one."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [pid for pid in engines_of(server) if pid != last]
            return bool(found)

        wait_for(is_there, "a new engine process")
        [engine] = found
        return engine

    def _wait_until_up(self) -> None:
        wait_for(lambda: engine_health(self._server.url)["state"] == RUNNING, "an engine that runs")


def _has_ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _sleep(seconds: float, clients: list[Future[None]]) -> None:
    """Sleep, and raise at once what a client has raised."""
    for client in wait(clients, timeout=seconds, return_when=FIRST_COMPLETED).done:
        client.result()


def compare(reply: Reply, expected: Reply) -> str | None:
    """Return the first difference, with what surrounds it."""
    if reply.n_prompt != expected.n_prompt or len(reply.choices) != len(expected.choices):
        return f"{reply} instead of {expected}"
    for mine, right in zip(reply.choices, expected.choices, strict=True):
        if mine.text != right.text:
            pairs = zip(mine.text, right.text, strict=False)
            at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            return (
                f"at character {at} of {len(right.text)}, after {right.text[:at][-40:]!r}: "
                f"{mine.text[at:][:60]!r} instead of {right.text[at:][:60]!r}"
            )
        if mine != right:
            return f"{mine} instead of {right}"
    if reply.n_completion != expected.n_completion:
        return f"{reply.n_completion} completion tokens instead of {expected.n_completion}"
    for vector, other in zip(reply.vectors, expected.vectors, strict=True):
        if max(map(abs, map(sub, vector, other))) > VECTOR_NOISE:
            return "another embedding"
    return None


@contextmanager
def crashing(
    model: str,
    folder: Path,
    *,
    seed: int,
    only: tuple[str, ...] = (),
    hang_seconds: float | None = None,  # None: as short as a machine of its own allows
) -> Iterator[EngineCrashes]:
    """A server with this model, whose engine is about to die."""
    if hang_seconds is None:
        hang_seconds = HANG_SECONDS.get(model, TINY_HANG_SECONDS)
    cache = folder / "cache"
    file = () if model == EMBEDDED else (str(tiny_model(folder, model)),)
    with serve(
        *file,
        *("--parallel", str(N_CLIENTS), "--ctx-size", "16384", "--cache-dir", str(cache)),
        *("--ubatch-size", UBATCH, "--queue-size", "64"),
        *("--engine-hang", str(hang_seconds)),
    ) as server:
        crashes = EngineCrashes(server, model, cache, seed=seed, only=only)
        try:
            with closing(crashes):
                yield crashes
        except BaseException:
            log = Path(tempfile.mkdtemp(prefix="rekindle-engine-crash-")) / "log"
            log.write_text(server.log, "utf-8")
            tell(f"{model}, seed {seed}: the server's log is in {log}")
            raise


def tiny_model(folder: Path, name: str) -> Path:
    return write_tiny_model(folder / f"{name}.gguf", TinyArchitecture(name))


def tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=1000, help="over all models together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--only", nargs="+", default=(), help="names of requests")
    options = parser.parse_args()
    n_deaths = -(-options.deaths // len(options.models))
    for model in options.models:
        with (
            tempfile.TemporaryDirectory() as folder,
            crashing(model, Path(folder), seed=options.seed, only=tuple(options.only)) as crashes,
        ):
            crashes.record(n_times=3)
            tell(f"{model}: {crashes.tally.n_replies} undisturbed replies agree")
            crashes.disturb(n_deaths)
            crashes.check_nothing_is_left()
            tell(f"{model}: {crashes.tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
