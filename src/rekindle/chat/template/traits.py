"""The abilities of a chat template, found by probing, and conversations reshaped to fit it.

A trait is probed by rendering a tiny conversation of marker words and searching the output for
them. No template is recognised by its name.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    n_leading_systems,
)
from rekindle.chat.dialects.call_format import CallFormat
from rekindle.chat.template.toolless import describe_tools, quote_results, write_out_calls
from rekindle.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Abilities of a template. The defaults describe the most capable one."""

    string_content: bool = True  # otherwise a list of parts
    null_tools: bool = True  # None stands for no tools; otherwise []
    system: bool = True
    late_system: bool = True  # after the first user message
    consecutive_users: bool = True
    reasoning_key: str = "reasoning_content"
    tools: bool = True
    calls: bool = True
    results: bool = True
    short_call_ids: bool = False
    mapped_arguments: bool = True  # otherwise their JSON as one string
    null_content: bool = False  # None beside calls without text; otherwise ""
    split_calls: bool = False  # calls need a message of their own, or the text is omitted
    user_after_result: bool = True


Attempt = Callable[[Conversation, Traits], str]


def probe(attempt: Attempt) -> Traits:
    """Find the traits. `attempt` renders a conversation unchanged, or raises InvalidRequest."""

    def best(candidates: Iterable[Traits], conversation: Conversation) -> Traits | None:
        return next((t for t in candidates if _shows(attempt, conversation, t)), None)

    def shows(*messages: Message, tools: tuple[Tool, ...] = ()) -> bool:
        return _shows(attempt, Conversation(messages, tools), traits)

    flags = product((True, False), repeat=2)
    shapes = [Traits(string_content=a, null_tools=b) for a, b in flags]
    traits = best(shapes, Conversation((_USER,))) or Traits()
    traits = replace(
        traits,
        system=shows(_SYSTEM, _USER),
        late_system=shows(_SYSTEM, _USER, _ANSWER, _LATE_SYSTEM, _AGAIN),
        consecutive_users=shows(_USER, _AGAIN),
        tools=shows(_USER, tools=_TOOLS),
    )
    flags = product((False, True), repeat=3)
    forms = [
        replace(traits, short_call_ids=a, mapped_arguments=not b, null_content=c)
        for a, b, c in flags
    ]
    if form := best(forms, Conversation((_USER, _CALL, _RESULT), _TOOLS)):
        traits = form
        loop = (_RESULT, _ANSWER, _AGAIN)
        whole = shows(_USER, _TEXT_AND_CALL, *loop, tools=_TOOLS)
        split = shows(_USER, *_text_before_calls(_TEXT_AND_CALL), *loop, tools=_TOOLS)
        traits = replace(
            traits,
            split_calls=split and not whole,
            user_after_result=shows(_USER, _CALL, _RESULT, _AGAIN, tools=_TOOLS),
        )
    else:
        traits = replace(
            traits, calls=False, results=shows(_USER, _ANSWER, _RESULT, _AGAIN, tools=_TOOLS)
        )
    keys = [replace(traits, reasoning_key=key) for key in _REASONING_KEYS]
    return (
        best(keys, Conversation((_USER, _THOUGHT)))
        or best(keys, Conversation((_USER, _THOUGHT_AND_CALL, _RESULT), _TOOLS))
        or traits
    )


def _shows(attempt: Attempt, conversation: Conversation, traits: Traits) -> bool:
    try:
        rendered = attempt(conversation, traits)
    except InvalidRequest:
        return False
    # A mapping printed as Python's repr is not JSON: such a template needs a string.
    is_json = "'Wkey': 'Wvalue'" not in rendered
    return is_json and all(word in rendered for word in _MARKER.findall(repr(conversation)))


def reshape(
    conversation: Conversation, traits: Traits, call_format: CallFormat | None = None
) -> Conversation:
    """Return the conversation in a form that the template renders completely.

    `call_format`: how the model writes calls, if the template does not.
    """
    conversation = replace(conversation, messages=tuple(_one_result_each(conversation.messages)))
    if not traits.tools:
        conversation = describe_tools(conversation)
    # Our description asks for our form of calls, so past calls must have that form.
    if not (traits.tools and traits.calls):
        conversation = write_out_calls(conversation, call_format if traits.tools else None)
    if not (traits.tools and traits.results):
        conversation = quote_results(conversation)
    messages = _with_systems_placed(conversation.messages, traits)
    if traits.split_calls:
        messages = [part for message in messages for part in _text_before_calls(message)]
    if not traits.user_after_result:
        messages = _with_results_extended(messages)
    if not traits.consecutive_users:
        messages = _merged(messages, Role.USER)
    return replace(conversation, messages=tuple(messages))


def _one_result_each(messages: Iterable[Message]) -> Iterable[Message]:
    """Yield each result as a message of its own, with the name of the tool."""
    names: dict[str, str] = {}
    for message in messages:
        rest = tuple(part for part in message.parts if not isinstance(part, ToolResult))
        names |= {part.id: part.name for part in rest if isinstance(part, ToolCall)}
        for part in message.parts:
            if isinstance(part, ToolResult):
                named = replace(part, name=part.name or names.get(part.call_id))
                yield Message(Role.TOOL, (named,))
        if rest or rest == message.parts:
            yield replace(message, parts=rest)


def _with_systems_placed(messages: Iterable[Message], traits: Traits) -> list[Message]:
    remaining = list(messages)
    n_leading = n_leading_systems(remaining)
    leading = _merged(remaining[:n_leading], Role.SYSTEM)
    late = remaining[n_leading:]
    if not traits.late_system:
        late = [_as_user(message) for message in late]
    if traits.system or not leading:
        return leading + late
    # Join the system text to a user message that follows directly, or send it alone.
    return _merged([_as_user(leading[0]), *late[:1]], Role.USER) + late[1:]


def _text_before_calls(message: Message) -> Iterable[Message]:
    """Split a message with text and calls in two: the template would omit the text."""
    calls = message.calls
    if not calls or not message.text:
        return (message,)
    said = tuple(part for part in message.parts if not isinstance(part, ToolCall))
    return replace(message, parts=said), replace(message, parts=calls)


def _with_results_extended(messages: Iterable[Message]) -> list[Message]:
    """Append a user message right after a tool result to that result."""
    shaped: list[Message] = []
    for message in messages:
        last = shaped[-1].parts if shaped else ()
        if message.role is Role.USER and last and isinstance(result := last[-1], ToolResult):
            extended = replace(result, text=_joined(result.text, message.text))
            shaped[-1] = replace(shaped[-1], parts=(*last[:-1], extended))
        else:
            shaped.append(message)
    return shaped


def _merged(messages: Iterable[Message], role: Role) -> list[Message]:
    """Join neighbouring messages of this role, with a blank line between their texts."""
    shaped: list[Message] = []
    for message in messages:
        if shaped and message.role is role and shaped[-1].role is role:
            text = _joined(shaped[-1].text, message.text)
            shaped[-1] = replace(shaped[-1], parts=(Text(text),))
        else:
            shaped.append(message)
    return shaped


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first + second


def _as_user(message: Message) -> Message:
    return replace(message, role=Role.USER) if message.role is Role.SYSTEM else message


_USER = Message(Role.USER, (Text("Wuser"),))
_AGAIN = Message(Role.USER, (Text("Wagain"),))
_SYSTEM = Message(Role.SYSTEM, (Text("Wsystem"),))
_LATE_SYSTEM = Message(Role.SYSTEM, (Text("Wlate"),))
_ANSWER = Message(Role.ASSISTANT, (Text("Wanswer"),))
_THOUGHT = Message(Role.ASSISTANT, (Reasoning("Wreasoning"), Text("Wanswer")))
_CALL = Message(Role.ASSISTANT, (ToolCall("call_12345678", "Wtool", '{"Wkey": "Wvalue"}'),))
_TEXT_AND_CALL = replace(_CALL, parts=(Text("Wtext"), *_CALL.parts))
_THOUGHT_AND_CALL = replace(_CALL, parts=(Reasoning("Wreasoning"), *_CALL.parts))
_RESULT = Message(Role.TOOL, (ToolResult("call_12345678", "Wtool", "Wresult"),))
_TOOLS = (
    Tool(
        "Wtool",
        '{"type": "function", "function": {"name": "Wtool", "description": "a tool", "parameters":'
        ' {"type": "object", "properties": {"key": {"type": "string", "description": "a key"}}}}}',
    ),
)
_MARKER = re.compile(r"\bW[a-z]+")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
