"""Budgets of reasoning tokens, from requests and from `--reasoning-budget`."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from rekindle.chat.conversation import Conversation
from rekindle.config.declare import INT32_MAX

UNLIMITED = -1  # llama-server's value in requests and settings
ReasoningBudget = Annotated[int, Field(ge=UNLIMITED, le=INT32_MAX)]
NO_EFFORT = "none"  # OpenAI's value of `effort` for a model that is not to reason
SWITCH = "enable_thinking"  # of most templates with a switch


def limit_of(value: int | None) -> int | None:
    """Return a budget as a request or a setting gives it. None: unlimited."""
    return None if value == UNLIMITED else value


def effective_budget(asked: int | None, limit: int | None) -> int | None:
    """Return the budget of a request. The server's limit is an upper bound. None: unlimited."""
    if asked is None or limit is None:
        return limit if asked is None else asked
    return min(asked, limit)


def for_budget(conversation: Conversation, budget: int | None) -> Conversation:
    """Turn thinking off in the template if the budget is 0 and the client sets no switch."""
    if budget != 0 or SWITCH in conversation.template_kwargs:
        return conversation
    return replace(conversation, template_kwargs={**conversation.template_kwargs, SWITCH: False})
