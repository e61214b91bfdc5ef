"""The campaign itself: one server, several clients, everything that watches them."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.campaigns.fuzz import answers
from tests.campaigns.fuzz.case import (
    SHARES,
    WIRE_KINDS,
    Case,
    Kind,
    WireCase,
    noise_of,
    write_failure,
)
from tests.campaigns.fuzz.client import Broken, Connection, Hung
from tests.campaigns.fuzz.file_checks import FileChecker
from tests.campaigns.fuzz.grow.files import file_case
from tests.campaigns.fuzz.grow.raw_http import raw_case
from tests.campaigns.fuzz.grow.requests import HttpCases, Known
from tests.campaigns.fuzz.report import Report
from tests.campaigns.fuzz.samples import Samples, make_samples
from tests.campaigns.fuzz.state_rounds import MAX_CASES, failures_of, state_case
from tests.campaigns.fuzz.watch import STALL_SECONDS, log_problems, probing
from tests.support.crash_requests import TINY_LEAD, least_lead
from tests.support.engine_processes import RESTARTS_METRIC, engines_of
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.wire_replies import CHAT
from tests.support.workloads import prose, user

KEYS = ("key-one", "key-two")
MODELS = {"main": TinyArchitecture.LLAMA, "other": TinyArchitecture.QWEN35}
N_CLIENTS = 24
SENTINEL_EVERY = 400  # requests
N_SENTINEL_TOKENS = 40
STALLS = r"rekindle_(?:event_loop|engine)_stalls_total\S*"
N_AGAIN = 3  # times that the requests around a stall are sent again
MAX_SORTS = 40  # of failures; then the campaign stops


def plan(first: int, n_cases: int, kinds: Sequence[Kind]) -> list[tuple[Kind, int]]:
    """Return kind and number of each case. Every thousand numbers have the shares of each kind."""
    wheel = [kind for kind in kinds for _ in range(SHARES[kind])]
    random.Random("wheel").shuffle(wheel)
    return [(wheel[number % len(wheel)], number) for number in range(first, first + n_cases)]


class Campaign:
    """A running server, and the cases it is asked."""

    def __init__(
        self,
        server: ServerProcess,
        folder: Path,
        failures: Path,
        *,
        seed: int,
        fails_on_stalls: bool,
    ) -> None:
        self.report = Report(seed)
        self._server, self._folder, self._failures, self._seed = server, folder, failures, seed
        self._checker = FileChecker()
        self._samples: Samples | None = None
        self._states: list[int] = []  # numbers of cases that wait for a round
        self._fails_on_stalls = fails_on_stalls
        self._stalls: dict[str, float] = {}
        self._logged: Counter[str] = Counter()
        self._http = httpx.Client(
            base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEYS[0]}"}
        )
        self._known = Known(models=tuple(MODELS), keys=KEYS)
        self._cases = HttpCases(self._http.get("/openapi.json").json(), self._known)
        self._sentinel = self._clear_prompt()
        self._expected = self._ask_sentinel()
        self._new_stalls()  # of the start

    def close(self) -> None:
        self._http.close()
        self._checker.close()

    def run(self, cases: Sequence[tuple[Kind, int]]) -> None:
        """Run the cases: requests from several clients, and files one by one beside them."""
        began = time.monotonic()
        files = [each for each in cases if each[0] not in WIRE_KINDS]
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(self._read_all, files)
            asyncio.run(self._send_all([each for each in cases if each[0] in WIRE_KINDS]))
            reading.result()
        if stalls := self._check_server():
            self._send_again([each for each in cases if each[0] in WIRE_KINDS], stalls)
        self.report.seconds += time.monotonic() - began

    def _send_again(self, cases: Sequence[tuple[Kind, int]], stalls: str) -> None:
        """Fail on stalls that come again with the same requests.

        Others are told: the host of a virtual machine may take away a core and not say so.
        """
        for _ in range(N_AGAIN):
            asyncio.run(self._send_all(cases, counts=False))
            if again := self._check_server():
                self.report.sorts["stalls"] += 1
                self.report.fail(f"{stalls}; again: {again}")
                return
        self.report.tell_once(stalls)

    def run_rest(self) -> None:
        """Run the cases that were too few for a round of their own."""
        while self._states and not self.is_over:
            self._run_states()

    def look(self) -> None:
        self.report.memory.look(self._server.process.pid)

    @property
    def is_over(self) -> bool:
        return len(self.report.sorts) >= MAX_SORTS or self._server.process.poll() is not None

    def replay(self, case: Case) -> str | None:
        """Run one case again. Return what is wrong, or None."""
        if isinstance(case, WireCase):
            problem = asyncio.run(self._replayed(case)) or next(self._server_problems(), None)
            return problem or self._new_stalls()
        if case.kind is Kind.STATE:
            found = failures_of([case], self._sampled(), self._folder)
            return found[0][1] if found else None
        return self._checker.problem_of(case)

    # -- requests ---------------------------------------------------------------------------------

    async def _send_all(self, cases: Sequence[tuple[Kind, int]], *, counts: bool = True) -> None:
        waiting = iter(cases)
        async with asyncio.TaskGroup() as group:
            for _ in range(N_CLIENTS):
                group.create_task(self._send(waiting, counts=counts))

    async def _send(self, waiting: Iterator[tuple[Kind, int]], *, counts: bool) -> None:
        connection = Connection(*self._address)
        try:
            for kind, number in waiting:
                if self.is_over:
                    return
                case = self._wire_case(kind, number)
                if problem := await self._problem(connection, case):
                    self._fail(case, problem)
                self.report.sent[kind] += counts
                if number % SENTINEL_EVERY == 0:
                    await asyncio.to_thread(self._check_sentinel, case)
        finally:
            await connection.close()

    def _wire_case(self, kind: Kind, number: int) -> WireCase:
        noise = noise_of(self._seed, kind, number)
        if kind is Kind.RAW:
            return raw_case(number, noise, KEYS[0])
        return self._cases.make(kind, number, noise)

    async def _problem(self, connection: Connection, case: WireCase) -> str | None:
        try:
            answer = await connection.ask(case)
        except Hung:
            return "no reply in time"
        except (Broken, ConnectionError, asyncio.IncompleteReadError) as error:
            return f"the connection broke: {error!r}"
        if answer is None:
            self.report.statuses["none"] += 1
            return None
        self.report.statuses[str(answer.status)] += 1
        if problem := answers.problem_of(case, answer):
            return problem
        told = answers.ids_in(answer)
        self._known.responses.extend(told.responses)
        self._known.prefixes.extend(told.prefixes)
        self._known.contents.extend(told.contents)
        return None

    async def _replayed(self, case: WireCase) -> str | None:
        connection = Connection(*self._address)
        try:
            return await self._problem(connection, case)
        finally:
            await connection.close()

    @property
    def _address(self) -> tuple[str, int]:
        parts = urlsplit(self._server.url)
        return str(parts.hostname), int(parts.port or 0)

    # -- files ------------------------------------------------------------------------------------

    def _read_all(self, cases: Sequence[tuple[Kind, int]]) -> None:
        for kind, number in cases:
            if kind is Kind.STATE:
                self._states.append(number)
                continue
            if self.is_over:
                return
            noise = noise_of(self._seed, kind, number)
            case = file_case(kind, number, noise, self._sampled())
            if problem := self._checker.problem_of(case):
                self._fail(case, problem)
            self.report.sent[kind] += 1
        while len(self._states) >= MAX_CASES and not self.is_over:
            self._run_states()

    def _run_states(self) -> None:
        """Run one round: a server for up to 12 cases."""
        numbers, self._states = self._states[:MAX_CASES], self._states[MAX_CASES:]
        made = [state_case(number, self._seed, self._sampled()) for number in numbers]
        for case, problem in failures_of(made, self._sampled(), self._folder):
            self._fail(case, problem)
        self.report.sent[Kind.STATE] += len(made)

    def _sampled(self) -> Samples:
        if self._samples is None:
            self._samples = make_samples(self._folder)
        return self._samples

    # -- the server -------------------------------------------------------------------------------

    def _clear_prompt(self) -> str:
        """Return a text to which the model's greedy reply has no near tie."""
        for number in range(1_000):
            text = f"{number}: {prose(str(number), 40)}"
            if least_lead(self._http, CHAT, text) > TINY_LEAD:
                return text
        raise AssertionError("no clear prompt")

    def _ask_sentinel(self) -> str:
        body = {"messages": [user(self._sentinel)], "max_tokens": N_SENTINEL_TOKENS}
        response = self._http.post(CHAT, json={**body, "temperature": 0, "model": "main"})
        response.raise_for_status()
        reply: str = response.json()["choices"][0]["message"]["content"]
        return reply

    def _check_sentinel(self, case: WireCase) -> None:
        try:
            reply = self._ask_sentinel()
        except httpx.HTTPError as error:
            self._fail(case, f"the sentinel got no reply: {error!r}")
            return
        if reply != self._expected:
            self._fail(case, f"the sentinel got {reply!r} instead of {self._expected!r}")

    def _check_server(self) -> str | None:
        """Report every sign of a crash. Return the stalls that may be a failure."""
        for problem in filter(self.report.is_new, self._server_problems()):
            self.report.fail(problem)
        stalls = None if self.is_over else self._new_stalls()
        return stalls if self._fails_on_stalls else None

    def _server_problems(self) -> Iterator[str]:
        if (code := self._server.process.poll()) is not None:
            yield f"the server ended with {code}: {self._server.log[-2000:]}"
            return
        metrics = self._http.get("/metrics").text
        if deaths := re.findall(rf"^{RESTARTS_METRIC}\S* (?!0\.0$).*$", metrics, re.MULTILINE):
            yield f"an engine died: {deaths}"
        if len(engines_of(self._server.process.pid)) > len(MODELS):
            yield "an engine process is left over"
        problems = log_problems(self._server.log)
        if new := problems - self._logged:
            (self._failures / "server.log").write_text(self._server.log, "utf-8")
            yield f"in the log: {new.most_common(5)}"
        self._logged = problems

    def _new_stalls(self) -> str | None:
        """Return the stalls over 100 ms that the watchdog has counted since the last look."""
        metrics = self._http.get("/metrics").text
        counted = dict(re.findall(rf"^({STALLS}) (\S+)$", metrics, re.MULTILINE))
        new = {
            name: float(value) - self._stalls.get(name, 0.0)
            for name, value in counted.items()
            if float(value) > self._stalls.get(name, 0.0)
        }
        self._stalls = {name: float(value) for name, value in counted.items()}
        places = [line for line in self._server.log.splitlines() if "stalled" in line]
        return f"stalls: {new}, {places[-2:]}" if new else None

    def _fail(self, case: Case, problem: str) -> None:
        if self.report.is_new(problem):
            path = write_failure(self._failures, case, self._seed, problem)
            self.report.fail(problem, where=f"{path}: ")


@contextmanager
def campaign(
    folder: Path,
    failures: Path,
    *,
    seed: int,
    fails_on_stalls: bool = True,
    stall_seconds: float = STALL_SECONDS,
) -> Iterator[Campaign]:
    """A campaign with a server of its own, probed all the time.

    `fails_on_stalls`: over 100 ms, as the watchdog counts them. A probe that takes `stall_seconds`
    always fails.
    """
    paths = [
        write_tiny_model(folder / f"{name}.gguf", architecture)
        for name, architecture in MODELS.items()
    ]
    with ExitStack() as stack:
        server = stack.enter_context(
            serve(
                *(str(paths[0]), "--models", str(paths[1])),
                *("--api-key", KEYS[0], "--api-key", KEYS[1], "--log-level", "warning"),
                *("--parallel", "4", "--threads", "1", "--ctx-size", "2048"),
                *("--n-predict", "64"),
                *("--queue-size", "64", "--cache-ram", "64MB", "--cache-disk", "512MB"),
                *("--cache-dir", str(folder / "cache")),
            )
        )
        made = Campaign(server, folder, failures, seed=seed, fails_on_stalls=fails_on_stalls)
        stack.callback(made.close)
        with probing(server, stall_seconds) as probed:
            yield made
            made.run_rest()
        made.report.probed = probed
        made.report.finish()
