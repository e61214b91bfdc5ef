"""Which reasoning of earlier turns stays in a prompt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rekindle.chat.conversation import Conversation, Role
from rekindle.config import ReasoningHistory

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

    def first_kept(self, conversation: Conversation) -> int:
        """Return the index of the first message whose sampled reasoning stays.

        From there on it stays even where the template leaves it out.
        """
        match self._setting:
            case ReasoningHistory.KEEP:
                return 0
            case ReasoningHistory.TEMPLATE:
                return len(conversation.messages)
            case ReasoningHistory.AUTO:
                chosen = self._switches | conversation.template_kwargs
                is_switched_on = self._switches and self._switches.items() <= chosen.items()
                return 0 if is_switched_on else _tool_loop_start(conversation)


def _tool_loop_start(conversation: Conversation) -> int:
    """Return the index after the last user message: the messages from there work on one task."""
    messages = conversation.messages
    return max((i + 1 for i, m in enumerate(messages) if m.role is Role.USER), default=0)
