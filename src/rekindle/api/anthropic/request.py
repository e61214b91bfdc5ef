"""Conversion of a Messages request to `ReplyOptions` and to marks for the cache."""

from collections.abc import Iterator

from rekindle.api.anthropic.messages import n_messages_of
from rekindle.api.anthropic.schema import (
    CacheControl,
    ContentBlock,
    CountTokensRequest,
    MessagesFormat,
    MessagesRequest,
)
from rekindle.api.anthropic.tools import tool_choice_of
from rekindle.api.cache_controls import MAX_BREAKPOINTS, TTL_SECONDS, Mark, covered
from rekindle.api.requests.sampling import sampling_of
from rekindle.api.tools import check_grammar, json_grammar
from rekindle.chat.conversation import Conversation
from rekindle.chat.reply.events import ReplyOptions
from rekindle.errors import InvalidRequest
from rekindle.generation.request import Grammar, Sampling
from rekindle.generation.tokenizer import Tokenizer

DEFAULT_TTL = "5m"


def options_of(
    body: MessagesRequest, conversation: Conversation, defaults: Sampling, _tokenizer: Tokenizer
) -> ReplyOptions:
    tool_choice = tool_choice_of(body, conversation)
    grammar = _grammar(body)
    check_grammar(grammar, tool_choice, "output_config.format")
    return ReplyOptions(
        sampling=sampling_of(body, defaults, grammar),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        tool_choice=tool_choice,
        compare_with=body.diagnostics.previous_message_id if body.diagnostics else None,
    )


def marks_of(body: CountTokensRequest, conversation: Conversation) -> tuple[Mark, ...]:
    """List the marks in prompt order. A mark within a message covers the whole message."""
    n_before = len(conversation.messages) - sum(map(n_messages_of, body.messages))  # `system`
    placed = [(0, control) for control in _in_head(body)]
    placed += [
        (covered(conversation, n_before + n_messages), control)
        for n_messages, control in _in_messages(body)
    ]
    if len(placed) > MAX_BREAKPOINTS:
        raise InvalidRequest(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided."
            f" Found {len(placed)}.",
            "cache_control",
        )
    marks = [Mark(n, TTL_SECONDS[control.ttl or DEFAULT_TTL]) for n, control in placed]
    return tuple(sorted(marks, key=lambda mark: mark.n_messages or 0))


def _in_head(body: CountTokensRequest) -> Iterator[CacheControl]:
    for tool in body.tools or ():
        if tool.cache_control is not None:
            yield tool.cache_control
    for block in body.system if isinstance(body.system, list) else ():
        if block.cache_control is not None:
            yield block.cache_control


def _in_messages(body: CountTokensRequest) -> Iterator[tuple[int, CacheControl]]:
    """Yield each control with the number of messages that it covers, not counting `system`."""
    n_before = 0
    last: ContentBlock | None = None
    for entry in body.messages:
        n_after = n_before + n_messages_of(entry)
        n_results = 0
        for block in entry.content if isinstance(entry.content, list) else ():
            n_results += block.type == "tool_result"
            n_covered = n_before + n_results if block.type == "tool_result" else n_after
            for inner in block.content if isinstance(block.content, list) else ():
                if inner.cache_control is not None:
                    yield n_covered, inner.cache_control
            if block.cache_control is not None:
                yield n_covered, block.cache_control
        last = entry.content[-1] if isinstance(entry.content, list) and entry.content else None
        n_before = n_after
    # Anthropic: a control at the top level applies to the last block, unless it has one.
    if body.cache_control is not None and (last is None or last.cache_control is None):
        yield n_before, body.cache_control


def _grammar(body: MessagesRequest) -> Grammar | None:
    # The beta of structured outputs called the field `output_format`.
    wanted: MessagesFormat | None = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        wanted = body.output_config.format
    return json_grammar(wanted.type, wanted.json_schema, "output_config.format") if wanted else None
