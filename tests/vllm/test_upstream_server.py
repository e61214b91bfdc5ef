"""The whole server with vLLM as its engine, in this process, against the fake."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rekindle.config.cache import CacheSettings
from rekindle.config.choices import EngineKind
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ModelSettings
from rekindle.config.settings import Settings
from rekindle.errors import StartupError
from rekindle.models.vllm_model import find_upstreams
from rekindle.server.assembly import assemble
from rekindle.server.serving import background
from tests.support.fake_vllm import FakeVllm, fake_vllm

SYSTEM = "You are terse. " * 20


def settings_for(folder: Path, cache: Path, *fakes: FakeVllm) -> Settings:
    return Settings(
        model=ModelSettings(model=str(folder)),
        engine=EngineSettings(engine=EngineKind.VLLM, upstream=tuple(fake.url for fake in fakes)),
        cache=CacheSettings(cache_dir=cache),
    )


@contextmanager
def server(folder: Path, cache: Path, *fakes: FakeVllm) -> Iterator[str]:
    settings = settings_for(folder, cache, *fakes)
    with background(assemble(settings, find_upstreams(settings))) as url:
        yield url


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[FakeVllm]:
    with fake_vllm() as one:
        yield one


@pytest.fixture(scope="module")
def url(
    hf_folder: Path, tmp_path_factory: pytest.TempPathFactory, shared_fake: FakeVllm
) -> Iterator[str]:
    with server(hf_folder, tmp_path_factory.mktemp("cache"), shared_fake) as base:
        yield base


@pytest.fixture
def fake(shared_fake: FakeVllm) -> Iterator[FakeVllm]:
    """As if it were new."""
    shared_fake.asked.clear()
    shared_fake.blocks.clear()
    shared_fake.aborted.clear()
    yield shared_fake
    shared_fake.status, shared_fake.dies_after = 200, None
    shared_fake.gate.set()


def wait_until_used(url: str) -> None:
    """Wait for the probe that follows a failure."""
    deadline = time.monotonic() + 20
    while not httpx.get(f"{url}/props").json()["total_slots"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def chat(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    response = post(url, "/v1/chat/completions", {"messages": messages, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def n_prefilled(url: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    [family] = [each for each in families if each.name == "rekindle_prompt_tokens_prefilled"]
    return family.samples[0].value


def test_turn_after_turn_begins_with_the_ids_of_the_last_and_what_it_sampled(
    url: str, fake: FakeVllm
) -> None:
    """The sampled ids come back for any text of the reply, so vLLM's own prefix cache hits."""
    messages = [{"role": "system", "content": SYSTEM}]
    cached, sizes = [], []
    for turn in range(4):
        messages.append({"role": "user", "content": f"And {turn}?"})
        body = chat(url, messages, temperature=0)
        messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        sizes.append(body["usage"]["prompt_tokens"])
    for earlier, later in zip(fake.prompts, fake.prompts[1:], strict=False):
        whole = [*earlier, *fake.reply_to(earlier)]
        assert later[: len(whole)] == whole
    assert sizes == [len(prompt) for prompt in fake.prompts]
    assert cached[0] == 0
    for earlier, n_cached in zip(fake.prompts, cached[1:], strict=False):
        n_computed = len(earlier) + fake.reply_tokens
        assert n_cached == n_computed // 16 * 16


def test_cached_tokens_are_shown_in_every_dialect(url: str, fake: FakeVllm) -> None:
    messages: list[Any] = [{"role": "user", "content": SYSTEM}]
    first = chat(url, messages, temperature=0, timings_per_token=True)
    n_prompt = first["usage"]["prompt_tokens"]
    expected = (n_prompt - 1) // 16 * 16
    assert expected > 0
    again = chat(url, messages, temperature=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert again["rekindle"]["cached"] == [{"tier": "upstream", "tokens": expected}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        response = client.responses.create(model="m", input=messages, temperature=0)
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == expected
        stream = client.chat.completions.create(
            model="m",
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        last = list(stream)[-1]
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == expected
    with anthropic.Anthropic(base_url=url, api_key="none") as claude:
        message = claude.messages.create(model="m", messages=messages, max_tokens=16)
        assert message.usage.cache_read_input_tokens == expected
        with claude.messages.stream(model="m", messages=messages, max_tokens=16) as events:
            usage = events.get_final_message().usage
        assert usage.cache_read_input_tokens == expected
        assert usage.input_tokens == n_prompt - expected


def test_health_models_metrics_sessions_and_the_cache_api_answer(url: str, fake: FakeVllm) -> None:
    messages = [{"role": "user", "content": SYSTEM}]
    n_before = n_prefilled(url)
    for _ in range(2):
        chat(url, messages, user="ann", temperature=0)
    assert httpx.get(f"{url}/health").status_code == 200
    [model] = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["id"] == "SmolLM2"
    props = httpx.get(f"{url}/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == fake.n_ctx
    n_prompt = len(fake.prompts[0])
    n_cached = (n_prompt - 1) // 16 * 16
    assert n_prefilled(url) - n_before == 2 * n_prompt - n_cached
    looked_up = post(url, "/v1/cache/lookup", {"messages": messages}).json()
    assert looked_up["prefilled"] < n_prompt
    assert httpx.get(f"{url}/v1/cache").json()["data"] == []
    assert httpx.get(f"{url}/v1/sessions").json()["data"]
    tokens = post(url, "/tokenize", {"content": "Hello <|im_end|>"}).json()["tokens"]
    assert post(url, "/detokenize", {"tokens": tokens}).json()["content"] == "Hello <|im_end|>"


def test_a_stop_string_ends_the_reply_here_and_there(url: str, fake: FakeVllm) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    whole = chat(url, messages, temperature=0)["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    cut = chat(url, messages, temperature=0, stop=[stop])["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_a_client_that_leaves_ends_the_request_upstream(url: str, fake: FakeVllm) -> None:
    fake.gate.clear()
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=5)
    assert fake.aborted.wait(20)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda body: (body["error"]["type"], body["error"]["code"])),
        ("/v1/messages", lambda body: (body["type"], body["error"]["type"])),
    ],
)
def test_a_failed_upstream_is_a_502_in_the_clients_dialect(
    url: str, fake: FakeVllm, path: str, shape: Any
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    wait_until_used(url)
    expected = {
        "/v1/chat/completions": ("server_error", "upstream_failed"),
        "/v1/messages": ("error", "api_error"),
    }
    fake.status = 500
    answer = post(url, path, body)
    assert answer.status_code == 502
    assert shape(answer.json()) == expected[path]
    assert "EngineCore" in answer.json()["error"]["message"]
    fake.status, fake.dies_after = 200, None
    wait_until_used(url)
    fake.dies_after = 2
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if "error" in line]
    assert lines
    assert shape(json.loads(lines[-1].removeprefix("data: "))) == expected[path]


def test_silence_is_a_504_in_each_dialect(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.models.vllm_model.FIRST_BYTE_SECONDS", 0.5)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    with fake_vllm() as fake, server(hf_folder, tmp_path, fake) as url:
        fake.gate.clear()
        answer = post(url, "/v1/chat/completions", body)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "upstream_timed_out"
        fake.gate.set()
        wait_until_used(url)
        fake.gate.clear()
        answer = post(url, "/v1/messages", body)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"


def test_the_second_upstream_answers_when_the_first_is_gone(
    hf_folder: Path, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": SYSTEM}]
    with fake_vllm() as two:
        with fake_vllm() as one:
            with_both = settings_for(hf_folder, tmp_path, one, two)
            assembly = assemble(with_both, find_upstreams(with_both))
        with background(assembly) as url:
            assert chat(url, messages)["choices"][0]["finish_reason"] == "stop"
            assert httpx.get(f"{url}/props").json()["total_slots"] == 4
        assert len(two.asked) == 1


def test_turns_are_remembered_across_restarts_and_never_for_another_model(
    hf_folder: Path, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with fake_vllm() as fake:
        with server(hf_folder, tmp_path, fake) as url:
            reply = chat(url, messages, temperature=0)["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "Go on."},
        ]
        for model, remembers in (("fake/SmolLM2", True), ("fake/Another", False)):
            fake.model = model
            with server(hf_folder, tmp_path, fake) as url:
                turns = chat(url, messages)["rekindle"]["remembered_turns"]
            assert bool(turns) is remembers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"upstream": ()}, "needs --upstream"),
        ({"upstream": ("127.0.0.1:1",)}, "not an http"),
        ({"upstream": ("http://127.0.0.1:1",)}, "No upstream can be used"),
    ],
)
def test_settings_that_lead_nowhere_are_startup_errors(
    hf_folder: Path, change: dict[str, Any], words: str
) -> None:
    engine = EngineSettings(engine=EngineKind.VLLM, **change)
    with pytest.raises(StartupError, match=words):
        find_upstreams(Settings(model=ModelSettings(model=str(hf_folder)), engine=engine))


def test_an_upstream_that_only_claims_to_be_well_is_found_out_at_the_start(
    hf_folder: Path, tmp_path: Path
) -> None:
    with fake_vllm(status=500) as liar:
        settings = settings_for(hf_folder, tmp_path, liar)
        assert httpx.get(f"{liar.url}/health").status_code == 200
        with pytest.raises(StartupError, match="does not generate"):
            assemble(settings, find_upstreams(settings))


def test_a_key_for_vllm_comes_from_its_own_variable(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_vllm(api_key="secret") as fake:
        settings = settings_for(hf_folder, tmp_path, fake)
        with pytest.raises(StartupError, match="401"):
            find_upstreams(settings)
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        assert find_upstreams(settings).name == "SmolLM2"


def test_upstreams_with_different_models_are_refused(hf_folder: Path, tmp_path: Path) -> None:
    with (
        fake_vllm() as one,
        fake_vllm(model="fake/Other") as other,
        pytest.raises(StartupError, match="fake/Other"),
    ):
        find_upstreams(settings_for(hf_folder, tmp_path, one, other))


def test_the_folder_may_be_the_one_that_vllm_has_and_must_be_named_otherwise(
    hf_folder: Path, tmp_path: Path
) -> None:
    with fake_vllm(root=str(hf_folder)) as near, fake_vllm(root="owner/repo") as far:
        engine = EngineSettings(engine=EngineKind.VLLM, upstream=(near.url,))
        assert find_upstreams(Settings(engine=engine)).path == hf_folder
        engine = EngineSettings(engine=EngineKind.VLLM, upstream=(far.url,))
        with pytest.raises(StartupError, match="pass as MODEL"):
            find_upstreams(Settings(engine=engine))
