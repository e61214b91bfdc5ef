"""Conversion of Ollama's options to `ReplyOptions`."""

from rekindle.api.ollama.schema import OllamaFields, OllamaOptions
from rekindle.api.requests.sampling import sampling_of, seeded
from rekindle.api.tools import json_grammar
from rekindle.chat.reply.events import ReplyOptions
from rekindle.config.choices import Overflow
from rekindle.generation.request import Grammar, Sampling
from rekindle.generation.tokenizer import Tokenizer


def options_of(body: OllamaFields, defaults: Sampling, _tokenizer: Tokenizer) -> ReplyOptions:
    options = body.options or OllamaOptions()
    sampling = sampling_of(options, defaults, _grammar(body))
    has_seed = options.seed is not None and options.seed >= 0
    return ReplyOptions(
        sampling=seeded(sampling, options.seed if has_seed else None),
        max_tokens=limit_of(body),
        stop=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        n_top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def limit_of(body: OllamaFields) -> int | None:
    """Return the most tokens of a reply. In Ollama, 0 and negative numbers mean no limit."""
    limit = body.options.num_predict if body.options else None
    return limit if limit is not None and limit > 0 else None


def overflow_of(body: OllamaFields) -> Overflow | None:
    if body.truncate is None:
        return None
    return Overflow.TRIM if body.truncate else Overflow.ERROR


def _grammar(body: OllamaFields) -> Grammar | None:
    if not body.format:
        return None
    if isinstance(body.format, str):
        return json_grammar("json_object", None, "format")
    return json_grammar("json_schema", body.format, "format")
