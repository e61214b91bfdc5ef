"""llama-server's own API through the real server: editors, slots, scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model, write_tiny_reranker

# llama.vim's request, with its names and numbers; llama.vscode sends the same fields.
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
    assert again["timings/prompt_n"] == 1


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
    assert cached() == saved["n_saved"] - 1
    erased = post(tiny, "/slots/1?action=erase", {})
    assert erased["n_erased"] == saved["n_saved"]
    again = post(tiny, "/slots/5?action=restore", {"filename": "mine.bin"})
    assert again["n_restored"] == saved["n_saved"], "what was saved stays"


PROMPT = "Seven slots were saved. " * 12


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
