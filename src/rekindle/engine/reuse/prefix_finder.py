"""Finds the longest prefix of a prompt that need not be computed: live rows, then stored blocks.

A prefix may follow soon: from the shared store of several servers, or from another sequence
that is about to compute it.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.cache.entry import BLOCK_TOKENS
from rekindle.cache.index import Match, Node
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.engine.backend import Backend
from rekindle.engine.export.slot_saver import SlotSaver
from rekindle.engine.reuse.divergence import MIN_SHARED_TOKENS
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.slots import Slot, Slots


class Start(NamedTuple):
    """|-- n_live, in `source` --|-- up to n_stored, of `match` --|-- to be computed --|"""

    source: Slot | None
    n_live: int
    match: Match | None
    n_stored: int

    @property
    def n_tokens(self) -> int:
        return max(self.n_live, self.n_stored)

    @property
    def n_findable(self) -> int:
        """Like `n_tokens`, with stored tokens that are slower to load than to compute."""
        return max(self.n_tokens, self.match.n_tokens if self.match else 0)


COLD = Start(None, 0, None, 0)


@dataclass(slots=True, eq=False)
class PrefixFinder:
    _backend: Backend
    _slots: Slots
    _cache: PrefixCache
    _saver: SlotSaver

    def find(self, sequence: Sequence) -> Start:
        if not sequence.request.cache_prompt:
            return COLD
        n_prompt = len(sequence.tokens)
        n_end = sequence.n_end if self._backend.traits.is_dense else None
        match, end = self._match(sequence, n_end)
        n_limit = n_prompt if end is not None else n_prompt - 1  # one is computed for its logits
        source, n_live = None, 0
        for slot in self._slots.all:
            is_end_live = n_end in slot.ends or not sequence.is_sampled
            n_usable = self._n_usable(slot, sequence, n_prompt if is_end_live else n_limit)
            if n_usable > n_live or (n_usable == n_live > 0 and slot.is_idle):
                source, n_live = slot, n_usable
        if source is not None and end is not None and n_live == n_end not in source.ends:
            return Start(source, n_live, match._replace(checkpoint=end), n_live)
        if match.n_tokens > n_live:
            # Stored rows follow whole live blocks only: a cut block would misalign its cells
            # with the tiles of attention. A checkpoint needs all of its own rows.
            n_whole = n_live // BLOCK_TOKENS * BLOCK_TOKENS if self._backend.traits.is_dense else 0
            n_stored = self._cache.gate.n_worth_loading(
                match,
                n_live=n_whole,
                n_gained=match.n_tokens - n_live,
                n_tokens_ahead=sum(
                    slot.sequence.n_to_compute for slot in self._slots.all if slot.sequence
                ),
                prefill_seconds_per_token=self._saver.prefill_seconds_per_token,
            )
            if n_stored > n_live:
                if n_stored == n_end:
                    match = match._replace(checkpoint=end)
                return Start(source if n_whole else None, n_whole, match, n_stored)
        if end is not None and n_live == n_end:
            match = match._replace(checkpoint=end)  # live, and in use like the stored rows
        return Start(source, n_live, match, 0)

    def _match(self, sequence: Sequence, n_end: int | None) -> tuple[Match, Node | None]:
        """Return the longest stored prefix, and the logits after it if it is the whole prompt."""
        keys = sequence.keys
        if n_end is not None and (end := self._cache.find_end(keys, n_end)) is not None:
            match = self._cache.match(keys, n_end)
            return match, end if match.n_tokens == n_end else None
        return self._cache.match(keys, len(sequence.tokens) - 1), None

    def _n_usable(self, slot: Slot, sequence: Sequence, n_limit: int) -> int:
        """Return how many leading rows of the slot the sequence can start from."""
        if slot.keys is None or (slot.sequence and not _shares_rows(slot.sequence)):
            return 0
        if slot.keys.root != sequence.keys.root:
            return 0
        n_rows = slot.n_rows
        n_common = sequence.keys.n_common(slot.keys, min(n_limit, n_rows))
        if not self._backend.traits.can_fork:
            return n_common if slot.is_idle and n_common == n_rows else 0
        if n_common == n_rows or self._backend.traits.is_dense:
            return n_common
        # A fork copies the state at the end of its source. To start earlier, the slot itself
        # must be trimmed, which a lower-ranked request may not do.
        may_trim = slot.is_idle and sequence.request.terms.rank <= slot.rank
        return n_common if may_trim and self._backend.can_trim(slot.id, n_common) else 0

    def look_up_stores(self, sequence: Sequence) -> None:
        """Start to look the prompt up on disk, then in the shared store.

        Called when the request arrives. The disk comes first: soon after a start, the index does
        not know every entry on disk.
        """
        if not sequence.request.cache_prompt:
            return
        sequence.disk_lookup = self._cache.look_up(sequence.keys, len(sequence.tokens))
        if sequence.disk_lookup is None:
            self._ask_others(sequence)

    def _ask_others(self, sequence: Sequence) -> None:
        if self._cache.has_others:
            sequence.shared_lookup = self._cache.ask_others(
                sequence.keys,
                len(sequence.tokens) - 1,
                n_have=self.find(sequence).n_tokens,
                prefill_seconds_per_token=self._saver.prefill_seconds_per_token,
            )

    def awaits_lookup(self, sequence: Sequence) -> bool:
        now = time.monotonic()
        if sequence.disk_lookup is not None:
            if not sequence.disk_lookup.is_over(now):
                return True
            sequence.disk_lookup = None
            self._ask_others(sequence)
        lookup = sequence.shared_lookup
        if lookup is not None and self._cache.is_asking(lookup, now):
            return True
        sequence.shared_lookup = None
        return False

    def find_leader(self, sequence: Sequence, start: Start, running: list[Sequence]) -> None:
        """Set `sequence.leader` to a running sequence that is about to compute a shared prefix."""
        if not sequence.request.cache_prompt or not (
            self._backend.traits.can_fork or self._cache.is_on
        ):
            return
        n_have = start.n_tokens
        n_limit = len(sequence.tokens) - 1
        for other in running:
            if not _is_before_decoding(other) or not other.request.cache_prompt:
                continue
            if other.keys.root != sequence.keys.root:
                continue
            n_common = sequence.keys.n_common(other.keys, n_limit)
            # The rest of the same prompt may be shorter: n replies start one after the other.
            is_same = n_common == n_limit and len(other.tokens) == len(sequence.tokens)
            n_least = n_have + (1 if is_same else MIN_SHARED_TOKENS)
            n_least = max(n_least, MIN_SHARED_TOKENS)
            if n_common >= max(other.n_computed + 1, n_least):
                sequence.leader, sequence.n_awaited, n_have = other, n_common, n_common
        if sequence.leader is not None and not self._backend.traits.is_dense:
            sequence.leader.add_stop(sequence.n_awaited)

    def awaits_leader(self, sequence: Sequence) -> bool:
        leader = sequence.leader
        is_computing = leader and _is_before_decoding(leader) and leader.request.cache_prompt
        if leader and is_computing and leader.n_computed < sequence.n_awaited:
            return True
        sequence.leader = None
        return False


def _is_before_decoding(sequence: Sequence) -> bool:
    return sequence.phase in (Phase.RESTORING, Phase.PREFILLING)


def _shares_rows(sequence: Sequence) -> bool:
    """Return whether other sequences may fork this one: its rows are complete and not private."""
    return sequence.phase is not Phase.RESTORING and sequence.request.cache_prompt
