"""The model's own chat template: a conversation in, guarded pieces of prompt text out.

The template came with a model file and is not trusted: it runs in a sandbox, with limits on time
and memory. Any error that it raises becomes an InvalidRequest: the template refused the
conversation.
"""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from jinja2 import TemplateSyntaxError

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.template.budget import MAX_SECONDS, Budget
from rekindle.chat.template.guard import SENTINEL_CLASS, Guard, PromptPiece
from rekindle.chat.template.json_text import Json, tojson
from rekindle.chat.template.sandbox import Sandbox
from rekindle.chat.template.traits import Traits, probe, reshape
from rekindle.errors import InvalidRequest, StartupError

# For models without a template.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MAX_SOURCE_CHARACTERS = 2**18  # published templates have up to 17,000; picked

Mark = Callable[[str], str]

_MAX_REASON = 1000  # characters of the reason that a template gives for a refusal; picked
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")  # Mistral's templates require it
_SENTINEL = re.compile(f"[{SENTINEL_CLASS}]")


class ChatTemplate:
    def __init__(self, source: str, *, bos_text: str, eos_text: str, guard: Guard) -> None:
        self.source = source
        self.guard = guard
        self._special_tokens = {"bos_token": bos_text, "eos_token": eos_text}
        self._environment = Sandbox(guard)
        self._call_format: CallFormat | None = None
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise StartupError(
                f"The chat template has {len(source):,} characters;"
                f" at most {MAX_SOURCE_CHARACTERS:,} are read."
            )
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise StartupError(
                f"The chat template does not parse: line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise StartupError(f"The chat template does not compile: {error}") from error
        with self._environment.bounded() as budget:  # one for all attempts
            self.traits = probe(partial(self._text, mark=str, add_generation_prompt=True))
        if budget.is_late:
            raise StartupError(
                f"The chat template takes more than {MAX_SECONDS:g} seconds to render a few words."
            )

    @property
    def digest(self) -> str:
        """Identifies the template together with the tokens that it may write."""
        parts = (self.source, *self._special_tokens.values())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def bounded(self) -> AbstractContextManager[Budget]:
        """Give all that this thread renders inside the block one budget."""
        return self._environment.bounded()

    def write_calls_as(self, call_format: CallFormat) -> None:
        """From now on, write calls in this format: the template itself writes none."""
        self._call_format = call_format

    def write_tools_as_text(self) -> None:
        """From now on, write tools, calls and results as plain text, in the generic form."""
        self.traits = replace(self.traits, tools=False)

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool
    ) -> tuple[PromptPiece, ...]:
        """Render the conversation. An open last message ends the prompt in any case."""
        try:
            sentinel = self.guard.sentinel(conversation, self.source)
            mark = partial(self.guard.mark, sentinel=sentinel)
            shaped = reshape(conversation, self.traits, self._call_format)
            if not conversation.continue_last:
                text = self._text(
                    shaped, self.traits, mark, add_generation_prompt=add_generation_prompt
                )
                return self.guard.pieces(text, sentinel)
            end = self.guard.sentinel(shaped, self.source, sentinel)
            left_open = _ending_in(end, shaped)
            closed = self._text(left_open, self.traits, mark, add_generation_prompt=False)
            text, found, _ = closed.rpartition(end)
            if not found:
                raise InvalidRequest(
                    "The chat template leaves no way to continue the last message."
                )
            return self.guard.pieces(text, sentinel)
        except RecursionError as error:
            raise InvalidRequest("The conversation holds JSON that is nested too deep.") from error

    def _text(
        self, conversation: Conversation, traits: Traits, mark: Mark, *, add_generation_prompt: bool
    ) -> str:
        context = self._context(conversation, traits, mark)
        try:
            with self._environment.bounded():
                return self._template.render(context, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # the template's code runs here, not ours
            reason = _SENTINEL.sub("", str(error)[:_MAX_REASON]) or type(error).__name__
            raise InvalidRequest(
                f"The chat template refused this conversation: {reason}"
            ) from error

    def _context(self, conversation: Conversation, traits: Traits, mark: Mark) -> dict[str, Json]:
        tools = [_parsed(tool.definition_json, mark) for tool in conversation.tools]
        ours = {
            **self._special_tokens,
            "messages": [_message(message, traits, mark) for message in conversation.messages],
            "tools": tools or (None if traits.null_tools else []),
            # Firefunction appends this to its text; other templates loop over `tools`.
            "functions": tojson(tools, indent=4) if tools else "",
        }
        theirs = {
            "documents": [_parsed(text, mark) for text in conversation.documents_json] or None,
            **{name: _marked(v, mark) for name, v in conversation.template_kwargs.items()},
        }
        reserved = {*ours, *self._environment.globals, "add_generation_prompt"}
        if taken := theirs.keys() & reserved:
            raise InvalidRequest(f"A template argument may not be called {min(taken)!r}.")
        return theirs | ours


def _message(message: Message, traits: Traits, mark: Mark) -> dict[str, Json]:
    fields: dict[str, Json] = {"role": str(message.role)}
    text = message.text
    calls = message.calls
    if message.name:
        fields["name"] = mark(message.name)
    if message.reasoning:
        fields[traits.reasoning_key] = mark(message.reasoning)
    if calls:
        fields["tool_calls"] = [_call(call, traits, mark) for call in calls]
    for result in message.parts:
        if isinstance(result, ToolResult):
            text = result.text
            fields["tool_call_id"] = mark(_call_id(result.call_id, traits))
            if result.name:
                fields["name"] = mark(result.name)
    if calls and not text and traits.null_content:
        fields["content"] = None
    elif traits.string_content:
        fields["content"] = mark(text)
    else:
        fields["content"] = [{"type": "text", "text": mark(text)}]
    return fields


def _call(call: ToolCall, traits: Traits, mark: Mark) -> dict[str, Json]:
    function = {"name": mark(call.name), "arguments": _arguments(call, traits, mark)}
    return {"id": mark(_call_id(call.id, traits)), "type": "function", "function": function}


def _call_id(call_id: str, traits: Traits) -> str:
    if not traits.short_call_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]


def _arguments(call: ToolCall, traits: Traits, mark: Mark) -> Json:
    source = call.arguments_json or "{}"
    if traits.mapped_arguments:
        try:
            arguments = json.loads(source)
        except ValueError:  # a model may write anything; the template decides
            return mark(source)
        if isinstance(arguments, dict):
            return _marked(arguments, mark)
    return mark(source)


def _ending_in(end: str, conversation: Conversation) -> Conversation:
    *before, last = conversation.messages
    *parts, open_part = last.parts or (Text(""),)
    if last.role is not Role.ASSISTANT or not isinstance(open_part, Text | Reasoning):
        raise InvalidRequest("Only an assistant message that ends in text can be continued.")
    open_part = replace(open_part, text=open_part.text + end)
    last = replace(last, parts=(*parts, open_part))
    return replace(conversation, messages=(*before, last))


def _parsed(source: str, mark: Mark) -> Json:
    try:
        return _marked(json.loads(source), mark)
    except ValueError as error:
        raise InvalidRequest(f"A tool or document is not valid JSON: {error}") from error


def _marked(value: Json, mark: Mark) -> Json:
    match value:
        case str():
            return mark(value)
        case dict():
            return {mark(key): _marked(item, mark) for key, item in value.items()}
        case list() | tuple():
            return [_marked(item, mark) for item in value]
        case _:
            return value
