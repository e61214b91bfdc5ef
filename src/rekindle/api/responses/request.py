"""Conversion of a request to a `Conversation` and `ReplyOptions`."""

from typing import Any

from rekindle.api.body import fault
from rekindle.api.cache_controls import Mark, covered, openai_marks
from rekindle.api.requests.reasoning import NO_EFFORT, limit_of
from rekindle.api.requests.sampling import sampling_of
from rekindle.api.responses.items import Read
from rekindle.api.responses.schema import CreateResponseRequest, ReasoningConfig
from rekindle.api.responses.tools import Toolbox, tool_choice_of
from rekindle.api.tools import check_grammar, json_grammar
from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.chat.reply.events import ReplyOptions
from rekindle.generation.request import Sampling
from rekindle.generation.tokenizer import Tokenizer

LOGPROBS = "message.output_text.logprobs"
UNTHINKING_EFFORTS = frozenset({"none", "minimal"})


def conversation_of(
    body: CreateResponseRequest, messages: tuple[Message, ...], toolbox: Toolbox
) -> Conversation:
    if not messages:
        raise fault("input", " is required.")
    if body.instructions:
        messages = (Message(Role.SYSTEM, (Text(body.instructions),)), *messages)
    return Conversation(
        messages=messages, tools=toolbox.tools, template_kwargs=_template_kwargs(body.reasoning)
    )


def marks_of(
    body: CreateResponseRequest, read: Read, conversation: Conversation
) -> tuple[Mark, ...]:
    n_before = len(conversation.messages) - len(read.messages)  # `instructions`
    breakpoints = [covered(conversation, n_before + each) for each in read.breakpoints]
    return openai_marks(body, breakpoints)


def reply_options(
    body: CreateResponseRequest, toolbox: Toolbox, defaults: Sampling, _tokenizer: Tokenizer
) -> ReplyOptions:
    wanted = body.text.format if body.text else None
    schema = wanted.json_schema if wanted and wanted.type == "json_schema" else None
    grammar = json_grammar(wanted.type if wanted else "text", schema, "text.format.schema")
    tool_choice = tool_choice_of(body, toolbox)
    check_grammar(grammar, tool_choice, "text.format")
    cache_options = body.prompt_cache_options
    wants_logprobs = body.top_logprobs or LOGPROBS in (body.include or ())
    return ReplyOptions(
        sampling=sampling_of(body, defaults, grammar),
        max_tokens=body.max_output_tokens,
        n_top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        tool_choice=tool_choice,
        compare_with=cache_options.comparison_response_id if cache_options else None,
    )


def reasoning_budget_of(reasoning: ReasoningConfig | None) -> int | None:
    """Return the budget that the client asks for. None: none."""
    if reasoning is None:
        return None
    return 0 if reasoning.effort == NO_EFFORT else limit_of(reasoning.max_tokens)


def _template_kwargs(reasoning: ReasoningConfig | None) -> dict[str, Any]:
    if reasoning is None or reasoning.effort is None:
        return {}
    kwargs: dict[str, Any] = {"reasoning_effort": reasoning.effort}
    if reasoning.effort in UNTHINKING_EFFORTS:
        kwargs["enable_thinking"] = False
    return kwargs
