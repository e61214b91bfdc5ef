"""Requests to a server whose cache is under test, and checks of their answers.

Prompts are token ids of the tiny models. An answer is compared with the cold one, the same
prompt's on a server without a cache, by its logprobs: rows that were computed in chunks of
another size differ in their last bits, and where two tokens are nearly equal either may win.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.support.faults import Faults
from tests.support.server_process import ServerProcess, free_port, serve
from tests.support.tiny_vocabulary import CONTROL_TOKENS, vocabulary

# Measured over 6,800 tokens of four tiny models: other chunks and other company move a logprob
# by 0.02 at most. One block of a dense prompt exchanged moves it by 0.4 and more.
NOISE = 0.04
N_SCORES = 20
MIN_COMMON_SCORES = N_SCORES // 2  # of the best ones; noise exchanges the last few

SETTLE_SECONDS = 60.0  # a machine under load

N_TEXT_TOKENS = len(vocabulary().tokens) - len(CONTROL_TOKENS)

Prompt = tuple[int, ...]


class Step(NamedTuple):
    """One sampled token, as the API spells it, and the logprobs of the best candidates."""

    token: str
    scores: dict[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    steps: tuple[Step, ...]
    n_cached: int

    @property
    def tokens(self) -> Prompt:
        return tuple(_token_ids()[step.token] for step in self.steps)


def disagreement(answer: Answer, cold: Answer) -> str | None:
    """Return where the replies differ by more than noise. One may be cut short."""
    for place, (mine, right) in enumerate(zip(answer.steps, cold.steps, strict=False)):
        common = mine.scores.keys() & right.scores.keys()
        if len(common) < MIN_COMMON_SCORES or mine.token not in common:
            return f"token {place} is {mine.token!r} instead of {right.token!r}"
        moved = max(abs(mine.scores[token] - right.scores[token]) for token in common)
        if moved > NOISE:
            return f"token {place} {mine.token!r}: a logprob is off by {moved:.3f}"
        if mine.token != right.token:
            return None  # a near tie, and what follows it is another text
    return None


class Caller:
    """A client of one server, for any thread."""

    def __init__(self, url: str) -> None:
        # uvicorn closes idle connections after 5 seconds; one that is used just then breaks.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1)
        self._client = httpx.Client(base_url=url, timeout=120, verify=False, limits=limits)

    def close(self) -> None:
        self._client.close()

    def ask(self, prompt: Prompt, *, n_tokens: int = 8, cache_prompt: bool = True) -> Answer:
        body = _body(prompt, n_tokens, cache_prompt=cache_prompt)
        response = self._client.post("/v1/completions", json=body)
        response.raise_for_status()
        return _answer([response.json()])

    def stream(self, prompt: Prompt, *, n_tokens: int, leave_after: int | None = None) -> Answer:
        """Ask with a stream. After an early disconnect, the number of cached tokens is unknown."""
        with self.open_stream(prompt, n_tokens=n_tokens) as stream:
            stream.read(leave_after)
            return stream.answer

    @contextmanager
    def open_stream(
        self, prompt: Prompt, *, n_tokens: int, banned_tokens: Sequence[int] = ()
    ) -> Iterator["Stream"]:
        body = _body(prompt, n_tokens, cache_prompt=True)
        body["logit_bias"] |= {str(token): False for token in banned_tokens}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            yield Stream(response)

    def export(self) -> None:
        """Let the server export the last reply now: a list of what is stored includes it."""
        self._client.get("/v1/cache").raise_for_status()

    def metrics(self) -> dict[str, float]:
        """By name, with labels as they are written: `rekindle_cache_bytes{tier="disk"}`."""
        text = self._client.get("/metrics").text
        return {
            name: float(value)
            for name, value in re.findall(r"^(rekindle_\S+) (\S+)$", text, re.MULTILINE)
        }


class Stream:
    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        self._frames: list[dict[str, Any]] = []

    @property
    def answer(self) -> Answer:
        return _answer(self._frames)

    def read(self, n_tokens: int | None) -> Prompt:
        """Return the reply once it has that many tokens. None: all of it."""
        while n_tokens is None or len(self.answer.steps) < n_tokens:
            line = next(self._lines, None)
            if line is None:
                break
            if line.startswith("data: {"):
                frame = json.loads(line.removeprefix("data: "))
                if "error" in frame:
                    raise httpx.RemoteProtocolError(str(frame["error"]))
                self._frames.append(frame)
        return self.answer.tokens[:n_tokens]


class ColdAnswers:
    """Cold answers, asked once for each prompt from a server without a cache."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._known: dict[tuple[Prompt, int], Answer] = {}
        self._lock = threading.Lock()  # in company a row may be computed by other kernels

    def get(self, prompt: Prompt, *, n_tokens: int = 8) -> Answer:
        key = (prompt, n_tokens)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._caller.ask(prompt, n_tokens=n_tokens, cache_prompt=False)
            return self._known[key]

    def check(self, answer: Answer, prompt: Prompt, *, n_tokens: int = 8) -> None:
        wrong = disagreement(answer, self.get(prompt, n_tokens=n_tokens))
        assert wrong is None, f"a prompt of {len(prompt)} tokens, {answer.n_cached} cached: {wrong}"


@contextmanager
def cold_answers(model: Path) -> Iterator[ColdAnswers]:
    with serve(
        str(model), "--parallel", "1", "--threads", "1", "--no-cache-disk", "--cache-ram", "0"
    ) as server:
        caller = Caller(server.url)
        with closing(caller):
            yield ColdAnswers(caller)


def random_tokens(noise: random.Random, n_tokens: int) -> Prompt:
    return tuple(noise.randrange(N_TEXT_TOKENS) for _ in range(n_tokens))


def eventually(check: Callable[[], None]) -> None:
    """Repeat the check until it passes: writes continue after the last answer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class Standby:
    """Servers with equal arguments, one after the other. The next one imports in advance.

    `faults` sets the moment of a server's death.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.faults = Faults(folder / "faults")
        self._folder = folder
        self._arguments = arguments
        self._n_started = 0
        self._next = self._prepare()

    @contextmanager
    def started(self) -> Iterator[tuple[ServerProcess, Caller]]:
        server, self._next = self._next, self._prepare()
        self.faults.clear()
        try:
            _tell_to_serve(server)
            server.wait_until_ready()
            with closing(Caller(server.url)) as caller:
                yield server, caller
        finally:
            _end(server)

    def kill_while_starting(self, after_seconds: float) -> None:
        server, self._next = self._next, self._prepare()
        self.faults.clear()
        _tell_to_serve(server)
        time.sleep(after_seconds)
        _end(server)

    def close(self) -> None:
        _end(self._next)

    def _prepare(self) -> ServerProcess:
        self._n_started += 1
        port = free_port()
        log = self._folder / f"{self._n_started}.log"
        command = [sys.executable, "-m", "tests.support.standby_server", "serve", *self._arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.faults.environment},
            )
        return ServerProcess(process, port, log)


def _tell_to_serve(server: ServerProcess) -> None:
    assert isinstance(server.process, subprocess.Popen)
    assert server.process.stdin is not None
    server.process.stdin.write(b"serve\n")
    server.process.stdin.flush()


def _end(server: ServerProcess) -> None:
    assert isinstance(server.process, subprocess.Popen)
    server.kill()
    server.process.communicate()  # closes its pipe, too


def _body(prompt: Prompt, n_tokens: int, *, cache_prompt: bool) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "max_tokens": n_tokens,
        "temperature": 0,
        "logprobs": N_SCORES,
        "cache_prompt": cache_prompt,
        # Control tokens all look the same in an answer.
        "logit_bias": {str(N_TEXT_TOKENS + n): False for n in range(len(CONTROL_TOKENS))},
    }


def _answer(frames: list[dict[str, Any]]) -> Answer:
    cached = [
        frame["usage"]["prompt_tokens_details"]["cached_tokens"]
        for frame in frames
        if frame.get("usage")
    ]
    return Answer(tuple(_steps(frames)), n_cached=cached[-1] if cached else 0)


def _steps(frames: list[dict[str, Any]]) -> list[Step]:
    logprobs = [choice["logprobs"] for frame in frames for choice in frame["choices"]]
    return [
        Step(token, scores)
        for each in logprobs
        if each
        for token, scores in zip(each["tokens"], each["top_logprobs"], strict=True)
    ]


@cache
def _token_ids() -> dict[str, int]:
    """Return token ids by their text in the completions API."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}
    texts = vocabulary().tokens[:N_TEXT_TOKENS]
    return {_spelled(bytes(byte_of[letter] for letter in text)): n for n, text in enumerate(texts)}


def _spelled(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
