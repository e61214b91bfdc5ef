"""Sampling settings as vLLM names them."""

import json
import math
from typing import Any

import pytest

from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind, GrammarStart, Sampling, Trigger
from rekindle.vllm.sampling import check_grammar, sampling_fields

ENDS = frozenset({2, 0})


def fields(**settings: object) -> dict[str, object]:
    return sampling_fields(Sampling(**settings), max_tokens=9, end_tokens=ENDS)  # type: ignore[arg-type]


def test_each_setting_has_its_name_in_vllm() -> None:
    assert fields(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repeat_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        seed=11,
        logit_bias=((5, -math.inf), (6, 3.5)),
    ) == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "ignore_eos": False,
        "stop_token_ids": [0, 2],
        "logit_bias": {"5": -100.0, "6": 3.5},
        "seed": 11,
    }


def test_what_is_off_here_is_off_there() -> None:
    off = fields(temperature=-1.0, top_k=0, top_p=1.0, repeat_last_n=0, repeat_penalty=1.5)
    assert off["temperature"] == 0
    assert off["top_k"] == -1
    assert off["top_p"] == 1.0
    assert off["repetition_penalty"] == 1.0
    assert "seed" not in off
    assert fields(top_p=0.0)["top_k"] == 1


def test_a_reply_that_must_not_end_never_samples_an_end_token() -> None:
    endless = fields(ignore_eos=True)
    assert endless["logit_bias"] == {"0": -100.0, "2": -100.0}
    assert "stop_token_ids" not in endless


def test_json_has_no_infinity_in_it() -> None:
    json.dumps(fields(logit_bias=((1, math.inf), (2, -math.inf))), allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"typical_p": 0.9}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"samplers": ()}, "samplers"),
        ({"repeat_last_n": 128, "repeat_penalty": 1.1}, "repeat_last_n"),
    ],
)
def test_what_vllm_has_not_is_refused_by_its_name(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fields(**settings)
    assert refused.value.param == param


def test_a_window_for_penalties_that_are_off_is_no_matter() -> None:
    assert fields(repeat_last_n=128)["repetition_penalty"] == 1.0


@pytest.mark.parametrize(
    ("kind", "source", "sent"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', {"json": {"type": "object"}}),
        (GrammarKind.JSON_SCHEMA, "true", {"json": {}}),
        (GrammarKind.REGEX, "[0-9]+", {"regex": "[0-9]+"}),
        (GrammarKind.LARK, 'start: "a"', {"grammar": 'start: "a"'}),
        (GrammarKind.GBNF, 'root ::= "a"', {"grammar": 'root ::= "a"'}),
    ],
)
def test_grammars_are_vllms_structured_outputs(
    kind: GrammarKind, source: str, sent: dict[str, object]
) -> None:
    grammar = Grammar(kind, source)
    check_grammar(grammar)
    assert fields(grammar=grammar)["structured_outputs"] == sent


def test_a_grammar_that_waits_for_a_trigger_is_left_out() -> None:
    start = GrammarStart(triggers=(Trigger("<tool_call>"),))
    grammar = Grammar(GrammarKind.LARK, 'start: "a"', start)
    check_grammar(grammar)
    assert "structured_outputs" not in fields(grammar=grammar)


def test_a_grammar_inside_opened_reasoning_and_a_broken_schema_are_refused() -> None:
    quiet = GrammarStart(quiet=("<think>", "</think>"), begins_quiet=True)
    for grammar in (
        Grammar(GrammarKind.JSON_SCHEMA, "{}", quiet),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
    ):
        with pytest.raises(InvalidRequest):
            check_grammar(grammar)
