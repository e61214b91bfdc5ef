"""Traffic as agents send it, and the floor: the least that a server could prefill for it.

The floor comes from token ids alone, never from the server's own reports.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rekindle.generation.events import CacheSource

REQUEST_SECONDS = 600  # a machine under load; nothing is measured here
DISK_SECONDS = 60
REPLY_TOKENS = 8

Message: TypeAlias = dict[str, Any]
Tree: TypeAlias = dict[int, "Tree"]


class ReferenceFloor:
    """Every prefix computed so far, as a tree of tokens.

    Slow and plain on purpose: `rekindle.replay.floor` and the server are checked against it.
    """

    def __init__(self) -> None:
        self._known: Tree = {}

    def n_new(self, prompt: Sequence[int]) -> int:
        """Return how many tokens are new."""
        node = self._known
        for n_shared, token in enumerate(prompt):
            if token not in node:
                return len(prompt) - n_shared
            node = node[token]
        return 0

    def learn(self, tokens: Sequence[int]) -> None:
        node = self._known
        for token in tokens:
            node = node.setdefault(token, {})


class Span(NamedTuple):
    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]  # as far as ids can be told, see `Client`
    n_reply_rows: int  # the last token of a reply that was cut is sampled and never computed
    text: str
    n_prefilled: int
    spans: tuple[Span, ...]

    @property
    def n_cached(self) -> int:
        return len(self.prompt) - self.n_prefilled

    @property
    def sources(self) -> set[str]:
        return {span.source for span in self.spans}

    @property
    def computed(self) -> tuple[int, ...]:
        return self.prompt + self.sampled[: self.n_reply_rows]


class Client:
    """Asks one server, and checks the numbers in each answer.

    The API returns sampled tokens as text. A text that is one token gives its id. A text that is
    not (half a character) ends the known part of the reply.
    """

    def __init__(self, url: str, *, banned_tokens: Sequence[int] = ()) -> None:
        self._banned = {str(token): False for token in banned_tokens}
        self._http = httpx.Client(base_url=url, timeout=REQUEST_SECONDS)
        self._ids: dict[str, int | None] = {}

    def close(self) -> None:
        self._http.close()

    def chat(
        self, messages: Sequence[Message], *, route: str = "/v1/chat/completions", **fields: Any
    ) -> Answer:
        body = {"messages": list(messages), "logprobs": True, **fields}
        return self._answer(self.chat_prompt(**body), self.post(route, body))

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **_: Any
    ) -> list[int]:
        body = {"messages": messages, "tools": tools}
        tokens: list[int] = self.post("/apply-template", body)["tokens"]
        return tokens

    def complete(
        self, prompt: Sequence[int], *, route: str = "/v1/completions", **fields: Any
    ) -> Answer:
        body = {"prompt": list(prompt), "logprobs": 0, **fields}
        return self._answer(prompt, self.post(route, body))

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        body = {"content": text, "parse_special": parse_special}
        tokens: list[int] = self.post("/tokenize", body)["tokens"]
        return tokens

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply. A stream is joined to the shape of an unstreamed one."""
        if "completions" in route:
            body = {"max_tokens": REPLY_TOKENS, "temperature": 0, **body}
            if self._banned:
                body["logit_bias"] = self._banned
        if not body.get("stream"):
            response = self._http.post(route, json=body)
            assert response.status_code == 200, response.text
            whole: dict[str, Any] = response.json()
            return whole
        with self._http.stream("POST", route, json=body) as response:
            assert response.status_code == 200, response.read()
            frames = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert frames.pop() == "[DONE]"
        return _whole([json.loads(frame) for frame in frames])

    def try_post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(route, json=body)

    def get(self, route: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get(route).json()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Return the metric, summed over the labels that are not given."""
        text = self._http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_until_saved(self) -> None:
        """Ask again: the engine saves after an answer and before the next one."""
        self.complete([0], max_tokens=1, cache_prompt=False)

    def wait_until_on_disk(self) -> None:
        """Wait until the disk has all entries. Valid if memory has room and no prompt was short."""
        self.wait_until_saved()
        deadline = time.monotonic() + DISK_SECONDS
        while self._n_entries("disk") < self._n_entries("memory"):
            assert time.monotonic() < deadline, "what is in memory does not get to the disk"
            time.sleep(0.02)

    def _n_entries(self, tier: str) -> float:
        return self.metric("rekindle_cache_entries", tier=tier)

    def _answer(self, prompt: Sequence[int], reply: dict[str, Any]) -> Answer:
        assert_numbers_agree(reply, n_prompt=len(prompt))
        [choice] = reply["choices"]
        n_sampled: int = reply["timings"]["predicted_n"]
        return Answer(
            prompt=tuple(prompt),
            sampled=tuple(self.known_ids(_pieces(choice))),
            n_reply_rows=n_sampled - (choice["finish_reason"] == "length"),
            text=choice["message"]["content"] if "message" in choice else choice["text"],
            n_prefilled=reply["rekindle"]["prefilled"],
            spans=tuple(
                Span(span["source"], span["start"], span["stop"])
                for span in reply["rekindle"]["spans"]
            ),
        )

    def known_ids(self, pieces: Sequence[str]) -> Iterator[int]:
        for piece in pieces:
            if piece not in self._ids:
                tokens = self.tokenize(piece, parse_special=True)
                self._ids[piece] = tokens[0] if len(tokens) == 1 else None
            token = self._ids[piece]
            if token is None:
                return
            yield token


def n_cached_of(story: dict[str, Any]) -> int:
    """Return the cached tokens of all tiers in a `rekindle` object."""
    return sum(each["tokens"] for each in story["cached"])


def assert_numbers_agree(reply: dict[str, Any], *, n_prompt: int) -> None:
    """Check `usage`, `timings` and `rekindle` of one reply. Streams may have no `usage`."""
    story, timings, usage = reply["rekindle"], reply["timings"], reply.get("usage")
    n_cached, n_prefilled = n_cached_of(story), story["prefilled"]
    assert n_cached + n_prefilled == n_prompt
    assert (timings["cache_n"], timings["prompt_n"]) == (n_cached, n_prefilled)
    if usage is not None:
        assert usage["prompt_tokens"] == n_prompt
        assert usage["prompt_tokens_details"]["cached_tokens"] == n_cached
        assert usage["completion_tokens"] == timings["predicted_n"]
    edges = [0, *(edge for span in story["spans"] for edge in (span["start"], span["stop"]))]
    edges.append(n_cached)
    assert edges[::2] == edges[1::2], f"spans do not adjoin: {story}"
    assert all(span["start"] < span["stop"] for span in story["spans"])


def _pieces(choice: dict[str, Any]) -> list[str]:
    logprobs = choice["logprobs"] or {}
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    return list(logprobs.get("tokens", ()))


def _whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream to one reply."""
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    indices = sorted({part["index"] for part in parts})
    last = chunks[-1]
    return {
        "choices": [_whole_choice([p for p in parts if p["index"] == index]) for index in indices],
        **{name: last[name] for name in ("usage", "timings", "rekindle") if name in last},
    }


def _whole_choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    is_chat = "delta" in parts[0]
    scores = [part["logprobs"] for part in parts if part["logprobs"]]
    key = "content" if is_chat else "tokens"
    texts = [part["delta"].get("content", "") if is_chat else part["text"] for part in parts]
    text = "".join(texts)
    return {
        "finish_reason": parts[-1]["finish_reason"],
        "logprobs": {key: [each for score in scores for each in score[key]]},
        **({"message": {"content": text}} if is_chat else {"text": text}),
    }


@dataclass(slots=True)
class Account:
    """Tokens that a workload sent, that were computed for it, and its floor."""

    workload: str
    n_parallel: int
    n_requests: int = 0
    n_prompt: int = 0
    n_prefilled: int = 0
    n_floor: int = 0
    sources: Counter[str] = field(default_factory=Counter)  # tokens by where they were

    def add(self, answer: Answer, n_floor: int) -> None:
        self.n_requests += 1
        self.n_prompt += len(answer.prompt)
        self.n_prefilled += answer.n_prefilled
        self.n_floor += n_floor
        for span in answer.spans:
            self.sources[span.source] += span.stop - span.start

    def row(self) -> str:
        return (
            f"{self.workload:<34}{self.n_parallel:>9}{self.n_requests:>9}{self.n_prompt:>9}"
            f"{self.n_prefilled:>10}{self.n_floor:>7}{self.n_prefilled / self.n_floor:>8.3f}  "
            + " ".join(f"{source}:{n_tokens}" for source, n_tokens in self.sources.items())
        )


TABLE_HEAD = (
    f"{'workload':<34}{'parallel':>9}{'requests':>9}{'prompt':>9}"
    f"{'prefilled':>10}{'floor':>7}{'ratio':>8}  reused from"
)


class Traffic:
    """Requests to one server, counted against the floor.

    Prefixes of an earlier server count as known: `floor` outlives a restart.
    """

    def __init__(
        self,
        url: str,
        *,
        n_parallel: int,
        floor: ReferenceFloor | None = None,
        banned_tokens: Sequence[int] = (),
    ) -> None:
        self.client = Client(url, banned_tokens=banned_tokens)
        self.floor = floor or ReferenceFloor()
        self._n_parallel = n_parallel
        self._account = Account("", n_parallel)

    def close(self) -> None:
        self.client.close()

    @contextmanager
    def counted(self, workload: str) -> Iterator[Account]:
        """The account is complete when the block ends, and agrees with the server's counters."""
        account = self._account = Account(workload, self._n_parallel)
        before = self._counters()
        yield account
        counted = {name: value - before[name] for name, value in self._counters().items()}
        assert counted.pop("prefilled") == account.n_prefilled
        assert {name: value for name, value in counted.items() if value} == account.sources

    def chat(self, messages: Sequence[Message], **fields: Any) -> Answer:
        answer = self.client.chat(messages, **fields)
        self._add(answer)
        return answer

    def chat_at_once(self, conversations: Sequence[Sequence[Message]]) -> list[Answer]:
        with ThreadPoolExecutor(len(conversations)) as pool:
            answers = list(pool.map(self.client.chat, conversations))
        # The tree that they add is the same in whatever order they were computed.
        for answer in answers:
            self._add(answer)
        return answers

    def complete(self, prompt: Sequence[int], **fields: Any) -> Answer:
        answer = self.client.complete(prompt, **fields)
        self._add(answer)
        return answer

    def _add(self, answer: Answer) -> None:
        self._account.add(answer, self.floor.n_new(answer.prompt))
        self.floor.learn(answer.computed)

    def _counters(self) -> dict[str, float]:
        reused = "rekindle_prompt_tokens_reused_total"
        return {
            "prefilled": self.client.metric("rekindle_prompt_tokens_prefilled_total"),
            **{source: self.client.metric(reused, source=source) for source in CacheSource},
        }


TEXT = (
    "the server keeps every prefix that it has computed and looks it up by its tokens before "
    "a new request starts so each turn of an agent costs only what was added since the last one "
    "while tests check that files are read written and moved in the right order on any machine"
)
WORDS = TEXT.split()
FOLDERS = ("cache", "engine", "chat", "api", "tests", "docs")


def prose(seed: str, n_words: int) -> str:
    """Return random words, about one token each."""
    noise = random.Random(seed)
    return " ".join(noise.choice(WORDS) for _ in range(n_words))


def listing(seed: str, n_lines: int) -> str:
    """Return the output of a search tool, about 25 tokens per line."""
    noise = random.Random(seed)
    return "\n".join(
        f"src/{noise.choice(FOLDERS)}/{noise.choice(WORDS)}.py:{noise.randrange(10, 99)}: "
        f"{noise.choice(WORDS)} = {noise.choice(WORDS)}({noise.choice(WORDS)})"
        for _ in range(n_lines)
    )


def system(name: str, n_words: int = 250) -> Message:
    text = f"You are {name}, an agent that works on code. {prose(name, n_words)}."
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the files of the project.",
        "parameters": {"type": "object", "properties": {"pattern": {"type": "string"}}},
    },
}


def tool_round(text: str | None, call_id: str, pattern: str, result: str) -> list[Message]:
    """Return the assistant's turn with a call, and the tool's result."""
    function = {"name": "search", "arguments": json.dumps({"pattern": pattern})}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
