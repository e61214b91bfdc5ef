"""The fields of a Gemini request, what is refused, and how refusals look."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from rekindle.api.admission.keys import ApiKeys, Keys
from rekindle.chat.reply.events import FinishReason, ReplyOptions, ToolMode
from rekindle.generation.request import GrammarKind
from tests.api.client import client_of, post
from tests.api.fakes import HELLO, FakeResponder, Script, api_settings, calling, done
from tests.api.openai.test_streams import SCORED

ROOT = "/v1beta/models/any"
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]
TOOLS = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]


def send(
    responder: FakeResponder | None = None, *, verb: str = "generateContent", **fields: Any
) -> httpx.Response:
    return post(f"{ROOT}:{verb}", {"contents": CONTENTS, **fields}, responder)


def options(**fields: Any) -> ReplyOptions:
    responder = FakeResponder()
    reply = send(responder, **fields)
    assert reply.status_code == 200, reply.text
    return responder.started[-1].options


def configured(**config: Any) -> ReplyOptions:
    return options(generationConfig=config)


def test_the_configuration_is_honoured() -> None:
    found = configured(
        temperature=0,
        topP=0.5,
        topK=40.0,
        maxOutputTokens=7,
        stopSequences=["a", "b"],
        seed=2**32,
        presencePenalty=1,
        frequencyPenalty=-1,
        responseLogprobs=True,
        logprobs=3,
        thinkingConfig={"thinkingBudget": 99},
    )
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 40)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (1, -1, 1)
    assert (found.max_tokens, found.stop, found.n_top_logprobs) == (7, ("a", "b"), 3)
    assert found.reasoning_budget == 99


def test_what_a_client_leaves_out_has_the_servers_defaults() -> None:
    found = configured()
    assert (found.sampling.top_k, found.max_tokens, found.reasoning_budget) == (20, None, None)


def test_no_budget_turns_thinking_off_in_the_template() -> None:
    responder = FakeResponder()
    send(responder, generationConfig={"thinkingConfig": {"thinkingBudget": 0}})
    assert responder.conversations[-1].template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("config", "mode", "names"),
    [
        ({"mode": "AUTO"}, ToolMode.AUTO, ()),
        ({"mode": "ANY"}, ToolMode.REQUIRED, ()),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, ToolMode.REQUIRED, ("g",)),
        ({"mode": "NONE"}, ToolMode.NONE, ()),
        ({"mode": "VALIDATED", "allowed_function_names": ["f"]}, ToolMode.AUTO, ("f",)),
        ({}, ToolMode.AUTO, ()),
    ],
)
def test_tool_choice(config: dict[str, Any], mode: ToolMode, names: tuple[str, ...]) -> None:
    choice = options(tools=TOOLS, toolConfig={"functionCallingConfig": config}).tool_choice
    assert (choice.mode, choice.names) == (mode, names)


def test_tools_that_run_at_google_are_left_out_and_counted() -> None:
    async def run() -> tuple[FakeResponder, str]:
        responder = FakeResponder()
        async with client_of(responder) as client:
            body = {"contents": CONTENTS, "tools": [*TOOLS, {"google_search": {}}]}
            await client.post(f"{ROOT}:generateContent", json=body)
            return responder, (await client.get("/metrics")).text

    responder, metrics = asyncio.run(run())
    assert [tool.name for tool in responder.conversations[-1].tools] == ["f", "g"]
    assert 'rekindle_ignored_fields_total{field="tools.googleSearch"} 1' in metrics


@pytest.mark.parametrize(
    ("config", "kind", "source"),
    [
        ({"responseMimeType": "application/json"}, "json_schema", {"type": ["object", "array"]}),
        ({"responseSchema": {"type": "STRING"}}, "json_schema", {"type": "string"}),
        ({"responseJsonSchema": {"type": "number"}}, "json_schema", {"type": "number"}),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["a b", "c.d"]}},
            "regex",
            "(a\\ b|c\\.d)",
        ),
    ],
)
def test_a_reply_may_have_a_grammar(config: dict[str, Any], kind: str, source: Any) -> None:
    grammar = configured(**config).sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind(kind)
    written = grammar.source if kind == "regex" else json.loads(grammar.source)
    assert written == source


def test_text_needs_no_grammar() -> None:
    assert configured(responseMimeType="text/plain").sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"contents": None}, "`contents` is required"),
        ({"contents": [{"role": "robot", "parts": []}]}, "`contents.0.role` should be"),
        ({"generationConfig": {"topK": 1.5}}, "`generationConfig.topK` should be a valid integer"),
        ({"generation_config": {"top_p": 2}}, "`generation_config.top_p`"),
        ({"generationConfig": {"logprobs": 2}}, "requires `responseLogprobs`"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "only `TEXT` is supported"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseSchema.enum"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "no function to call"),
        (
            {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["x"]}}},
            "there is no function `x`",
        ),
        (
            {
                "tools": TOOLS,
                "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
                "generationConfig": {"responseMimeType": "application/json"},
            },
            "exclude each other",
        ),
    ],
)
def test_refusals_name_the_field_in_googles_shape(fields: dict[str, Any], words: str) -> None:
    reply = send(**fields)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error.keys() == {"code", "message", "status"}
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "status", "name"),
    [
        ("/v1beta/models/any:unknown", 405, "INVALID_ARGUMENT"),
        ("/v1beta/unknown", 404, "NOT_FOUND"),
        ("/v1/models/any:countTokens", 400, "INVALID_ARGUMENT"),
        ("/v1/cachedContents", 400, "INVALID_ARGUMENT"),
    ],
)
def test_every_error_below_googles_paths_has_their_shape(path: str, status: int, name: str) -> None:
    reply = post(path, {})
    assert reply.status_code == status
    assert reply.json()["error"]["status"] == name


@pytest.mark.parametrize("prefix", ["/v1beta", "/v1"])
@pytest.mark.parametrize("name", ["tiny", "owner/model", "qwen3:0.6b"])
def test_a_model_may_have_any_name(prefix: str, name: str) -> None:
    reply = post(f"{prefix}/models/{name}:generateContent", {"contents": CONTENTS})
    assert reply.json()["modelVersion"] == "tiny"


def test_several_candidates_count_their_prompt_once() -> None:
    script: Script = (*HELLO[:-1], done(3, n_reasoning=1))
    reply = send(FakeResponder(script), generationConfig={"candidateCount": 2}).json()
    assert [each["index"] for each in reply["candidates"]] == [0, 1]
    assert reply["usageMetadata"] == {
        "promptTokenCount": 10,
        "cachedContentTokenCount": 4,
        "candidatesTokenCount": 4,
        "thoughtsTokenCount": 2,
        "totalTokenCount": 16,
    }
    assert len(reply["rekindle"]["replies"]) == 2


def test_log_probabilities_have_ids_and_are_finite() -> None:
    config = {"responseLogprobs": True, "logprobs": 2}
    [candidate] = send(FakeResponder(SCORED), generationConfig=config).json()["candidates"]
    result = candidate["logprobsResult"]
    assert [each["tokenId"] for each in result["chosenCandidates"]] == [195, 169]
    assert result["chosenCandidates"][1]["logProbability"] == -9999
    assert [each["token"] for each in result["topCandidates"][1]["candidates"]] == ["A", "B"]
    assert candidate["avgLogprobs"] == (-0.5 - 9999) / 2


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.TOOL_CALLS, "STOP"), (FinishReason.LENGTH, "MAX_TOKENS")],
)
def test_finish_reasons(finish: FinishReason, reason: str) -> None:
    script = (*calling(0, "call_1", "f", '{"a": 1.0}'), done(finish=finish))
    [candidate] = send(FakeResponder(script)).json()["candidates"]
    assert candidate["finishReason"] == reason
    [part] = candidate["content"]["parts"]
    assert part == {"functionCall": {"id": "call_1", "name": "f", "args": {"a": 1.0}}}


def test_no_output_primes_the_prompt() -> None:
    responder = FakeResponder((done(0, finish=FinishReason.LENGTH),))
    send(responder, generationConfig={"maxOutputTokens": 0}, cacheKey="book")
    assert responder.started[-1].options.max_tokens == 0
    assert responder.started[-1].options.terms.name == "book"


def test_tokens_of_a_whole_request_are_counted() -> None:
    inner = {"contents": CONTENTS, "systemInstruction": {"parts": {"text": "ab"}}}
    whole = post(f"{ROOT}:countTokens", {"generateContentRequest": inner})
    assert whole.json() == {"totalTokens": len("[system]ab[user]hi")}


def test_a_lookup_knows_the_body_by_its_contents() -> None:
    reply = post("/v1/cache/lookup", {"contents": CONTENTS, "model": "models/tiny"})
    assert reply.json()["object"] == "cache.lookup"


def test_openai_clients_and_googles_read_the_models_at_the_same_path() -> None:
    async def run() -> list[dict[str, Any]]:
        async with client_of(FakeResponder()) as client:
            google = {"x-goog-api-client": "google-genai-sdk/3.3.0"}
            return [
                (await client.get(path, headers=headers)).json()
                for path in ("/v1/models", "/v1/models/tiny")
                for headers in ({}, google)
            ]

    openai_list, google_list, openai_one, google_one = asyncio.run(run())
    assert openai_list["data"][0]["id"] == openai_one["id"] == "tiny"
    assert google_list == {"models": [google_one]}
    assert google_one["name"] == "models/tiny"
    assert google_one["inputTokenLimit"] == 512


@pytest.mark.parametrize(
    ("query", "headers", "status"),
    [
        ("", {}, 401),
        ("", {"x-goog-api-key": "ann"}, 200),
        ("?key=ann", {}, 200),
        ("?alt=sse&key=%61nn", {}, 200),
        ("?key=bob", {}, 401),
        ("?keys=ann", {}, 401),
    ],
)
def test_googles_keys_count(
    query: str, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> httpx.Response:
        settings = api_settings(api_keys=("ann",))
        async with client_of(FakeResponder(), settings) as client:
            path = f"{ROOT}:streamGenerateContent{query}"
            return await client.post(path, json={"contents": CONTENTS}, headers=headers)

    with caplog.at_level(logging.DEBUG, logger="rekindle"):
        reply = asyncio.run(run())
    assert reply.status_code == status
    assert "ann" not in caplog.text
    if status == 401:
        assert reply.json()["error"]["status"] == "UNAUTHENTICATED"
    else:
        sse = "alt=sse" in query
        assert reply.headers["content-type"].startswith("text/event" if sse else "application/json")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1beta/models/tiny"])
def test_a_key_in_the_query_asks_for_googles_models(path: str) -> None:
    async def run() -> list[httpx.Response]:
        async with client_of(FakeResponder(), api_settings(api_keys=("ann",))) as client:
            return [await client.get(path, params={"key": key}) for key in ("ann", "bob")]

    admitted, refused = asyncio.run(run())
    model = admitted.json()
    assert model.get("models", [model])[0]["name"] == "models/tiny"
    assert refused.status_code == 401


def test_a_key_in_the_query_is_gone_behind_the_check() -> None:
    """Nothing behind the check can log it."""
    seen: list[tuple[bytes, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["query_string"], scope["rekindle.key_holder"].key))

    scope = {
        "type": "http",
        "path": "/v1beta/models",
        "query_string": b"alt=sse&key=ann&pageSize=5",
        "headers": [],
    }
    asyncio.run(ApiKeys(app, keys=Keys(("ann",)))(scope, None, None))  # type: ignore[arg-type]
    other = {**scope, "path": "/v1/cache", "query_string": b"key=ann", "headers": []}
    asyncio.run(ApiKeys(app, keys=Keys())(other, None, None))  # type: ignore[arg-type]
    assert seen == [(b"alt=sse&pageSize=5", "ann"), (b"key=ann", None)]
