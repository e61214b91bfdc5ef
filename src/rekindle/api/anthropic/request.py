"""From a Messages request to `ReplyOptions`, and to the breakpoint that its usage is counted by."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rekindle.api.anthropic.schema import (
    CacheControl,
    CountTokensRequest,
    MessagesFormat,
    MessagesRequest,
)
from rekindle.api.anthropic.tools import tool_choice_of
from rekindle.chat.conversation import Conversation
from rekindle.chat.prompt import Prompt
from rekindle.chat.reply import ReplyOptions, ToolMode
from rekindle.errors import InvalidRequest
from rekindle.generation import Grammar, GrammarKind, Sampling


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The last place in the prompt up to which the client wants it kept."""

    position: int  # in tokens
    ttl: Literal["5m", "1h"]


def options_of(
    body: MessagesRequest,
    conversation: Conversation,
    defaults: Sampling,
    *,
    default_cache_prompt: bool,
) -> ReplyOptions:
    tool_choice = tool_choice_of(body, conversation)
    grammar = _grammar(body)
    if grammar is not None and tool_choice.mode is ToolMode.REQUIRED:
        raise InvalidRequest(
            "`tool_choice` that requires a call and `output_config.format` exclude each other.",
            "tool_choice",
        )
    sampling = replace(
        defaults,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else max(body.top_k, 0),
        grammar=grammar,
    )
    return ReplyOptions(
        sampling=sampling,
        max_tokens=0 if body.prefill else body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        cache_prompt=default_cache_prompt if body.cache_prompt is None else body.cache_prompt,
        tool_choice=tool_choice,
    )


def breakpoint_of(body: CountTokensRequest, prompt: Prompt) -> Breakpoint | None:
    """About: in the messages it counts as the end of the prompt."""
    in_messages = list(_in_messages(body))
    if in_messages:
        return Breakpoint(len(prompt.tokens), in_messages[-1].ttl or "5m")
    if in_head := list(_in_head(body)):
        # The first boundary is behind system and tools, if the template can be cut there.
        position = prompt.boundaries[0] if prompt.boundaries else len(prompt.tokens)
        return Breakpoint(position, in_head[-1].ttl or "5m")
    return None


def _in_head(body: CountTokensRequest) -> Iterator[CacheControl]:
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield tool.cache_control
    for block in body.system if isinstance(body.system, list) else ():
        if block.cache_control is not None:
            yield block.cache_control


def _in_messages(body: CountTokensRequest) -> Iterator[CacheControl]:
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            for inner in block.content if isinstance(block.content, list) else ():
                if inner.cache_control is not None:
                    yield inner.cache_control
            if block.cache_control is not None:
                yield block.cache_control
    if body.cache_control is not None:  # Anthropic: stands for one on the last block
        yield body.cache_control


def _grammar(body: MessagesRequest) -> Grammar | None:
    # `output_format` is what the beta of structured outputs called it.
    wanted: MessagesFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        wanted = body.output_config.format
    if wanted is None:
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted.json_schema))
