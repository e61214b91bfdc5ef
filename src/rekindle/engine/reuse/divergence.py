"""Checkpoints where prompts diverge.

Models other than dense ones resume only from a checkpoint, so we take one at each fork. Where two
prompts diverged, a third is likely to: system prompts that end with a date, edits of one message.
"""

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.sequence import Sequence
from rekindle.engine.slots import Slots

# A shared prefix of fewer tokens is a chat template's header rather than a conversation, and not
# worth the wait for another sequence's prefill; picked.
MIN_SHARED_TOKENS = 64


def stop_at_divergence(sequence: Sequence, n_found: int, slots: Slots, cache: PrefixCache) -> None:
    """Make the prefill stop where the prompt diverges from others, for a checkpoint there.

    `n_found` is the number of leading tokens that are not computed.
    """
    n_shared = _n_shared(sequence, slots, cache)
    if n_shared - n_found < MIN_SHARED_TOKENS:
        return
    sequence.n_missing_checkpoint_tokens = n_shared - n_found
    boundaries = sequence.request.boundaries  # checkpoints are taken at these anyway
    before = max((position for position in boundaries if position <= n_shared), default=0)
    if n_shared - before >= MIN_SHARED_TOKENS:
        sequence.add_stop(n_shared)


def _n_shared(sequence: Sequence, slots: Slots, cache: PrefixCache) -> int:
    """Return the length shared with a live or stored prefix that then diverges.

    A prefix that merely ends there is excluded: its checkpoint was evicted.
    """
    n_limit = len(sequence.tokens) - 1
    longest = cache.divergence(sequence.keys, n_limit)
    for slot in slots.all:
        is_private = slot.sequence is not None and not slot.sequence.request.cache_prompt
        if slot.keys is None or is_private or slot.keys.root != sequence.keys.root:
            continue
        n_common = sequence.keys.n_common(slot.keys, min(n_limit, slot.n_rows))
        if longest < n_common < min(n_limit, slot.n_rows):
            longest = n_common
    return longest
