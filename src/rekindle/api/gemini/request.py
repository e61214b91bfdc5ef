"""Conversion of a Gemini request to `ReplyOptions`."""

import re

from rekindle.api.body import fault
from rekindle.api.gemini.openapi_schema import json_schema_of
from rekindle.api.gemini.schema import GenerateContentRequest, GenerationConfig, ToolConfig
from rekindle.api.gemini.tools import CHOICE, tool_choice_of
from rekindle.api.requests.sampling import sampling_of, seeded
from rekindle.api.tools import check_grammar, json_grammar
from rekindle.chat.conversation import Conversation
from rekindle.chat.reply.events import ReplyOptions
from rekindle.generation.request import Grammar, GrammarKind, Sampling
from rekindle.generation.tokenizer import Tokenizer

ENUM = "text/x.enum"
ANY_JSON = {"type": ["object", "array"]}
SCHEMA = "generationConfig.responseSchema"


def options_of(
    body: GenerateContentRequest,
    tool_config: ToolConfig | None,
    conversation: Conversation,
    defaults: Sampling,
    _tokenizer: Tokenizer,
) -> ReplyOptions:
    """Make the options. `tool_config`: of the request, or of its cached content."""
    config = body.config
    if config.logprobs is not None and not config.response_logprobs:
        raise fault("generationConfig.logprobs", " requires `responseLogprobs` to be true.")
    for kind in config.response_modalities or ():
        if kind.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise fault("generationConfig.responseModalities", ": only `TEXT` is supported.")
    tool_choice = tool_choice_of(tool_config, conversation.tools)
    grammar = _grammar(config)
    check_grammar(grammar, tool_choice, "generationConfig.responseMimeType", f"{CHOICE}.mode")
    return ReplyOptions(
        sampling=seeded(sampling_of(config, defaults, grammar), config.seed),
        max_tokens=config.max_output_tokens,
        stop=tuple(config.stop_sequences or ()),
        n_top_logprobs=(config.logprobs or 0) if config.response_logprobs else None,
        tool_choice=tool_choice,
    )


def no_tokens(defaults: Sampling, _tokenizer: Tokenizer) -> ReplyOptions:
    """Evaluate the prompt alone."""
    return ReplyOptions(sampling=defaults, max_tokens=0)


def _grammar(config: GenerationConfig) -> Grammar | None:
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema_of(config.response_schema, is_closed=True)
    if config.response_mime_type == ENUM:
        return _one_of(schema.get("enum") if schema else None)
    if schema is None and config.response_mime_type != "application/json":
        return None
    return json_grammar("json_schema", schema or ANY_JSON, SCHEMA)


def _one_of(values: object) -> Grammar:
    """Make the grammar of a reply that is one of these texts, without quotes."""
    texts = values if isinstance(values, list) else []
    if not texts or not all(isinstance(each, str) and each for each in texts):
        raise fault(f"{SCHEMA}.enum", f" should be a list of texts, for `{ENUM}`.")
    pattern = "|".join(map(re.escape, texts))
    return Grammar(GrammarKind.REGEX, f"({pattern})", field=SCHEMA)
