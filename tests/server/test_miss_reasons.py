"""The reason for a miss over a real model: the log line of a request has it, asked for or not."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import (
    SEARCH_TOOL,
    Client,
    assistant,
    listing,
    prose,
    system,
    tool_round,
    user,
)


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with serve("--parallel", "2") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


def misses(server: ServerProcess) -> list[str]:
    return re.findall(r" miss=(\S+)", server.log)


@pytest.mark.long
def test_an_agents_session_names_what_its_client_changed(
    server: ServerProcess, client: Client
) -> None:

    def ask(messages: list[dict[str, Any]], **fields: Any) -> str:
        body = {"messages": messages, "tools": [SEARCH_TOOL], **fields}
        return str(client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    asked = [system("told of its misses"), user(prose("the task", 30))]
    said = ask(asked)
    history = [*asked, assistant(said), user("Go on.")]
    history += tool_round(None, "call_1", "cache", listing("found", 4))
    ask(history)
    more = [*history, assistant("Done."), user("And now?")]
    ask(more)
    other_tool = json.loads(json.dumps(SEARCH_TOOL).replace("Searches", "Looks through"))
    ask(more, tools=[other_tool])
    clock = {**asked[0], "content": "It is noon. " + asked[0]["content"]}
    ask([clock, *more[1:]])
    result = {**more[-3], "content": listing("found again", 4)}
    ask([*more[:-3], result, *more[-2:]])
    ask(more, cache_prompt=False)
    assert misses(server) == [
        "first_request",
        "-",
        "-",
        "tools_changed",
        "system_changed",
        "text_changed",
        "cache_off",
    ]


def test_a_stream_reports_cached_tokens_in_its_headers(
    client: Client, server: ServerProcess
) -> None:
    body = {"messages": [user(prose("streamed", 60))], "max_tokens": 2, "stream": True}
    heads = [client.try_post("/v1/chat/completions", body) for _ in range(2)]
    first, second = (head.headers["x-rekindle-cache"] for head in heads)
    n_prompt = int(first.split("/")[1].split()[0])
    assert re.fullmatch(rf"hit=\d+/{n_prompt} from=\S+", first)
    assert second == f"hit={n_prompt}/{n_prompt} from=live"
