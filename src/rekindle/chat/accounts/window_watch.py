"""Warns before a conversation outgrows the context: its client may know of a larger window."""

import logging
from dataclasses import replace

from rekindle.chat.accounts.recent_prompts import PastPrompt

_log = logging.getLogger("rekindle.context")


def watched(past: PastPrompt, earlier: PastPrompt | None, *, n_ctx: int) -> PastPrompt:
    """Warn if the next turn will not fit, once per conversation. Return the prompt, marked so.

    `earlier`: the prompt that this one continues. The next turn is expected to add as many tokens
    as this one did.
    """
    if earlier is None or earlier.is_warned:
        return past if earlier is None else replace(past, is_warned=True)
    n_tokens = len(past.tokens)
    n_growth, n_room = n_tokens - len(earlier.tokens), n_ctx - n_tokens
    if n_growth <= n_room:
        return past
    _log.warning(
        "context: the next turn will not fit: session=%s tokens=%d growth=%d room=%d ctx_size=%d",
        past.session,
        n_tokens,
        n_growth,
        n_room,
        n_ctx,
    )
    return replace(past, is_warned=True)
