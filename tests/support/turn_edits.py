"""Edits of a conversation, as clients make them between two requests."""

import json
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from tests.support.turn_bench import extended
from tests.support.turn_client import KWARGS, READ, WILD_WORDS, WORDS, WRITE, Chat, texts

EDITED = "Zyx"  # no other text holds it

Edit = Callable[[Chat, Conversation], Conversation]


def with_message(conversation: Conversation, index: int, *messages: Message) -> Conversation:
    before, after = conversation.messages[:index], conversation.messages[index + 1 :]
    return replace(conversation, messages=(*before, *messages, *after))


def some_message(chat: Chat, conversation: Conversation, role: Role | None = None) -> int | None:
    indexes = [i for i, m in enumerate(conversation.messages) if role in (None, m.role)]
    return chat.draw(st.sampled_from(indexes)) if indexes else None


def edit_part(chat: Chat, conversation: Conversation) -> Conversation:
    """A word more or less, in whatever part."""
    index = some_message(chat, conversation)
    assert index is not None
    message = conversation.messages[index]
    if not message.parts:
        return with_message(conversation, index, replace(message, parts=(Text(EDITED),)))
    place = chat.draw(st.integers(0, len(message.parts) - 1))
    parts = list(message.parts)
    match parts[place]:
        case ToolCall(_, _, source) as call:
            changed = json.loads(source)
            key = chat.draw(st.sampled_from([*sorted(changed), "more"]))
            changed[key] = EDITED if isinstance(changed.get(key), str) else 7
            parts[place] = replace(call, arguments_json=json.dumps(changed))
        case part:
            at = chat.draw(st.integers(0, len(part.text)))
            n_lost = chat.draw(st.integers(0, 3))
            added = chat.draw(st.sampled_from([EDITED, f" {EDITED}", ""]))
            text = part.text[:at] + added + part.text[at + n_lost :]
            parts[place] = replace(part, text=text)
    return with_message(conversation, index, replace(message, parts=tuple(parts)))


def edit_in_place(chat: Chat, conversation: Conversation) -> Conversation:
    """Edit a message; the text behind it keeps its offset."""
    index = some_message(chat, conversation)
    assert index is not None
    message = conversation.messages[index]
    match message.parts:
        case (Text(text) | Reasoning(text) | ToolResult(text=text) as first, *rest):
            edited = EDITED[: len(text)]
            changed = replace(first, text=text[: len(text) - len(edited)] + edited)
            message = replace(message, parts=(changed, *rest))
    return with_message(conversation, index, message)


def edit_calls(chat: Chat, conversation: Conversation) -> Conversation:
    """Truth values for numbers, which Python takes for the same."""

    def edited(part: Part) -> Part:
        if not isinstance(part, ToolCall):
            return part
        arguments = json.loads(part.arguments_json)
        return replace(part, arguments_json=json.dumps({**arguments, "line": True}))

    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = conversation.messages[index]
    parts = tuple(map(edited, message.parts))
    return with_message(conversation, index, replace(message, parts=parts))


def rename_call(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None or not (calls := conversation.messages[index].calls):
        return conversation
    message = conversation.messages[index]
    call = chat.draw(st.sampled_from(calls))
    other = replace(call, name="write" if call.name == "read" else "read")
    parts = tuple(other if part is call else part for part in message.parts)
    return with_message(conversation, index, replace(message, parts=parts))


def remove_call(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None or not (calls := conversation.messages[index].calls):
        return conversation
    message = conversation.messages[index]
    parts = tuple(part for part in message.parts if part is not calls[0])
    return with_message(conversation, index, replace(message, parts=parts))


def edit_reasoning(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = conversation.messages[index]
    rest = tuple(part for part in message.parts if not isinstance(part, Reasoning))
    thoughts: list[Part] = [Reasoning(EDITED), Text(f"<think>\n{EDITED}\n</think>\n\n")]
    thought = chat.draw(st.sampled_from(thoughts))
    return with_message(conversation, index, replace(message, parts=(thought, *rest)))


def drop_reasoning(chat: Chat, conversation: Conversation) -> Conversation:
    messages = tuple(
        replace(m, parts=tuple(part for part in m.parts if not isinstance(part, Reasoning)))
        for m in conversation.messages
    )
    return replace(conversation, messages=messages)


def remove_message(chat: Chat, conversation: Conversation) -> Conversation:
    if len(conversation.messages) < 3:
        return conversation
    index = some_message(chat, conversation)
    assert index is not None
    return with_message(conversation, index)


def swap_messages(chat: Chat, conversation: Conversation) -> Conversation:
    if len(conversation.messages) < 4:
        return conversation
    index = chat.draw(st.integers(1, len(conversation.messages) - 3))
    messages = list(conversation.messages)
    messages[index], messages[index + 2] = messages[index + 2], messages[index]
    return replace(conversation, messages=tuple(messages))


def repeat_reply(chat: Chat, conversation: Conversation) -> Conversation:
    """Repeat an earlier reply behind another message."""
    message = chat.sent_back(chat.draw(st.sampled_from(chat.exchanges)))
    return extended(
        conversation, message, Message(Role.USER, (Text(chat.draw(texts(WORDS, least=1))),))
    )


def replace_reply(chat: Chat, conversation: Conversation) -> Conversation:
    index = some_message(chat, conversation, Role.ASSISTANT)
    if index is None:
        return conversation
    message = chat.sent_back(chat.draw(st.sampled_from(chat.exchanges)))
    return with_message(conversation, index, message)


def swap_ids(chat: Chat, conversation: Conversation) -> Conversation:
    """All calls claim the id of one of them."""
    calls = [call for m in conversation.messages for call in m.calls]
    if not calls:
        return conversation
    one = chat.draw(st.sampled_from(calls)).id
    messages = tuple(
        replace(
            m, parts=tuple(replace(p, id=one) if isinstance(p, ToolCall) else p for p in m.parts)
        )
        for m in conversation.messages
    )
    return replace(conversation, messages=messages)


def change_tools(chat: Chat, conversation: Conversation) -> Conversation:
    return replace(conversation, tools=chat.draw(st.sampled_from([(), (READ,), (WRITE, READ)])))


def change_kwargs(chat: Chat, conversation: Conversation) -> Conversation:
    return replace(conversation, template_kwargs=chat.draw(KWARGS))


def change_system(chat: Chat, conversation: Conversation) -> Conversation:
    system = Message(Role.SYSTEM, (Text(chat.draw(texts(WILD_WORDS))),))
    rest = [m for m in conversation.messages if m.role is not Role.SYSTEM]
    return replace(conversation, messages=(system, *rest))


EDITS: tuple[Edit, ...] = (
    edit_part,
    edit_in_place,
    edit_in_place,
    edit_calls,
    edit_calls,
    rename_call,
    remove_call,
    edit_reasoning,
    edit_reasoning,
    drop_reasoning,
    remove_message,
    swap_messages,
    repeat_reply,
    replace_reply,
    swap_ids,
    change_tools,
    change_kwargs,
    change_system,
)
