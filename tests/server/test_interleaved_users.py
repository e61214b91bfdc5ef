"""Users take turns on one server: each gets the same replies as alone, and finds its cache."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path

import httpx
import pytest

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.settings import Settings
from rekindle.models.source import ModelFile
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.conftest import TinyModels
from tests.support.cache_traffic import (
    N_SCORES,
    N_TEXT_TOKENS,
    Answer,
    Prompt,
    Step,
    disagreement,
    random_tokens,
)
from tests.support.clear_replies import MIN_LEAD, lead, shown
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.tiny_vocabulary import CONTROL_TOKENS
from tests.support.workloads import REPLY_TOKENS, REQUEST_SECONDS, Client, assistant, system, user

USERS = ("ann", "bob")
LINES = (
    "water is made of hydrogen and oxygen",
    "the moon is far away from here",
    "the cat sat on the mat",
    "Paris is the capital of France",
    "birds fly south in the winter",
    "apples are red and green",
)
N_TURNS = 3
EXACT = ("--no-cache-recompute",)  # else what is found depends on how busy the machine is


@dataclass(frozen=True)
class Turn:
    tokens: tuple[str, ...]  # of the reply, as the API spells them
    scores: tuple[dict[str, float], ...]  # of the best candidates at each
    n_prompt: int
    n_cached: int

    @property
    def leads(self) -> list[float]:
        return [lead(scores.values()) for scores in self.scores]


class Talk:
    def __init__(self, name: str, lines: Sequence[str]) -> None:
        self._name = name
        self._lines = iter(lines)
        about = system(f"{name}, who says what the user says", 40)
        self._messages = [about, *shown(f" {name}")]

    def take_turn(self, client: Client) -> Turn:
        self._messages.append(user(f"Say: {next(self._lines)} {self._name}"))
        body = {"messages": self._messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 16}
        reply = client.post("/v1/chat/completions", {**body, "user": self._name})
        [choice] = reply["choices"]
        self._messages.append(assistant(choice["message"]["content"]))
        steps = choice["logprobs"]["content"]
        return Turn(
            tokens=tuple(step["token"] for step in steps),
            scores=tuple(
                {each["token"]: each["logprob"] for each in step["top_logprobs"]} for step in steps
            ),
            n_prompt=reply["usage"]["prompt_tokens"],
            n_cached=reply["usage"]["prompt_tokens_details"]["cached_tokens"],
        )


Turns = Mapping[str, Sequence[Turn]]


def one_by_one(client: Client, talks: Mapping[str, Talk]) -> Turns:
    rounds = [
        {name: talk.take_turn(client) for name, talk in talks.items()} for _ in range(N_TURNS)
    ]
    return {name: [turns[name] for turns in rounds] for name in talks}


def all_at_once(client: Client, talks: Mapping[str, Talk]) -> Turns:
    def take_turns(talk: Talk) -> list[Turn]:
        return [talk.take_turn(client) for _ in range(N_TURNS)]

    with ThreadPoolExecutor(len(talks)) as pool:
        return dict(zip(talks, pool.map(take_turns, talks.values()), strict=True))


@dataclass(frozen=True)
class Alone:
    """What a user hears on a server of its own: the first talk without a near tie."""

    lines: Sequence[str]  # of the user
    turns: Sequence[Turn]


@pytest.fixture(scope="module")
def alone(embedded_model: Path) -> Mapping[str, Alone]:
    return {name: hear(name) for name in USERS}


def hear(name: str) -> Alone:
    """Which replies are near ties depends on the processor."""
    with serve("--parallel", "1", *EXACT) as server, closing(Client(server.url)) as client:
        for lines in permutations(LINES, N_TURNS):
            turns = one_by_one(client, {name: Talk(name, lines)})[name]
            if min(lead for turn in turns for lead in turn.leads) > MIN_LEAD:
                return Alone(lines, turns)
    raise AssertionError(f"every talk of {name} has a near tie")


def assert_kept(turns: Sequence[Turn]) -> None:
    """Each turn finds the last one's prompt and reply; the end of a reply may not be computed."""
    for last, turn in pairwise(turns):
        assert turn.n_cached >= last.n_prompt + len(last.tokens) - 1


@pytest.mark.parametrize(
    ("n_parallel", "take_turns"),
    [("1", one_by_one), ("4", all_at_once)],
)
def test_users_on_one_server_get_the_same_replies_as_alone(
    alone: Mapping[str, Alone],
    n_parallel: str,
    take_turns: Callable[[Client, Mapping[str, Talk]], Turns],
) -> None:
    with serve("--parallel", n_parallel, *EXACT) as server, closing(Client(server.url)) as client:
        talks = {name: Talk(name, each.lines) for name, each in alone.items()}
        together = take_turns(client, talks)
    for name, turns in together.items():
        assert [turn.tokens for turn in turns] == [turn.tokens for turn in alone[name].turns]
        assert_kept(turns)


@contextmanager
def serving_tiny(model: Path, *, n_parallel: int) -> Iterator[httpx.Client]:
    settings = Settings(
        engine=EngineSettings(parallel=n_parallel, ctx_size=8192, threads=1),
        cache=CacheSettings(cache_disk=Bytes(0), cache_recompute=False),
    )
    assembly = assemble(settings, ModelFile(model, "tiny"))
    with (
        background(assembly) as url,
        httpx.Client(base_url=url, timeout=REQUEST_SECONDS) as client,
    ):
        yield client


def ask(client: httpx.Client, name: str, prompt: Prompt) -> Answer:
    body = {
        "prompt": list(prompt),
        "user": name,
        "max_tokens": REPLY_TOKENS,
        "temperature": 0,
        "logprobs": N_SCORES,
        # Control tokens all look the same in an answer.
        "logit_bias": {str(N_TEXT_TOKENS + n): False for n in range(len(CONTROL_TOKENS))},
    }
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    reply = response.json()
    [choice] = reply["choices"]
    scores = choice["logprobs"]
    steps = zip(scores["tokens"], scores["top_logprobs"], strict=True)
    n_cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Answer(tuple(Step(token, top) for token, top in steps), n_cached)


def asked_alone(model: Path, name: str) -> list[tuple[Prompt, Answer]]:
    """Turns of random tokens; each prompt holds the replies before it."""
    noise = random.Random(f"interleaved {name}")
    prompt = random_tokens(noise, 150)
    turns = []
    with serving_tiny(model, n_parallel=1) as client:
        for _ in range(N_TURNS):
            prompt += random_tokens(noise, 60)
            turns.append((prompt, ask(client, name, prompt)))
            prompt += turns[-1][1].tokens
    return turns


@pytest.mark.parametrize("architecture", [TinyArchitecture.LLAMA, TinyArchitecture.QWEN35])
def test_users_on_any_class_of_model_get_the_same_replies_as_alone(
    tiny_models: TinyModels, architecture: TinyArchitecture
) -> None:
    """These models know nothing, and near ties are everywhere. In one slot a reply has the very
    logprobs that it has alone; beside the rows of others they differ by noise.
    """
    model = tiny_models(architecture)
    alone = {name: asked_alone(model, name) for name in USERS}
    for n_parallel in (1, 4):
        with serving_tiny(model, n_parallel=n_parallel) as client:
            for number in range(N_TURNS):
                for name, turns in alone.items():
                    prompt, right = turns[number]
                    answer = ask(client, name, prompt)
                    assert disagreement(answer, right) is None
                    assert n_parallel > 1 or answer.steps == right.steps
                    assert answer.n_cached == right.n_cached
    for turns in alone.values():
        for (last, reply), (_, answer) in pairwise(turns):
            assert answer.n_cached == len(last) + len(reply.steps) - 1


def test_users_share_their_common_prefix(tiny_models: TinyModels) -> None:
    """A session is who came, and not what was computed."""
    prompt = random_tokens(random.Random("in common"), 200)
    with serving_tiny(tiny_models(TinyArchitecture.LLAMA), n_parallel=2) as client:
        first, second = (ask(client, name, prompt) for name in USERS)
    assert (first.n_cached, second.n_cached) == (0, len(prompt))
    assert disagreement(second, first) is None
