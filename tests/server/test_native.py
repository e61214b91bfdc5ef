"""llama-server's own API through the real server: editors, slots, scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model, write_tiny_reranker

# llama.vim's request, with its names and numbers.
EDITOR: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "import os\n\n\ndef read(path):\n",
    "input_suffix": "\n\nprint(read('a'))\n",
    "prompt": "    with open(",
    "n_predict": 8,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content",
        "timings/cache_n",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/predicted_n",
        "truncated",
        "tokens_cached",
    ],
}
# The ring of chunks that an editor collects from other files.
HELPER = "def helper_{i}(value):\n    return value + {i}\n"
RING = [{"text": HELPER.format(i=i) * 12, "time": i, "filename": f"{i}.py"} for i in range(4)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("native")
    model = write_tiny_model(folder / "tiny.gguf", TinyArchitecture.LLAMA, infill=True)
    disk = ("--cache-dir", str(folder / "cache"))
    with serve(str(model), "--ctx-size", "4096", "--parallel", "2", *disk) as process:
        yield process


def post(server: ServerProcess, path: str, body: object) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_editors_next_request_finds_the_chunks_of_the_last_one(tiny: ServerProcess) -> None:
    # The editor sends the ring ahead, without generating.
    warm = {**EDITOR, "input_extra": RING[:3], "n_predict": 0, "prompt": ""}
    post(tiny, "/infill", warm)
    first = post(tiny, "/infill", {**EDITOR, "input_extra": RING[:3]})
    assert first.keys() == {*EDITOR["response_fields"]}
    n_chunks = first["timings/cache_n"]
    assert n_chunks > first["timings/prompt_n"]
    # One more chunk: all tokens before it are found.
    second = post(tiny, "/infill", {**EDITOR, "input_extra": RING})
    assert second["timings/cache_n"] > 0.6 * n_chunks
    again = post(tiny, "/infill", {**EDITOR, "input_extra": RING})
    assert again["timings/prompt_n"] == 0


def test_a_completion_streams_its_tokens_and_ends_with_the_whole_entry(
    tiny: ServerProcess,
) -> None:
    body = {"prompt": "The user asks", "n_predict": 6, "temperature": 0, "ignore_eos": True}
    whole = post(tiny, "/completion", {**body, "return_tokens": True, "n_probs": 2})
    assert len(whole["tokens"]) == whole["tokens_predicted"] == 6
    assert whole["stop_type"] == "limit"
    chances = whole["completion_probabilities"]
    assert [each["id"] for each in chances] == whole["tokens"]
    assert [each["top_logprobs"][0]["id"] for each in chances] == whole["tokens"]
    with httpx.stream("POST", f"{tiny.url}/completion", json={**body, "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    events = [httpx.Response(200, content=line.removeprefix("data: ")).json() for line in lines]
    assert "".join(each["content"] for each in events) == whole["content"]
    assert [token for each in events for token in each["tokens"]] == whole["tokens"]
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]
    tokens = post(tiny, "/tokenize", {"content": body["prompt"]})["tokens"]
    mixed = post(tiny, "/completion", {**body, "prompt": [tokens[0], "user asks"]})
    assert mixed["stop"] is True
    by_ids = post(tiny, "/completion", {**body, "prompt": tokens})
    assert by_ids["content"] == whole["content"]


def test_a_slot_can_be_saved_restored_and_erased(tiny: ServerProcess) -> None:
    def cached() -> int:
        reply = post(tiny, "/completion", {"prompt": PROMPT, "n_predict": 1, "id_slot": 1})
        n_cached: int = reply["timings"]["cache_n"]
        return n_cached

    assert cached() < 10
    saved = post(tiny, "/slots/1?action=save", {"filename": "mine.bin"})
    assert saved["n_saved"] > 50
    assert saved["n_written"] > 0
    restored = post(tiny, "/slots/5?action=restore", {"filename": "mine.bin"})
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_written"]
    assert cached() == saved["n_saved"]
    erased = post(tiny, "/slots/1?action=erase", {})
    assert erased["n_erased"] == 0, "it was saved"
    again = post(tiny, "/slots/5?action=restore", {"filename": "mine.bin"})
    assert again["n_restored"] == saved["n_saved"], "what was saved stays"


def test_an_erased_slot_leaves_no_rows_in_the_context(tiny: ServerProcess) -> None:
    body = {"prompt": f"Erase this. {PROMPT}", "n_predict": 1, "id_slot": 7}
    post(tiny, "/completion", body)
    n_erased = post(tiny, "/slots/7?action=erase", {})["n_erased"]
    assert n_erased > 50
    slots = httpx.get(f"{tiny.url}/slots").json()
    assert n_erased not in [slot["n_prompt_tokens"] for slot in slots]
    assert post(tiny, "/completion", body)["timings"]["cache_n"] < n_erased // 2


PROMPT = "Seven slots were saved. " * 12

# The requests of llama.vscode, with its names and numbers: completions of code, ahead and at the
# cursor, then what its agent sends.
VSCODE_AHEAD = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
VSCODE_INFILL = {
    "id_slot": 0,
    "input_prefix": EDITOR["input_prefix"],
    "input_suffix": EDITOR["input_suffix"],
    "prompt": EDITOR["prompt"],
    "n_predict": 8,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 500,
    "model": "qwen-coder",
}
VSCODE_TOOL = {
    "type": "function",
    "function": {
        "name": "search_source",
        "description": "Searches the code base.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search"}},
            "required": ["query"],
        },
        "strict": True,
    },
}
VSCODE_CALL = {"name": "search_source", "arguments": '{"query": "slots"}'}
VSCODE_MESSAGES = [
    {"role": "system", "content": "You are an agent for software development."},
    {"role": "user", "content": "Where are slots saved?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": VSCODE_CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "slots.py: def save(slot):"},
]


def test_the_completions_of_llama_vscode_find_the_chunks_it_sent_ahead(tiny: ServerProcess) -> None:
    post(tiny, "/infill", {**VSCODE_AHEAD, "input_extra": RING})
    replies = post(tiny, "/infill", {**VSCODE_INFILL, "input_extra": RING})
    assert len(replies) == 3
    assert all(isinstance(each["content"], str) for each in replies)
    timings = replies[0]["timings"]
    assert timings["cache_n"] > 5 * timings["prompt_n"]
    assert {"generation_settings", "tokens_cached", "truncated"} <= replies[0].keys()


def test_the_agent_of_llama_vscode_counts_its_prompt_exactly(tiny: ServerProcess) -> None:
    [listed] = httpx.get(f"{tiny.url}/v1/models").json()["data"]
    assert listed["owned_by"] == "llamacpp" or "meta" in listed
    n_ctx = httpx.get(f"{tiny.url}/props").json()["default_generation_settings"]["n_ctx"]
    tools = {"tools": [VSCODE_TOOL], "tool_choice": "auto"}
    template = {"messages": VSCODE_MESSAGES, "model": listed["id"], **tools}
    prompt = post(tiny, "/apply-template", template)["prompt"]
    count = {"content": prompt, "add_special": False, "parse_special": True}
    n_tokens = len(post(tiny, "/tokenize", count)["tokens"])
    body = {**template, "stream": True, "max_tokens": min(16, n_ctx - n_tokens)}
    with httpx.stream("POST", f"{tiny.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [httpx.Response(200, content=line).json() for line in lines[:-1]]
    choices = [each["choices"][0] for each in chunks if each["choices"]]
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] != []
    whole = post(tiny, "/v1/chat/completions", {**body, "stream": False})
    assert whole["usage"]["prompt_tokens"] == n_tokens
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_tokens - 1


def test_llama_vscode_gets_its_embeddings(tiny: ServerProcess) -> None:
    body = {"input": "def save(slot):", "model": "nomic", "encoding_format": "float"}
    reply = post(tiny, "/v1/embeddings", body)
    assert len(reply["data"][0]["embedding"]) == 64
    assert reply["usage"]["total_tokens"] > 0


def test_a_reranker_scores_documents_and_makes_no_embeddings(tmp_path: Path) -> None:
    model = write_tiny_reranker(tmp_path / "rank.gguf", template="Q: {query}\nD: {document}")
    with serve(str(model), "--ctx-size", "1024") as server:
        body = {"query": "bears", "documents": ["a panda is a bear", "hi", "long " * 200]}
        results = post(server, "/v1/rerank", body)["results"]
        scores = {each["index"]: each["relevance_score"] for each in results}
        assert scores.keys() == {0, 1, 2}
        assert all(0 < score < 1 for score in scores.values())
        assert len(set(scores.values())) == 3
        alone = post(server, "/rerank", {**body, "documents": body["documents"][2:]})["results"]
        assert alone[0]["relevance_score"] == pytest.approx(scores[2], abs=1e-6)
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400
        assert "reranker" in refused.text
