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
    n_known = _n_known(sequence, slots, cache)
    if n_known - n_found < MIN_SHARED_TOKENS:
        return
    sequence.n_stateless = n_known - n_found
    boundaries = sequence.request.boundaries  # a state is kept at these anyway
    before = max((position for position in boundaries if position <= n_known), default=0)
    if n_known - before >= MIN_SHARED_TOKENS:
        sequence.add_stop(n_known)


def _n_known(sequence: Sequence, slots: Slots, cache: PrefixCache) -> int:
    """How many of its tokens another one began with, whether it can start from there or not."""
    n_limit = len(sequence.tokens) - 1
    n_known = cache.n_known(sequence.keys, n_limit)
    for slot in slots.all:
        if slot.keys is not None and slot.keys.root == sequence.keys.root:
            n_live = sequence.keys.n_common(slot.keys, min(n_limit, slot.n_rows))
            n_known = max(n_known, n_live)
    return n_known
