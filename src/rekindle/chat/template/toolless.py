"""Tools for templates without tool support: definitions, calls and results become plain text.

The calls use the JSON-in-tags form that most instruction-tuned models have seen in training.
"""

import json
from contextlib import suppress
from dataclasses import replace

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Role,
    Text,
    Tool,
    ToolCall,
)
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.dialects.writing import calls_text


def describe_tools(conversation: Conversation) -> Conversation:
    """Move the definitions into the system message."""
    if not conversation.tools:
        return conversation
    instructions = _instructions(conversation.tools)
    messages = conversation.messages
    if messages and messages[0].role is Role.SYSTEM:
        system, messages = messages[0], messages[1:]
        system = replace(system, parts=(*system.parts, Text(f"\n{instructions}")))
    else:
        system = Message(Role.SYSTEM, (Text(instructions),))
    return replace(conversation, messages=(system, *messages), tools=())


def write_out_calls(
    conversation: Conversation, call_format: CallFormat | None = None
) -> Conversation:
    """Turn calls into text of the assistant message. None: in the form that we describe."""
    messages = tuple(_with_calls_as_text(each, call_format) for each in conversation.messages)
    return replace(conversation, messages=messages)


def quote_results(conversation: Conversation) -> Conversation:
    """Turn results into user messages. The results of one turn share one message."""
    messages: list[Message] = []
    after_result = False
    for message in conversation.messages:
        quoted = [f"<tool_response>\n{each.text}\n</tool_response>" for each in message.results]
        if not quoted:
            messages.append(message)
        elif after_result:
            text = "\n".join([messages[-1].text, *quoted])
            messages[-1] = Message(Role.USER, (Text(text),))
        else:
            messages.append(Message(Role.USER, (Text("\n".join(quoted)),)))
        after_result = bool(quoted)
    return replace(conversation, messages=tuple(messages))


def _with_calls_as_text(message: Message, call_format: CallFormat | None) -> Message:
    if call_format is not None and message.calls:
        with suppress(ValueError):  # a model may write anything
            rest = [part for part in message.parts if not isinstance(part, ToolCall)]
            text = Text(calls_text(call_format, message.calls))
            return replace(message, parts=(*rest, text))
    parts = (Text(_call(part)) if isinstance(part, ToolCall) else part for part in message.parts)
    return replace(message, parts=tuple(parts))


def _call(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    arguments = call.arguments_json or "{}"
    return f'<tool_call>{{"name": {name}, "arguments": {arguments}}}</tool_call>'


def _instructions(tools: tuple[Tool, ...]) -> str:
    definitions = "\n".join(tool.definition_json for tool in tools)
    return (
        "You can call these tools, one JSON definition per line:\n"
        f"<tools>\n{definitions}\n</tools>\n\n"
        "To call a tool, answer with a line of this form, and nothing after the last one:\n"
        '<tool_call>{"name": "the tool", "arguments": {"its": "arguments"}}</tool_call>\n'
        "The result comes back between <tool_response> and </tool_response>."
    )
