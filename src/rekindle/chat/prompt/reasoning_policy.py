"""Which reasoning of earlier turns is in a prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.chat.conversation import Conversation, Reasoning, Role
from rekindle.chat.prompt.turn_memory import Turn
from rekindle.config.choices import ReasoningHistory

# Arguments that tell a template to keep the reasoning of earlier turns.
_SWITCHES: Mapping[str, bool] = {
    "clear_thinking": False,
    "preserve_thinking": True,
    "preserve_reasoning": True,
    "keep_past_thinking": True,
    "keep_thinking": True,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}


class ReasoningPolicy:
    def __init__(self, setting: ReasoningHistory, template_source: str) -> None:
        self._setting = setting
        self._switches: dict[str, Any] = {
            name: value for name, value in _SWITCHES.items() if name in template_source
        }

    def switched_on(self, conversation: Conversation) -> Conversation:
        """Switch the template to keep earlier reasoning. The client's arguments take precedence."""
        if self._setting is ReasoningHistory.TEMPLATE or not self._switches:
            return conversation
        kwargs = self._switches | conversation.template_kwargs
        return replace(conversation, template_kwargs=kwargs)

    def first_restored(self, conversation: Conversation) -> int:
        """Return the index of the first message that gets its reasoning back from memory.

        Messages before it are rendered with the reasoning that the client sent, or without.
        """
        match self._setting:
            case ReasoningHistory.KEEP:
                return 0
            case ReasoningHistory.TEMPLATE:
                return len(conversation.messages)
            case ReasoningHistory.AUTO:
                return _tool_loop_start(conversation)


def _tool_loop_start(conversation: Conversation) -> int:
    """Return the index after the last user message: the messages from there work on one task."""
    messages = conversation.messages
    return max((i + 1 for i, m in enumerate(messages) if m.role is Role.USER), default=0)


def other_reasoning(turn: Turn | None, tried: str) -> str:
    """Return the turn's reasoning for a message that was not spliced; empty if equal to `tried`."""
    return "" if turn is None or turn.said.reasoning == tried else turn.said.reasoning


def with_reasoning(conversation: Conversation, restored: Mapping[int, str]) -> Conversation:
    messages = list(conversation.messages)
    for index, reasoning in restored.items():
        message = messages[index]
        if reasoning:
            messages[index] = replace(message, parts=(Reasoning(reasoning), *message.parts))
    return replace(conversation, messages=tuple(messages))
