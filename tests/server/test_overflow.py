"""A chat that outgrows its context, through the real server."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import TinyModels
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client, Message, system, user

N_CTX = 4096
N_TURNS = 60


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    model: Path = tiny_models(TinyArchitecture.LLAMA)
    with serve(str(model), "--ctx-size", str(N_CTX), "--parallel", "1") as server:
        yield server


def question(number: int) -> Message:
    return user(f"Question {number}: " + "what was said of this before? " * 8)


@pytest.mark.long
def test_in_60_turns_the_prompt_is_recomputed_at_most_every_10th_turn(
    server: ServerProcess,
) -> None:
    history: list[Message] = [system("a patient listener")]
    n_dropped: list[int] = []
    n_anew = 0
    with closing(Client(server.url)) as client:
        for number in range(N_TURNS):
            history.append(question(number))
            body = {"messages": history, "overflow": "trim", "max_tokens": 8}
            reply = client.post("/v1/chat/completions", body)
            story = reply["rekindle"]
            n_prompt = reply["usage"]["prompt_tokens"]
            assert n_prompt < N_CTX
            n_anew += story["prefilled"] > n_prompt // 3 and number > 0
            n_dropped.append(story["dropped_messages"])
            [choice] = reply["choices"]
            history.append({"role": "assistant", "content": choice["message"]["content"]})
    assert n_dropped[0] == 0
    assert n_dropped == sorted(n_dropped)
    assert n_dropped[-1] > 0, "nothing had to go"
    assert n_anew <= N_TURNS // 10


def test_without_trimming_a_long_prompt_is_a_400_with_both_sizes(server: ServerProcess) -> None:
    history = [system("x"), *(question(number) for number in range(200))]
    with closing(Client(server.url)) as client:
        answer = client.try_post("/v1/chat/completions", {"messages": history})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"] == N_CTX
