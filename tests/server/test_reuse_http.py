"""Prompt reuse as a client sees it: the real server, the embedded model."""

import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModels
from tests.support.clear_replies import COUNTING, say
from tests.support.server_process import ServerProcess, serve
from tests.support.tiny_models import TinyArchitecture
from tests.support.workloads import (
    SEARCH_TOOL,
    Answer,
    Client,
    Message,
    Span,
    assert_numbers_agree,
    assistant,
    listing,
    n_cached_of,
    prose,
    system,
    tool_round,
    user,
)

CHAT_ROUTES = ["/v1/chat/completions", "/chat/completions"]
COMPLETION_ROUTES = ["/v1/completions", "/completions"]
ROUTES = CHAT_ROUTES + COMPLETION_ROUTES
ASKED_ROUTES = [
    route if route.startswith("/v1") else pytest.param(route, marks=pytest.mark.long)
    for route in ROUTES
]
RESPONSES_ROUTES = ["/v1/responses", "/responses"]
OTHER_POST_ROUTES = [
    *("/v1/embeddings", "/embeddings"),
    *("/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens"),
    *("/v1/cache/lookup", "/v1/cache/{key}/pin"),
    *("/embedding", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    *("/completion", "/lora-adapters", "/props"),
    *(
        f"{v1}/{what}/input_tokens"
        for v1 in ("/v1", "")
        for what in ("chat/completions", "responses")
    ),
    *(f"{v1}/models/{{model_id}}/{what}" for v1 in ("/v1", "") for what in ("load", "unload")),
]
# Their own tests show what they find: test_ollama.py, test_gemini_sdk.py, test_native.py.
OTHER_FORMATS = ("/api/", "/v1beta/", "/v1/cachedContents", "/infill", "/slots/")
BLOCK = 256
HEADER_TOKENS = 12  # that prompts of a chat template share whatever they say, and texts by chance


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[ServerProcess, Client]]:
    """Start a server with one slot, so that every other conversation loses it."""
    with serve(*arguments, "--parallel", "1") as server, closing(Client(server.url)) as client:
        server.wait_for_log(" cache: ")  # what is on disk is known
        yield server, client


@pytest.fixture(scope="module")
def solo(embedded_model: Path) -> Iterator[Client]:
    with serving() as (_, client):
        yield client


@pytest.fixture(scope="module")
def uncached_by_default(tiny_models: TinyModels) -> Iterator[Client]:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    with serving(model, "--no-cache-prompt", "--no-cache-recompute") as (_, client):
        yield client


@pytest.fixture
def four(server: ServerProcess) -> Iterator[Client]:
    with closing(Client(server.url)) as client:
        yield client


def ask(client: Client, route: str, seed: str, **fields: Any) -> Answer:
    """A prompt that shares the words of a chat template with others, and nothing else."""
    if route in CHAT_ROUTES:
        messages = [system(seed, 50), *say("the ship sails to the north")]
        return client.chat(messages, route=route, **fields)
    return client.complete(clear_prompt(client, seed, 60), route=route, **fields)


def tokens_of(client: Client, seed: str, n_words: int) -> list[int]:
    return client.tokenize(prose(seed, n_words))


def clear_prompt(client: Client, seed: str, n_tokens: int) -> list[int]:
    """For replies that are compared."""
    ending = client.tokenize(f"\n{COUNTING}")
    return [*tokens_of(client, seed, n_tokens)[: n_tokens - len(ending)], *ending]


def take_the_slot(client: Client, seed: str) -> None:
    client.complete(tokens_of(client, seed, 100), max_tokens=1)


def kill(server: ServerProcess, client: Client) -> None:
    client.wait_until_on_disk()
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL


def n_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))


def test_every_generating_route_is_covered_here(solo: Client) -> None:
    paths = solo.get("/openapi.json")["paths"]
    posts = {path for path, methods in paths.items() if "post" in methods}
    others = {path for path in posts if path.startswith(OTHER_FORMATS) or ":" in path}
    assert posts - others == {*ROUTES, "/v1/messages", *RESPONSES_ROUTES, *OTHER_POST_ROUTES}


@pytest.mark.parametrize("route", ["/v1/messages", *RESPONSES_ROUTES])
def test_cache_prompt_reaches_the_engine_in_the_other_wire_formats(
    solo: Client, route: str
) -> None:
    text = prose(f"asked through {route}", 60)
    if route == "/v1/messages":
        body = {"max_tokens": 2, "messages": [user(text)]}
    else:
        body = {"max_output_tokens": 2, "input": text}

    def n_cached(**fields: Any) -> int:
        return n_cached_of(solo.post(route, {**body, **fields})["rekindle"])

    assert n_cached(cache_prompt=False) == 0
    assert n_cached() <= 3 * HEADER_TOKENS  # the template's own system prompt
    assert n_cached() > 80
    assert n_cached(cache_prompt=False) == 0


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("route", ASKED_ROUTES)
def test_cache_prompt_reaches_the_engine(solo: Client, route: str, *, is_streaming: bool) -> None:

    def again(**fields: Any) -> Answer:
        return ask(solo, route, f"{is_streaming} {route}", stream=is_streaming, **fields)

    cold = again(cache_prompt=False)
    assert cold.n_cached == 0
    kept = again(cache_prompt=True)
    assert kept.n_cached <= HEADER_TOKENS, "something was kept of a request that said no"
    for fields in ({"cache_prompt": True}, {"cache_prompt": None}, {}):
        warm = again(**fields)
        assert warm.n_cached == len(warm.prompt)
        assert warm.text == kept.text
    uncached = again(cache_prompt=False)
    assert uncached.n_cached == 0
    assert uncached.text == cold.text


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_no_cache_prompt_is_a_default_that_requests_override(
    uncached_by_default: Client, route: str, *, is_streaming: bool
) -> None:

    def again(**fields: Any) -> Answer:
        seed = f"{is_streaming} {route}"
        return ask(uncached_by_default, route, seed, stream=is_streaming, **fields)

    again()
    assert again().n_cached == 0
    assert again(cache_prompt=True).n_cached <= 2 * HEADER_TOKENS  # a tiny model's are short
    warm = again(cache_prompt=True)
    assert warm.n_cached == len(warm.prompt)
    assert again().n_cached == 0
    assert again(cache_prompt=None).n_cached == 0
    assert again(cache_prompt=True).n_cached == len(warm.prompt)


@pytest.mark.long
def test_every_source_of_a_prefix_is_named_and_the_reply_equals_the_cold_reply(
    embedded_model: Path, tmp_path: Path
) -> None:
    directory = ("--cache-dir", str(tmp_path))
    with serving(*directory) as (server, client):
        prompt = clear_prompt(client, "d12", 1100)
        n_reused = len(prompt)
        beginning = [*prompt[:600], *tokens_of(client, "another end", 40)]

        def again(**fields: Any) -> Answer:
            return client.complete(prompt, max_tokens=16, **fields)

        cold = again(cache_prompt=False)
        assert cold.spans == ()
        answers = [again(), again()]
        assert answers[0].n_cached == 0
        assert answers[1].spans == (Span("live", 0, n_reused),)
        take_the_slot(client, "d12 stranger")
        answers.append(again())
        assert answers[2].spans == (Span("memory", 0, n_reused),)
        client.complete(beginning, max_tokens=1)
        answers.append(again())
        assert answers[3].spans == (Span("live", 0, 512), Span("memory", 512, n_reused))
        kill(server, client)
    with serving(*directory) as (server, client):
        client.complete(beginning[:300], max_tokens=1)
        answers.append(again())
        assert answers[4].spans == (
            Span("live", 0, 256),
            Span("memory", 256, 512),
            Span("disk", 512, n_reused),
        )
        kill(server, client)
    with serving(*directory) as (_, client):
        answers.append(again())
        assert answers[5].spans == (Span("disk", 0, n_reused),)
    assert [answer.text for answer in answers] == [cold.text] * 6


def test_a_prompt_that_starts_with_the_live_tokens_computes_the_rest(solo: Client) -> None:
    first = solo.complete(tokens_of(solo, "d2", 200))
    more = tokens_of(solo, "d2 goes on", 30)
    second = solo.complete([*first.computed, *more])
    assert second.n_prefilled == len(more)
    assert second.sources == {"live"}


@pytest.mark.long
def test_a_long_conversation_is_restored_from_memory_and_from_disk(
    embedded_model: Path, tmp_path: Path
) -> None:
    """46 MB of rows."""
    assert_comes_back_whole(("--cache-dir", str(tmp_path)), n_tokens=2000)


@pytest.mark.parametrize("n_tokens", [2000, pytest.param(12_288, marks=pytest.mark.long)])
def test_a_long_prefix_is_restored_from_disk(
    tiny_models: TinyModels, tmp_path: Path, n_tokens: int
) -> None:
    """12,288 is the contract's own number. Tiny models compute faster than anyone can load."""
    model = str(tiny_models(TinyArchitecture.LLAMA))
    settings = (model, "--cache-dir", str(tmp_path), "--no-cache-recompute")
    assert_comes_back_whole(settings, n_tokens)


def assert_comes_back_whole(settings: tuple[str, ...], n_tokens: int) -> None:
    with serving(*settings) as (server, client):
        prompt = tokens_of(client, f"of {n_tokens}", n_tokens)[:n_tokens]
        assert len(prompt) == n_tokens
        first = client.complete(prompt)
        take_the_slot(client, "d6 stranger")
        returning = [*first.computed, *tokens_of(client, "d6 returns", 20)]
        second = client.complete(returning)
        assert second.n_cached == len(first.computed)
        assert second.sources == {"memory"}
        kill(server, client)
    with serving(*settings) as (_, client):
        third = client.complete([*second.computed, *tokens_of(client, "d6 third", 20)])
        assert third.n_cached == len(second.computed)
        assert third.sources == {"disk"}


@pytest.mark.parametrize("is_interrupted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_tool_result_resumes_right_behind_the_call(solo: Client, *, is_interrupted: bool) -> None:
    name = f"a caller of tools, interrupted: {is_interrupted}"
    history: list[Message] = [system(name, 150), user(prose(name, 40))]
    last = solo.chat(history, tools=[SEARCH_TOOL])
    for number in range(3):
        if is_interrupted:
            take_the_slot(solo, f"d5 stranger {number}")
        # The last call comes without a text of its own, as most calls do.
        text = last.text if number < 2 else None
        history += tool_round(text, f"call_{number}", prose(f"{number}", 3), listing(name, 2))
        answer = solo.chat(history, tools=[SEARCH_TOOL])
        assert answer.n_cached >= len(last.prompt)
        assert answer.n_cached == n_common(last.computed, answer.prompt)
        last = answer


@pytest.mark.long
def test_changes_to_later_history_do_not_hide_the_stored_prefix(
    embedded_model: Path, tmp_path: Path
) -> None:
    directory = ("--cache-dir", str(tmp_path))
    history = [system("a keeper of history", 150), user(prose("d7", 60))]
    with serving(*directory) as (server, client):
        first = client.chat(history)
        history += tool_round(first.text, "call_0", "keeper", listing("d7", 6))
        stored = client.chat(history)
        kill(server, client)
    with serving(*directory) as (_, client):
        respaced = client.chat([*history[:2], respace_arguments(history[2]), *history[3:]])
        assert respaced.sources == {"disk"}
        assert respaced.n_cached == n_common(stored.computed, respaced.prompt)
        assert len(first.prompt) <= respaced.n_cached < len(stored.prompt) - 1
        later = [assistant(stored.text), user(prose("d7 grows", 30)), assistant("Yes."), user("?")]
        grown = client.chat([*history, *later])
        assert grown.n_cached == n_common(stored.computed, grown.prompt)
        assert grown.n_cached >= len(stored.prompt)


def respace_arguments(turn: Message) -> Message:
    """As clients do that parse a call and write it again."""
    [call] = turn["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return {
        **turn,
        "tool_calls": [{**call, "function": {"name": "search", "arguments": arguments}}],
    }


def test_restoring_removes_nothing(solo: Client) -> None:
    prompts = [tokens_of(solo, f"l3 {n}", 300) for n in range(2)]
    for prompt in prompts:
        solo.complete(prompt, max_tokens=1)
    solo.wait_until_saved()
    n_entries = solo.metric("rekindle_cache_entries", tier="memory")
    for _ in range(3):
        for prompt in prompts:
            answer = solo.complete(prompt, max_tokens=1)
            assert answer.n_prefilled == 0
            assert answer.sources == {"memory"}
    assert solo.metric("rekindle_cache_entries", tier="memory") == n_entries
    assert solo.metric("rekindle_cache_evictions_total") == 0


def test_a_turn_writes_only_its_new_rows(tiny_models: TinyModels) -> None:
    with serving(str(tiny_models(TinyArchitecture.LLAMA)), "--no-cache-recompute") as (_, client):
        first = client.complete(tokens_of(client, "x8", 700))
        client.wait_until_on_disk()
        n_first_bytes = client.metric("rekindle_cache_written_bytes_total")
        bytes_per_token = n_first_bytes / len(first.computed)
        second = client.complete([*first.computed, *tokens_of(client, "x8 goes on", 100)])
        client.wait_until_on_disk()
        n_second_bytes = client.metric("rekindle_cache_written_bytes_total") - n_first_bytes
        # The block that the first turn left unfinished is written again, whole ones are not.
        n_new = len(second.computed) - len(first.computed) // BLOCK * BLOCK
        assert 0 < n_second_bytes <= 1.02 * n_new * bytes_per_token


@pytest.mark.long
def test_a_prompt_refused_by_the_write_budget_is_still_answered(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Two blocks of 5.9 MB fit, then the end of the prompt would, without what leads to it."""
    settings = ("--cache-dir", str(tmp_path), "--cache-write-budget", "13500000")
    with serving(*settings) as (server, client):
        prompt = clear_prompt(client, "x8 budget", 3 * BLOCK + 50)
        cold = client.complete(prompt, cache_prompt=False)
        assert client.complete(prompt).text == cold.text
        take_the_slot(client, "x8 stranger")
        again = client.complete(prompt)
        assert again.text == cold.text
        assert again.n_cached == len(prompt)
        assert client.metric("rekindle_cache_writes_refused_total") > 0
        server.stop()
    with serving(*settings) as (_, client):
        assert client.metric("rekindle_cache_entries", tier="disk") == 2
        assert client.metric("rekindle_cache_bytes", tier="disk") <= 13_500_000
        after = client.complete(prompt)
        assert after.spans == (Span("disk", 0, 2 * BLOCK),)
        assert after.text == cold.text


def test_a_prefix_of_the_minimum_length_is_written_with_all_its_ancestors(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = str(tiny_models(TinyArchitecture.LLAMA))
    settings = (
        model,
        "--no-cache-recompute",
        "--cache-dir",
        str(tmp_path),
        "--cache-min-tokens",
        "600",
    )
    with serving(*settings) as (server, client):
        long = client.complete(tokens_of(client, "d8 long", 700)[:700])
        short = tokens_of(client, "d8 short", 400)[:400]
        client.complete(short)
        server.stop()
    with serving(*settings) as (_, client):
        assert client.complete(long.prompt).n_prefilled == 0
        assert client.complete(short).n_cached < HEADER_TOKENS


@pytest.mark.parametrize("is_streaming", [False, True])
@pytest.mark.parametrize("n_slots", [1, 4])
def test_n_replies_to_one_prompt_prefill_it_once(
    request: pytest.FixtureRequest, n_slots: int, *, is_streaming: bool
) -> None:
    client: Client = request.getfixturevalue("solo" if n_slots == 1 else "four")
    prompt = tokens_of(client, f"n replies {n_slots} {is_streaming}", 300)
    before = client.metric("rekindle_prompt_tokens_prefilled_total")
    stream = {"stream": is_streaming, "stream_options": {"include_usage": is_streaming}}
    reply = client.post(
        "/v1/completions", {"prompt": prompt, "n": 3, "temperature": 1, "seed": 1, **stream}
    )
    stories = reply["rekindle"]["replies"]
    prefilled = sorted(story["prefilled"] for story in stories)
    assert prefilled[:2] == [0, 0]
    assert prefilled[2] >= len(prompt) - HEADER_TOKENS
    assert client.metric("rekindle_prompt_tokens_prefilled_total") - before == sum(prefilled)
    assert reply["timings"]["prompt_n"] == sum(prefilled)
    assert reply["timings"]["cache_n"] == 3 * len(prompt) - sum(prefilled)
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - prefilled[2]
    assert len({choice["text"] for choice in reply["choices"]}) == 3


def test_streamed_and_unstreamed_replies_report_the_same_numbers(solo: Client) -> None:
    first = solo.complete(tokens_of(solo, "numbers", 300))
    body = {"prompt": [*first.computed, *tokens_of(solo, "numbers go on", 20)]}
    solo.post("/v1/completions", body)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    replies = [
        solo.post("/v1/completions", {**body, **more}) for more in ({}, usage, {"stream": True})
    ]
    for reply in replies:
        assert_numbers_agree(reply, n_prompt=len(body["prompt"]))
        assert reply["rekindle"]["spans"] == replies[0]["rekindle"]["spans"]
        assert reply["timings"]["predicted_n"] == replies[0]["timings"]["predicted_n"]
    assert replies[1]["usage"] == replies[0]["usage"]
    assert "usage" not in replies[2]
