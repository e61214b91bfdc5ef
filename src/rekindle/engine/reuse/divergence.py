"""Where prompts part: models that go on from kept states only have one kept there.

Nobody knows where the next prompt will leave this one, but where two parted a third will: system
prompts that end with a date, edits of one message.
"""

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.sequence import Sequence
from rekindle.engine.slots import Slots

# Waiting for another sequence to compute a shared prefix pays from about this many tokens, and
# below them two prompts share a chat template's header rather than a conversation; picked.
MIN_SHARED_TOKENS = 64


def mark_parting(sequence: Sequence, n_found: int, slots: Slots, cache: PrefixCache) -> None:
    """`n_found` of its tokens are not computed. Makes it stop where it leaves others, if later."""
    n_shared = _n_shared(sequence, slots, cache)
    if n_shared - n_found < MIN_SHARED_TOKENS:
        return
    sequence.n_missing_checkpoint_tokens = n_shared - n_found
    boundaries = sequence.request.boundaries  # a state is kept at these anyway
    before = max((position for position in boundaries if position <= n_shared), default=0)
    if n_shared - before >= MIN_SHARED_TOKENS:
        sequence.add_stop(n_shared)


def _n_shared(sequence: Sequence, slots: Slots, cache: PrefixCache) -> int:
    """With what goes on otherwise, live or stored. What only ends there had a state and lost it."""
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
