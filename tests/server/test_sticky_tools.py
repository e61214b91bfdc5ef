"""Sticky tools through the real server, as Codex asks for a summary."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TinyModels
from tests.support.replayed_client import TEMPLATE
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import Client

ROUTE = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"This tool {name}s what it is told to {name}.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    }
    for name in ("read", "write", "list")
]
LOOP = [
    {"role": "user", "content": "Read the notes."},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"what": "notes"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Buy milk and a long rope. " * 9},
]
SUMMARISE = {"role": "user", "content": "Summarise the conversation."}


@pytest.fixture(scope="module")
def server(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model: Path = tiny_models(TinyArchitecture.LLAMA)
    template = tmp_path_factory.mktemp("template") / "qwen.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--sticky-tools", "--no-rewarm")
    with serve(str(model), "--ctx-size", "4096", "--parallel", "1", *flags) as server:
        yield server


def test_a_summary_without_tools_prefills_only_what_is_new(server: ServerProcess) -> None:
    common = {"instructions": "Be brief.", "prompt_cache_key": "s", "max_output_tokens": 4}
    with closing(Client(server.url)) as client:
        first = client.post(ROUTE, {**common, "input": LOOP, "tools": TOOLS})
        body = {**common, "input": [*LOOP, SUMMARISE], "tools": []}
        summary = client.post(ROUTE, body)
        other = client.post(ROUTE, {**body, "cache_salt": "another namespace"})
    sticky = summary["rekindle"]["sticky_tools"]
    assert (sticky["change"], sticky["tools"]) == ("dropped", len(TOOLS))
    n_summary = summary["usage"]["input_tokens"]
    assert summary["rekindle"]["prefilled"] < n_summary - first["usage"]["input_tokens"] + 20
    assert sticky["saved_tokens"] > 100
    assert [item["type"] for item in summary["output"]] == ["message"]
    assert "sticky_tools" not in other["rekindle"]
    assert other["usage"]["input_tokens"] < n_summary
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f"rekindle_sticky_tools_saved_tokens_total {sticky['saved_tokens']}.0" in metrics
