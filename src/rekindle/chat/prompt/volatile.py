"""Replaces volatile text at the head of a prompt by a constant.

After a clock or an id in a system prompt, no token can be reused. Rules replace matching text
in system messages and tool descriptions before rendering, so the model does not see it.
Nothing is replaced unless a rule is switched on.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rekindle.chat.conversation import Conversation, Message, Role, Text
from rekindle.errors import StartupError

# Rules by name. The first group of a pattern stays, so that the model sees the kind of text.
SHIPPED = {
    # Claude Code's first system block: the hash differs in every conversation and sub-agent.
    "claude-code-attribution": r"(?m)^(x-anthropic-billing-header:).*$",
    # Example: 2026-11-15T09:30:12.123Z, with or without seconds and zone.
    "timestamps": (
        r"\b()\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?"
    ),
    # 09:30 or 09:30:12, as a clock.
    "times": r"\b()(?<![\d:])\d{1,2}:\d{2}(?::\d{2})?(?![\d:])(?:\s?[AaPp][Mm]\b)?",
    "uuids": r"\b()[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b",
    # Qwen Code, Continue and others show `git status` when they start.
    "git-status": r"(?ms)^((?:Git status|gitStatus)[^\n]*\n).*?(?=^\s*$|\Z)",
}


@dataclass(frozen=True, slots=True)
class Neutralised:
    rule: str
    count: int


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    pattern: re.Pattern[str]

    def apply(self, text: str) -> tuple[str, int]:
        return self.pattern.subn(self._constant, text)

    def _constant(self, match: re.Match[str]) -> str:
        kept = match[1] or "" if self.pattern.groups else ""
        return f"{kept}[{self.name}]" if not kept else f"{kept} [{self.name}]"


class VolatileRules:
    """Rules that replace text. `settings` are names of shipped rules, or regular expressions."""

    def __init__(self, settings: Sequence[str]) -> None:
        self._rules = [_rule(index, setting) for index, setting in enumerate(settings)]

    def neutralise(
        self, conversation: Conversation
    ) -> tuple[Conversation, tuple[Neutralised, ...]]:
        """Return the conversation with matching text replaced, and the count for each rule."""
        if not self._rules:
            return conversation, ()
        counts = dict.fromkeys((rule.name for rule in self._rules), 0)

        def replaced(text: str) -> str:
            for rule in self._rules:
                text, n_found = rule.apply(text)
                counts[rule.name] += n_found
            return text

        neutralised = replace(
            conversation,
            messages=tuple(_neutralised(message, replaced) for message in conversation.messages),
            tools=tuple(
                replace(tool, definition_json=_neutralised_json(tool.definition_json, replaced))
                for tool in conversation.tools
            ),
        )
        found = tuple(Neutralised(name, count) for name, count in counts.items() if count)
        return (neutralised, found) if found else (conversation, ())


def _neutralised(message: Message, replaced: Callable[[str], str]) -> Message:
    if message.role is not Role.SYSTEM:
        return message
    parts = tuple(
        Text(replaced(part.text)) if isinstance(part, Text) else part for part in message.parts
    )
    return replace(message, parts=parts)


def _neutralised_json(source: str, replaced: Callable[[str], str]) -> str:
    """Replace text in descriptions only: calls are checked against the rest of a definition."""

    def neutralised(members: dict[str, Any]) -> dict[str, Any]:
        description = members.get("description")
        if not isinstance(description, str):
            return members
        return {**members, "description": replaced(description)}

    changed = json.loads(source, object_hook=neutralised)
    return source if changed == json.loads(source) else json.dumps(changed, ensure_ascii=False)


def _rule(index: int, setting: str) -> _Rule:
    if setting in SHIPPED:
        return _Rule(setting, re.compile(SHIPPED[setting]))
    try:
        return _Rule(f"volatile {index + 1}", re.compile(setting))
    except re.error as error:
        known = ", ".join(SHIPPED)
        raise StartupError(
            f"volatile: {setting!r} is neither a known rule ({known}) nor a regular expression:"
            f" {error}."
        ) from error
