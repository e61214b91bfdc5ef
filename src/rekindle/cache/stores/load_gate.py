"""The choice between loading a stored prefix and recomputing it: the faster one, as measured."""

from collections.abc import Sequence

from rekindle.cache.index import Match, Node, Where
from rekindle.cache.policy import LoadableSpan, Speed, best_cut


class LoadGate:
    def __init__(self, *, may_recompute: bool) -> None:
        self.put_speed = Speed()  # from memory into a slot
        self.read_speed = Speed()  # from disk into memory
        self.shared_speed = Speed()  # from the shared store into memory
        self._may_recompute = may_recompute

    def n_worth_loading(
        self,
        match: Match,
        *,
        n_live: int,
        n_gained: int,
        prefill_seconds_per_token: float | None,
    ) -> int:
        """Return how many tokens of the match to load so that it is faster than computing.

        `n_live` rows are in place. `n_gained` tokens of the match are not in the context.
        """
        speed = prefill_seconds_per_token if self._may_recompute else None
        blocks = match.blocks_after(n_live)
        if match.checkpoint is not None:
            # Rows without the state at their end are useless: load all or nothing.
            load_seconds = self._total_load_seconds([*blocks, match.checkpoint])
            n_tokens = (
                match.n_tokens if best_cut([LoadableSpan(n_gained, load_seconds)], speed) else 0
            )
        else:
            stops = [min(node.stop, match.n_tokens) for node in blocks]
            starts = [max(node.start, match.n_tokens - n_gained) for node in blocks]
            spans = [
                LoadableSpan(max(stop - start, 0), self._load_seconds(node))
                for node, start, stop in zip(blocks, starts, stops, strict=True)
            ]
            n_spans = best_cut(spans, speed)
            n_tokens = stops[n_spans - 1] if n_spans else 0
        return n_tokens

    def note_refusal(self) -> None:
        """Lower the estimates after a stored prefix was recomputed.

        One bad measurement must not cause that for ever.
        """
        self.read_speed.soften()
        self.shared_speed.soften()
        self.put_speed.soften()

    def load_seconds(self, match: Match, *, n_live: int = 0) -> float | None:
        """Return how long a restore after `n_live` rows would take; None if not measured yet."""
        checkpoint = [match.checkpoint] if match.checkpoint else []
        return self._total_load_seconds([*match.blocks_after(n_live), *checkpoint])

    def reload_seconds(self, node: Node) -> float | None:
        """Return how long it takes to read the node from disk or the shared store into memory."""
        speed = self.read_speed if Where.DISK in node.where else self.shared_speed
        return speed.seconds(node.payload_bytes)

    def _total_load_seconds(self, nodes: Sequence[Node]) -> float | None:
        seconds = [self._load_seconds(node) for node in nodes]
        return None if None in seconds else sum(each for each in seconds if each)

    def _load_seconds(self, node: Node) -> float | None:
        put = self.put_speed.seconds(node.payload_bytes)
        if Where.MEMORY in node.where or put is None:
            return put
        read = self.reload_seconds(node)
        return None if read is None else put + read
