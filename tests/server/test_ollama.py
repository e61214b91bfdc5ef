"""Ollama's own Python client, and programs that use it, against the real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from tests.conftest import TinyModels
from tests.support.clear_replies import say
from tests.support.replayed_client import TEMPLATE, ScriptedServer, serve_script
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.workloads import listing

GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "integer", "maximum": 9}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(url + path, json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def n_cached(reply: dict[str, Any]) -> int:
    return sum(each["tokens"] for each in reply["rekindle"]["cached"])


def test_a_streamed_chat_equals_the_whole_one(client: ollama.Client) -> None:
    messages = say("the ship sails to the north")
    whole = client.chat("any:latest", messages, options=GREEDY)
    *parts, last = client.chat("any:latest", messages, options=GREEDY, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (whole.message.role, whole.done, whole.done_reason) == ("assistant", True, "stop")
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert last.total_duration is not None
    assert last.eval_duration is not None
    assert last.total_duration >= last.eval_duration > 0


def test_models_are_listed_and_shown(client: ollama.Client, server: ServerProcess) -> None:
    [listed] = client.list().models
    assert listed.model is not None
    [running] = client.ps().models
    assert (running.model, running.digest) == (listed.model, listed.digest)
    assert running.expires_at is not None
    shown = client.show(listed.model)
    assert shown.capabilities == ["completion", "tools", "embedding"]
    assert shown.details is not None
    assert shown.details.family == "llama"
    assert shown.modelinfo is not None
    props = httpx.get(f"{server.url}/props").json()
    assert shown.modelinfo["llama.context_length"] == running.context_length
    assert running.context_length == props["default_generation_settings"]["n_ctx"]
    assert shown.template == props["chat_template"]


def test_a_format_holds_the_reply_to_its_schema(client: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 40}
    messages = [{"role": "user", "content": "Describe a ball."}]
    chat = client.chat("any", messages, format=SCHEMA, options=options)
    reply = json.loads(chat.message.content or "")
    assert reply.keys() == {"colour", "size"}
    assert reply["colour"] in ("red", "blue")
    generated = client.generate("any", "A ball as JSON.", format=SCHEMA, options=options)
    assert json.loads(generated.response or "").keys() == {"colour", "size"}


def test_vectors_are_those_of_the_other_api(client: ollama.Client, server: ServerProcess) -> None:
    made = client.embed("any", ["a ship", "a dog"])
    asked = {"input": ["a ship", "a dog"]}
    theirs = post(server.url, "/v1/embeddings", asked)["data"]
    assert [list(vector) for vector in made.embeddings] == [each["embedding"] for each in theirs]
    assert list(client.embeddings("any", "a dog").embedding) == list(made.embeddings[1])


def test_a_context_is_continued_from_the_cache(server: ServerProcess) -> None:
    asked = {"model": "any", "stream": False, "options": GREEDY}
    first = post(server.url, "/api/generate", {**asked, "prompt": "Name a colour of the sea."})
    context = first["context"]
    assert len(context) == first["prompt_eval_count"] + first["eval_count"]
    second = post(
        server.url, "/api/generate", {**asked, "prompt": "And one of grass?", "context": context}
    )
    assert n_cached(second) >= len(context) - 1
    assert second["context"][: len(context)] == context
    tokens = second["context"][len(context) : second["prompt_eval_count"]]
    followed = post(server.url, "/detokenize", {"tokens": tokens})["content"]
    assert followed == (
        "<|im_end|>\n<|im_start|>user\nAnd one of grass?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_next_turn_is_found_in_the_cache_over_any_api(server: ServerProcess) -> None:
    system = f"You help with files.\n{listing('ollama', 20)}"
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Which is first?"},
    ]
    asked = {"model": "any", "stream": False, "options": {**GREEDY, "num_predict": 6}}
    first = post(server.url, "/api/chat", {**asked, "messages": messages})
    n_known = first["prompt_eval_count"] + first["eval_count"] - 1  # the last is not computed
    messages += [first["message"], {"role": "user", "content": "And the last?"}]
    second = post(server.url, "/api/chat", {**asked, "messages": messages})
    assert n_cached(second) >= n_known
    assert second["rekindle"]["remembered_turns"] == 1
    messages += [second["message"], {"role": "user", "content": "Thank you."}]
    body = {"max_tokens": 4, "system": system, "messages": messages[1:]}
    third = post(server.url, "/v1/messages", body)
    n_known = second["prompt_eval_count"] + second["eval_count"] - 1
    assert third["usage"]["cache_read_input_tokens"] >= n_known


def test_errors_are_raised_with_their_message(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="Infill is not supported") as refused:
        client.generate("any", "a", suffix="b")
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="rekindle serve"):
        client.pull("llama9")


@pytest.fixture(scope="module")
def scripted(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    model = tiny_models(TinyArchitecture.LLAMA)
    folder = tmp_path_factory.mktemp("scripted")
    with serve_script(model, folder, template=TEMPLATE, n_cells=8192, n_slots=2) as server:
        yield server


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_as_ollamas_documentation_shows_it(
    scripted: ScriptedServer,
    stream: bool,  # noqa: FBT001
) -> None:
    calls = [
        f'<tool_call>\n{{"name": "add", "arguments": {{"a":  {a}, "b": 2}}}}\n</tool_call>'
        for a in (1, 5)
    ]
    seed = 10 + 10 * stream
    scripted.say(seed, "<think>\nI add.\n</think>\n\nLet me see.\n" + "\n".join(calls))
    scripted.say(seed + 1, "3 and 7.")
    messages: list[Any] = [{"role": "user", "content": f"Add, {stream}."}]
    with ollama.Client(scripted.url) as client:
        assert "thinking" in (client.show("tiny").capabilities or ())
        options: dict[str, Any] = {"seed": seed}
        asked = client.chat("tiny", messages, tools=[add], options=options, stream=stream)
        parts = list(asked) if stream else [asked]
        message = ollama.Message(
            role="assistant",
            content="".join(part.message.content or "" for part in parts),
            thinking="".join(part.message.thinking or "" for part in parts),
            tool_calls=[call for part in parts for call in part.message.tool_calls or ()],
        )
        assert message.thinking == "I add."
        assert (message.content or "").strip() == "Let me see."
        messages.append(message)
        for call in message.tool_calls or ():
            result = add(**call.function.arguments)
            messages.append(
                {"role": "tool", "tool_name": call.function.name, "content": str(result)}
            )
        last = client.chat("tiny", messages, tools=[add], options={"seed": seed + 1})
    assert last.message.content == "3 and 7."
    prompt = scripted.text_of(scripted.prompt_of(seed + 1))
    assert calls[0] in prompt, "as it was sampled, with two spaces"
    assert prompt.index(calls[1]) < prompt.index("\n3") < prompt.index("\n7")


def test_thinking_is_switched_by_think(tiny_models: TinyModels) -> None:
    template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% if enable_thinking is false %}"
        "{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
    )
    arguments = (str(tiny_models(TinyArchitecture.LLAMA)), "--chat-template", template)
    with serve(*arguments, "--ctx-size", "512") as server, ollama.Client(server.url) as client:
        assert "thinking" in (client.show("any").capabilities or ())
        options = {**GREEDY, "num_predict": 8}
        thought = client.generate("any", "Tell me of a ship.", think=True, options=options)
        assert thought.thinking
        assert thought.response == ""
        answer = client.generate("any", "Tell me of a ship.", think=False, options=options)
        assert answer.response
        assert not answer.thinking


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(("alpha", "beta")):
        write_tiny_model(folder / f"{name}.gguf", TinyArchitecture.LLAMA, seed=seed)
    with serve("--models-dir", str(folder), "--ctx-size", "1024", "--parallel", "1") as server:
        yield server


def test_models_are_loaded_and_unloaded_as_keep_alive_says(several: ServerProcess) -> None:
    short = {"num_predict": 2}
    with ollama.Client(several.url) as client:
        assert [model.model for model in client.list().models] == ["alpha:latest", "beta:latest"]
        assert client.show("beta").capabilities == ["completion", "tools"]
        assert loaded(client) == []
        assert client.generate("alpha:latest", "").done_reason == "load"
        assert loaded(client) == ["alpha:latest"]
        assert client.generate("alpha", "", keep_alive=0).done_reason == "unload"
        assert loaded(client) == []
        assert client.generate("beta", "a", keep_alive="1h", options=short).model == "beta"
        assert loaded(client) == ["beta:latest"]
        client.generate("beta", "a", keep_alive=0, options=short)
        several.wait_for_log("model=beta unloaded, idle for 0 s")
        with pytest.raises(ollama.ResponseError, match="gamma") as refused:
            client.chat("gamma:latest", [{"role": "user", "content": "hi"}])
        assert refused.value.status_code == 404


def test_a_long_text_is_cut_before_it_is_embedded(several: ServerProcess) -> None:
    long = "word " * 3000
    with ollama.Client(several.url) as client:
        assert client.embed("alpha", ["a", long]).prompt_eval_count == 1 + 1024
        with pytest.raises(ollama.ResponseError, match="at most 1024") as refused:
            client.embed("alpha", ["a", long], truncate=False)
    assert refused.value.status_code == 400


def loaded(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.ps().models]


def test_the_plugin_of_llm_works_unchanged(
    client: ollama.Client, server: ServerProcess, tmp_path: Path
) -> None:
    [listed] = client.list().models

    def llm(*arguments: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "llm", *arguments],
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path)}
            | {"LLM_USER_PATH": str(tmp_path), "OLLAMA_HOST": server.url},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    model = f"ollama/{listed.model}"
    asked = ("-m", model, "-o", "temperature", "0", "-o", "num_predict", "12")
    assert llm(*asked, "Name three colours of a plugin.").strip()
    n_before = server.log.count(" turns=1 ")
    assert llm("-c", "And one more?").strip()
    server.wait_for_log(" turns=1 ", times=n_before + 1)  # the second turn continues the first
    vector = json.loads(llm("embed", "-m", model, "-c", "a ship"))
    theirs = post(server.url, "/v1/embeddings", {"input": "a ship"})["data"][0]["embedding"]
    assert vector == pytest.approx(theirs)
