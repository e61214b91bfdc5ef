"""`str.format` for templates, with limits."""

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

from rekindle.chat.template.budget import Budget, check_length
from rekindle.chat.template.checks import WIDE


class BoundedFormatter(SandboxedFormatter):
    """Formats one text."""

    def __init__(self, environment: SandboxedEnvironment, budget_of: Callable[[], Budget]) -> None:
        super().__init__(environment)
        self._budget_of = budget_of
        self._n_characters = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        budget = self._budget_of()
        budget.tick()
        budget.weigh(value)
        if WIDE.search(format_spec):
            raise SecurityError("a width in the template is too large")
        text: str = super().format_field(value, format_spec)
        self._n_characters += len(text)
        check_length(self._n_characters)
        return text
