"""Conversations as neutral, frozen values. Every wire format is converted to these."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments_json: str  # as written: serialising it again would change tokens


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    name: str | None
    text: str


Part = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """All text parts joined by line breaks, as other servers join the blocks of a message."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def results(self) -> tuple[ToolResult, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolResult))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `definition_json` is OpenAI's `{"type": "function", "function": {...}}`."""

    name: str
    definition_json: str
    # Regular expressions for string arguments, by name. The model does not see them.
    patterns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    more_tools: tuple[Tool, ...] = ()  # defined in a later message, not at the head of the prompt
    documents_json: tuple[str, ...] = ()
    # The client's JSON for the template, such as `enable_thinking`.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_last: bool = False  # the reply continues the last assistant message

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return self.tools + self.more_tools

    def with_reply(
        self, text: str, calls: Iterable[ToolCall], *, reasoning: str = ""
    ) -> "Conversation":
        """Append an assistant message, as a client will send it back.

        If the last message is open, the reply continues it.
        """
        messages = self.messages
        if self.continue_last:
            text = messages[-1].text + text
            messages = messages[:-1]
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if text:
            parts.append(Text(text))
        reply = Message(Role.ASSISTANT, (*parts, *calls))
        return replace(self, messages=(*messages, reply), continue_last=False)


class ToolsChange(StrEnum):
    """How the tools of a request differ from its session's."""

    DROPPED = "dropped"
    REORDERED = "reordered"


@dataclass(frozen=True, slots=True)
class StickyTools:
    """The tools of a session, in the prompt of a request that dropped or reordered them."""

    change: ToolsChange
    n_tools: int
    n_prefill_as_sent: int  # tokens that the prompt as sent would add to the session's last one


def n_leading_systems(messages: Sequence[Message]) -> int:
    """Return how many system messages stand before the first message of another role."""
    roles = (message.role for message in messages)
    return next((i for i, role in enumerate(roles) if role is not Role.SYSTEM), len(messages))
