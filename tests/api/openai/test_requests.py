"""What reaches `chat`: options, seeds, prompts."""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rekindle.chat.reply.events import ReplyOptions
from rekindle.generation.request import Grammar, GrammarKind, SamplerName, Sampling
from tests.api.client import USER, chat, complete, post
from tests.api.fakes import FakeResponder


def options_of(**fields: Any) -> ReplyOptions:
    responder = FakeResponder()
    assert chat(responder, **fields).status_code == 200
    return responder.started[0].options


def test_request_without_settings_gets_the_models_defaults() -> None:
    plain = ReplyOptions(sampling=FakeResponder().default_sampling)
    assert dataclasses.replace(options_of(), reply_id=None, terms=plain.terms) == plain


def test_every_sampling_field_arrives() -> None:
    wanted = Sampling(
        temperature=0.0,
        dynatemp_range=0.25,
        dynatemp_exponent=2.0,
        top_k=7,
        top_p=0.5,
        min_p=0.1,
        top_n_sigma=2.0,
        typical_p=0.9,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        repeat_penalty=1.1,
        repeat_last_n=-1,
        frequency_penalty=0.2,
        presence_penalty=-0.3,
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=-1,
        dry_sequence_breakers=("\n", "."),
        mirostat=2,
        mirostat_tau=4.0,
        mirostat_eta=0.2,
        adaptive_target=0.4,
        adaptive_decay=0.8,
        samplers=(SamplerName.TOP_K, SamplerName.TEMPERATURE),
        min_keep=2,
        post_sampling_probs=True,
        seed=42,
        ignore_eos=True,
    )
    others = {"logit_bias", "grammar", "reasoning_limit"}
    names = {field.name for field in dataclasses.fields(Sampling)} - others
    assert not [name for name in names if getattr(wanted, name) == getattr(Sampling(), name)]
    assert options_of(**{name: getattr(wanted, name) for name in names}).sampling == wanted


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"top_p": 1.5, "min_p": -1}, {"top_p": 1.0, "min_p": 0.0}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"xtc_probability": 2, "xtc_threshold": -1}, {"xtc_probability": 1, "xtc_threshold": 0}),
        ({"mirostat": 7}, {"mirostat": 2}),
        ({"dry_base": 0.5}, {"dry_base": 1.75}),
        ({"presence_penalty": 3}, {"presence_penalty": 3.0}),
        ({"frequency_penalty": -1e300}, {"frequency_penalty": -1e30}),
    ],
)
def test_values_beyond_llama_servers_bounds_are_moved_to_them(
    sent: dict[str, Any], kept: dict[str, Any]
) -> None:
    sampling = options_of(**sent).sampling
    assert {name: getattr(sampling, name) for name in kept} == kept


@pytest.mark.parametrize(
    "samplers",
    [
        "pmtx?",
        ["top_p", "min_p", "temperature", "xtc"],
        ["TOP-P", "minp", "temp", "xtc", "unknown"],
        ["nucleus", "min-p", "Temperature", "XTC"],
    ],
)
def test_samplers_have_llama_servers_names_and_letters(samplers: object) -> None:
    names = SamplerName.TOP_P, SamplerName.MIN_P, SamplerName.TEMPERATURE, SamplerName.XTC
    assert options_of(samplers=samplers).sampling.samplers == names


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.GBNF, 'root ::= "a"', field="grammar")),
        (
            {"json_schema": {}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', field="json_schema"),
        ),
        ({"grammar": "", "json_schema": {}}, None),
    ],
)
def test_grammar_or_json_schema_as_in_llama_server(
    fields: dict[str, Any], grammar: Grammar | None
) -> None:
    assert options_of(**fields).sampling.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 128_000}, 128_000),
        ({"n_predict": 5}, 5),
        ({"max_tokens": 9, "n_predict": 5}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
    ],
)
def test_max_tokens_by_any_name(fields: dict[str, Any], expected: int | None) -> None:
    assert options_of(**fields).max_tokens == expected


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(None, None), (-1, None), (0, 0), (2**32 - 2, 2**32 - 2), (2**100, 2**100 % (2**32 - 1))],
)
def test_seed_fits_llama_cpp_and_never_means_random(seed: int | None, expected: int | None) -> None:
    assert options_of(seed=seed).sampling.seed == expected


def test_replies_to_one_prompt_have_seeds_of_their_own() -> None:
    responder = FakeResponder()
    chat(responder, n=3, seed=2**32 - 3)
    seeds = [started.options.sampling.seed for started in responder.started]
    assert seeds == [2**32 - 3, 2**32 - 2, 0]
    assert len({started.request_id for started in responder.started}) == 3


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ({"5": 1, "6": -100}, ((5, 1.0), (6, -100.0))),
        ({"5": False}, ((5, -math.inf),)),
        ([[5, 1.5], [6, False]], ((5, 1.5), (6, -math.inf))),
        ({"ab": -2, "b": 1, "97": 0.5}, ((97, -1.5), (98, -1.0))),
        (
            [["ab", False], ["97", 3], [98, 5]],
            ((97, -math.inf), (98, -math.inf), (57, 3.0), (55, 3.0)),
        ),
        ({"": 1}, ()),
        ({}, ()),
    ],
)
def test_logit_bias_in_both_dialects(bias: object, expected: tuple[tuple[int, float], ...]) -> None:
    assert options_of(logit_bias=bias).sampling.logit_bias == expected


@pytest.mark.parametrize(
    ("stop", "expected"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())]
)
def test_stop_as_text_or_list(stop: object, expected: tuple[str, ...]) -> None:
    assert options_of(stop=stop).stop == expected


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": {"type": "array"}}, {"type": "array"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}},
            {"const": 1},
        ),
    ],
)
def test_response_format_becomes_a_grammar(response_format: object, schema: object) -> None:
    grammar = options_of(response_format=response_format).sampling.grammar
    if schema is None:
        assert grammar is None
    else:
        source, field = json.dumps(schema), "response_format.json_schema"
        assert grammar == Grammar(GrammarKind.JSON_SCHEMA, source, field=field)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"n_probs": 0}, None),
        ({"n_probs": 40}, 40),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert options_of(**fields).n_top_logprobs == expected


@pytest.mark.parametrize("post_to", [chat, complete])
@pytest.mark.parametrize(
    ("said", "default", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"cache_prompt": None}, False, False),
        ({"cache_prompt": True}, False, True),
        ({"cache_prompt": False}, True, False),
    ],
)
def test_cache_prompt_wins_over_the_servers_default(
    post_to: Callable[..., httpx.Response],
    said: dict[str, bool | None],
    default: bool,  # noqa: FBT001
    expected: bool,  # noqa: FBT001
) -> None:
    responder = FakeResponder()
    responder.default_cache_prompt = default
    assert post_to(responder, n=2, seed=1, **said).status_code == 200
    assert [each.options.cache_prompt for each in responder.started] == [expected] * 2


ROUTES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, True),
        ({"speculative": None}, True),
        ({"speculative": True}, True),
        ({"speculative": False}, False),
        ({"speculative.n_max": 16}, True),
        ({"speculative.n_max": 0}, False),
        ({"speculative": True, "speculative.n_max": 0}, True),
    ],
)
def test_every_wire_format_lets_a_request_forbid_drafts(
    path: str,
    said: dict[str, object],
    expected: bool,  # noqa: FBT001
) -> None:
    responder = FakeResponder()
    assert post(path, {**ROUTES[path], **said}, responder).status_code == 200
    assert [each.options.speculate for each in responder.started] == [expected]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"seed": 4}, False),
        ({"seed": -1}, True),
        ({"seed": None}, True),
        ({"seed": 4, "speculative": True}, True),
        ({"seed": 4, "speculative.n_max": 16}, False),
    ],
)
def test_a_reply_with_a_seed_is_not_drafted_unless_the_request_says_so(
    path: str,
    said: dict[str, object],
    expected: bool,  # noqa: FBT001
) -> None:
    """A batch with drafts rounds differently, and the same request would get another reply."""
    responder = FakeResponder()
    assert post(path, {**ROUTES[path], **said}, responder).status_code == 200
    assert [each.options.speculate for each in responder.started] == [expected]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculative", "off"),
        ("speculative", 0),
        ("speculative.n_max", "0"),
        ("speculative.n_max", -1),
    ],
)
def test_a_wrong_value_of_speculative_is_a_400_that_names_the_field(
    path: str, field: str, value: object
) -> None:
    reply = post(path, {**ROUTES[path], field: value})
    assert reply.status_code == 400
    assert f"`{field}`" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98]], [(97,), (98,)]),
    ],
)
def test_prompt_in_all_four_forms(prompt: object, tokens: list[tuple[int, ...]]) -> None:
    responder = FakeResponder()
    assert complete(responder, prompt=prompt).status_code == 200
    assert [started.prompt.tokens for started in responder.started] == tokens


def test_replies_to_several_prompts_come_prompt_by_prompt() -> None:
    responder = FakeResponder()
    reply = complete(responder, prompt=["a", "b"], n=2, echo=True).json()
    texts = [(choice["index"], choice["text"]) for choice in reply["choices"]]
    assert texts == [(0, "aHello"), (1, "aHello"), (2, "bHello"), (3, "bHello")]
    assert reply["usage"]["prompt_tokens"] == 20
    assert reply["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_endpoints_answer_with_and_without_the_prefix(prefix: str) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for path in ("/chat/completions", "/completions"):
        assert post(prefix + path, body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [], "audio": None, "grammar": "", "mirostat": 0},
        {"modalities": ["text"], "n": None, "stop": None, "tool_choice": None},
        {"model": "gpt-99", "user": "u", "store": False, "metadata": {"a": "b"}},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(fields: dict[str, Any]) -> None:
    reply = chat(**fields)
    assert reply.status_code == 200
    assert reply.json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 989}..."),
    ],
)
def test_what_cannot_be_served_is_the_clients_error(fields: dict[str, Any], param: str) -> None:
    response = chat(FakeResponder(), **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_more_replies_than_could_ever_wait_are_refused_not_put_off() -> None:
    response = complete(FakeResponder(), prompt=["hi"] * 69)
    assert response.status_code == 400
    assert "69 replies" in response.json()["error"]["message"]
