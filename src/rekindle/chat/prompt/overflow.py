"""Drops whole turns of a conversation that is too long, the oldest first, many at once.

A client sends the whole history again with every request. The cut is made as if the turns came
one by one: when they no longer fit, turns are dropped until half of the context is free. The
next request then drops the same turns, and the shortened prompt stays a stable prefix.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.chat.conversation import Conversation, Message, Role, n_leading_systems
from rekindle.chat.prompt.token_run import PieceTokenizer
from rekindle.chat.template.guard import PromptPiece

FULL_SHARE = 7 / 8  # of the context: the rest is for the reply; picked
KEPT_SHARE = 1 / 2
MESSAGE_TOKENS = 8  # estimate of what a template adds to each message


def trim(
    conversation: Conversation, *, n_ctx: int, n_head: int, size_of: Callable[[Message], int]
) -> Conversation:
    """Drop the oldest turns. System, tools (`n_head` tokens) and the last turn stay.

    If the last turn alone is too long, its oldest rounds of calls and results are dropped.
    """
    messages = conversation.messages
    n_leading = n_leading_systems(messages)
    turns = _grouped(
        messages[n_leading:],
        lambda message, before: message.role is Role.USER and before.role is not Role.USER,
    )
    full, kept = int(n_ctx * FULL_SHARE) - n_head, int(n_ctx * KEPT_SHARE) - n_head
    sizes = [sum(map(size_of, turn)) for turn in turns]
    first = _first_kept(sizes, full, kept)
    left = [message for turn in turns[first:] for message in turn]
    if first == len(turns) - 1 and sizes[-1] > full:
        rounds = _grouped(turns[-1], lambda message, _: message.role is Role.ASSISTANT)
        asked = rounds.pop(0) if rounds[0][0].role is not Role.ASSISTANT else []
        n_asked = sum(map(size_of, asked))
        sizes = [sum(map(size_of, each)) for each in rounds]
        skipped = _first_kept(sizes, full - n_asked, kept - n_asked)
        left = [*asked, *(message for each in rounds[skipped:] for message in each)]
    return replace(conversation, messages=(*messages[:n_leading], *left))


def message_size(message: Message, tokenize: PieceTokenizer) -> int:
    """Return the approximate number of tokens, always the same for the same message."""
    texts = [message.text, *(call.arguments_json for call in message.calls)]
    texts += [result.text for result in message.results]
    pieces = (PromptPiece(text, parse_special=False) for text in texts if text)
    return MESSAGE_TOKENS + sum(len(tokenize(piece)) for piece in pieces)


def head_size(conversation: Conversation, tokenize: PieceTokenizer) -> int:
    """Return the approximate number of tokens of system messages and tools."""
    systems = (m for m in conversation.messages if m.role is Role.SYSTEM)
    tools = (PromptPiece(tool.definition_json, parse_special=False) for tool in conversation.tools)
    n_tools = sum(len(tokenize(tool)) for tool in tools)
    return n_tools + sum(message_size(message, tokenize) for message in systems)


def _first_kept(sizes: Sequence[int], full: int, kept: int) -> int:
    """Return the index of the first item that stays."""
    first = total = 0
    for index, size in enumerate(sizes):
        total += size
        if total > full:
            while first < index and total > kept:
                total -= sizes[first]
                first += 1
    return first


def _grouped(
    messages: Sequence[Message], starts: Callable[[Message, Message], bool]
) -> list[list[Message]]:
    """Cut the messages before each one that starts a group, given the message before it."""
    groups: list[list[Message]] = []
    for message in messages:
        if not groups or starts(message, groups[-1][-1]):
            groups.append([])
        groups[-1].append(message)
    return groups
