"""Sticky tools: a request that drops or reorders the tools of its session is rendered with them.

Templates write the tools at the head of the prompt. Some clients leave them out when they ask for
a summary or a title of a conversation, and then nothing of its cached prompt fits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rekindle.chat.accounts.recent_prompts import PastPrompt, message_digests, n_shared
from rekindle.chat.conversation import Conversation, StickyTools, ToolsChange
from rekindle.chat.prompt.prompt import Prompt


class Stuck(NamedTuple):
    conversation: Conversation  # with the tools of the earlier prompt
    change: ToolsChange
    earlier: PastPrompt


def stuck(sent: Conversation, neutral: Conversation, earlier: Sequence[PastPrompt]) -> Stuck | None:
    """Return the conversation with its session's tools; None: its own tools stand.

    `earlier`: prompts of the session, newest first. Their volatile text was replaced, so `neutral`
    is compared with them: what was sent, with the same text replaced.
    """
    if not any(each.conversation and each.conversation.tools for each in earlier):
        return None
    digests = message_digests(neutral.messages)
    for past in earlier:
        if past.conversation is None or not past.conversation.tools or not past.begins(digests):
            continue
        change = _change(neutral, past.conversation)
        if change is None:
            return None
        return Stuck(replace(sent, tools=past.conversation.tools), change, past)
    return None


def described(found: Stuck, as_sent: Prompt) -> StickyTools:
    """Describe the change. `as_sent`: the prompt without it, to know what would be prefilled."""
    tokens = np.fromiter(as_sent.tokens, np.int32, len(as_sent.tokens))
    return StickyTools(
        change=found.change,
        n_tools=len(found.conversation.tools),
        n_prefill_as_sent=len(tokens) - n_shared(tokens, found.earlier.tokens),
    )


def _change(now: Conversation, before: Conversation) -> ToolsChange | None:
    if not now.callable_tools:
        return ToolsChange.DROPPED
    if now.tools != before.tools and sorted(now.tools, key=repr) == sorted(before.tools, key=repr):
        return ToolsChange.REORDERED
    return None
