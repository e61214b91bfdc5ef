"""Sampling settings as vLLM names them. Settings that vLLM does not have are refused."""

import json
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, GrammarKind, Sampling

MAX_BIAS = 100.0  # vLLM's limit; JSON has no infinity
# Each switches a sampler on that vLLM does not have.
_UNKNOWN_FIELDS = (
    "typical_p",
    "dynatemp_range",
    "top_n_sigma",
    "xtc_probability",
    "dry_multiplier",
    "mirostat",
    "samplers",
    "min_keep",
    "post_sampling_probs",
)
_GRAMMAR_FIELDS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "grammar",
    GrammarKind.GBNF: "grammar",
}


def sampling_fields(
    sampling: Sampling, *, max_tokens: int, end_tokens: Collection[int]
) -> dict[str, Any]:
    """Return fields for `/v1/completions` and `sampling_params` alike. Raises InvalidRequest."""
    _refuse_unknown(sampling)
    has_penalties = sampling.repeat_last_n != 0
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": max(sampling.temperature, 0.0),
        "top_k": _top_k(sampling),
        "top_p": sampling.top_p if 0 < sampling.top_p < 1 else 1.0,
        "min_p": min(max(sampling.min_p, 0.0), 1.0),
        "repetition_penalty": sampling.repeat_penalty if has_penalties else 1.0,
        "frequency_penalty": sampling.frequency_penalty if has_penalties else 0.0,
        "presence_penalty": sampling.presence_penalty if has_penalties else 0.0,
        "ignore_eos": sampling.ignore_eos,
    }
    bias = {token: min(max(value, -MAX_BIAS), MAX_BIAS) for token, value in sampling.logit_bias}
    if sampling.ignore_eos:  # otherwise vLLM would sample end tokens and continue
        bias |= dict.fromkeys(end_tokens, -MAX_BIAS)
    else:
        fields["stop_token_ids"] = sorted(end_tokens)
    if bias:
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.grammar is not None and is_enforced(sampling.grammar):
        fields["structured_outputs"] = _structured_outputs(sampling.grammar)
    return fields


def check_grammar(grammar: Grammar) -> None:
    """Check the grammar as far as possible without vLLM. Raises InvalidRequest."""
    if grammar.start.begins_quiet and is_enforced(grammar):
        raise InvalidRequest(
            "vLLM would apply this format to the reasoning that the prompt opens:"
            " switch the reasoning off.",
            "response_format",
        )
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        _structured_outputs(grammar)


def checked(grammar: Grammar) -> Future[None]:
    """Return a future that is done: None, or InvalidRequest."""
    future: Future[None] = Future()
    try:
        check_grammar(grammar)
        future.set_result(None)
    except InvalidRequest as error:
        future.set_exception(error)
    return future


def is_enforced(grammar: Grammar) -> bool:
    """Return whether vLLM can apply the grammar: from the first token, without a trigger."""
    return not grammar.start.triggers


def _refuse_unknown(sampling: Sampling) -> None:
    defaults = Sampling()
    for name in _UNKNOWN_FIELDS:
        if getattr(sampling, name) != getattr(defaults, name):
            raise InvalidRequest(f"`{name}` is not supported with vLLM.", name)
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if sampling.repeat_last_n not in (defaults.repeat_last_n, -1, 0) and penalties != (1, 0, 0):
        raise InvalidRequest(
            "vLLM penalises tokens of the whole context: `repeat_last_n` must be -1 or 0.",
            "repeat_last_n",
        )


def _top_k(sampling: Sampling) -> int:
    if sampling.top_p <= 0:  # only the most likely token
        return 1
    return sampling.top_k if sampling.top_k > 0 else -1


def _structured_outputs(grammar: Grammar) -> dict[str, Any]:
    source: Any = grammar.source
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"This JSON schema cannot be read: {error}", "response_format"
            ) from error
        if not isinstance(source, dict):  # `true` allows anything, but vLLM requires an object
            source = {}
    return {_GRAMMAR_FIELDS[grammar.kind]: source}
