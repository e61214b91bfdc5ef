"""Other tests compare replies to these prompts, so the model must be sure of every token."""

from contextlib import closing

import pytest

from tests.support.clear_replies import COUNTING, MIN_LEAD, lead, say
from tests.support.server_process import ServerProcess
from tests.support.workloads import Client, Message, prose, system

REPLY_TOKENS = 24


@pytest.mark.parametrize("head", [[], [system("a head", 50)]], ids=["alone", "behind a head"])
@pytest.mark.parametrize("line", ["the ship sails to the north", "one two three four five six"])
def test_a_line_is_repeated_with_high_confidence(
    server: ServerProcess, line: str, head: list[Message]
) -> None:
    body = {"messages": [*head, *say(line)], "max_tokens": REPLY_TOKENS}
    with closing(Client(server.url)) as client:
        reply = client.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    [choice] = reply["choices"]
    assert choice["message"]["content"] == line
    steps = choice["logprobs"]["content"]
    assert min(lead(top["logprob"] for top in step["top_logprobs"]) for step in steps) > MIN_LEAD


@pytest.mark.parametrize("n_words", [0, 60, 400])
def test_counting_continues_with_high_confidence(server: ServerProcess, n_words: int) -> None:
    body = {"prompt": f"{prose('a head', n_words)}\n{COUNTING}", "max_tokens": REPLY_TOKENS}
    with closing(Client(server.url)) as client:
        reply = client.post("/v1/completions", {**body, "logprobs": 2})
    [choice] = reply["choices"]
    assert choice["text"].startswith(" 13, 14")
    assert min(lead(top.values()) for top in choice["logprobs"]["top_logprobs"]) > MIN_LEAD
