"""The choice between loading a stored prefix and recomputing it: the faster one, as measured."""

from collections import Counter
from collections.abc import Sequence

from rekindle.cache.index import Match, Node, Where
from rekindle.cache.policy import LoadableSpan, Speed, best_cut
from rekindle.cache.stores.backlog import Backlog


class LoadGate:
    def __init__(self, backlog: Backlog, *, may_recompute: bool) -> None:
        self.put_speed = Speed()  # from memory into a slot
        self.read_speed = Speed()  # from disk into memory
        self.shared_speed = Speed()  # from the shared store into memory
        self._backlog = backlog
        self._may_recompute = may_recompute

    def n_worth_loading(
        self,
        match: Match,
        *,
        n_live: int,
        n_gained: int,
        n_tokens_ahead: int = 0,
        prefill_seconds_per_token: float | None,
    ) -> int:
        """Return how many tokens of the match to load so that it is faster than computing.

        `n_live` rows are in place. `n_gained` tokens of the match are not in the context.
        `n_tokens_ahead` tokens are computed for others first.
        """
        speed = prefill_seconds_per_token if self._may_recompute else None
        blocks = match.blocks_after(n_live)
        # Computing would wait for the tokens ahead, and then holds up the other sequences; a
        # wait for the disk holds up none. So computing must save as much time as it takes.
        free_seconds = (n_tokens_ahead + n_gained) * (speed or 0.0)
        if match.checkpoint is not None:
            # Rows without the state at their end are useless: load all or nothing.
            nodes = [*blocks, match.checkpoint]
            load_seconds = self._total_load_seconds(nodes)
            if load_seconds is not None:
                load_seconds += sum(self._waits(nodes, free_seconds).values())
            n_tokens = (
                match.n_tokens if best_cut([LoadableSpan(n_gained, load_seconds)], speed) else 0
            )
        else:
            stops = [min(node.stop, match.n_tokens) for node in blocks]
            starts = [max(node.start, match.n_tokens - n_gained) for node in blocks]
            waits = self._waits(blocks, free_seconds)
            spans = []
            for node, start, stop in zip(blocks, starts, stops, strict=True):
                load_seconds = self._load_seconds(node)
                if waits and load_seconds is not None:
                    load_seconds += waits.pop(node.where.to_read_from, 0.0)
                spans.append(LoadableSpan(max(stop - start, 0), load_seconds))
            n_spans = best_cut(spans, speed)
            n_tokens = stops[n_spans - 1] if n_spans else 0
        return n_tokens

    def note_refusal(self) -> None:
        """Lower the estimates after a stored prefix was recomputed.

        One bad measurement must not cause that for ever. While restores read, they measure.
        """
        if self._backlog:
            return
        self.read_speed.soften()
        self.shared_speed.soften()
        self.put_speed.soften()

    def load_seconds(self, match: Match, *, n_live: int = 0) -> float | None:
        """Return how long a restore after `n_live` rows would take; None if not measured yet."""
        checkpoint = [match.checkpoint] if match.checkpoint else []
        return self._total_load_seconds([*match.blocks_after(n_live), *checkpoint])

    def reload_seconds(self, node: Node) -> float | None:
        """Return how long it takes to read the node from disk or the shared store into memory."""
        return self._read_seconds(node.where, node.payload_bytes)

    def is_rest_worth_loading(
        self, nodes: Sequence[Node], n_tokens: int, *, prefill_seconds_per_token: float | None
    ) -> bool:
        """Return whether to finish a restore: unless `n_tokens` are computed in half the time."""
        load_seconds = self._total_load_seconds(nodes)
        if not self._may_recompute or load_seconds is None or prefill_seconds_per_token is None:
            return True
        return load_seconds <= 2 * n_tokens * prefill_seconds_per_token

    def _waits(self, nodes: Sequence[Node], free_seconds: float) -> dict[Where, float]:
        """Return how long the first read from each store waits beyond `free_seconds`."""
        if not self._backlog:
            return {}
        n_bytes: Counter[Where] = Counter()
        for node in nodes:
            if place := node.where.to_read_from:
                n_bytes[place] += node.payload_bytes
        waits = {
            place: self._read_seconds(place, self._backlog.n_bytes_ahead(place, n_bytes))
            for place in n_bytes
        }
        return {
            place: max((seconds or 0.0) - free_seconds, 0.0) for place, seconds in waits.items()
        }

    def _read_seconds(self, where: Where, n_bytes: int) -> float | None:
        speed = self.read_speed if Where.DISK in where else self.shared_speed
        return speed.seconds(n_bytes)

    def _total_load_seconds(self, nodes: Sequence[Node]) -> float | None:
        seconds = [self._load_seconds(node) for node in nodes]
        return None if None in seconds else sum(each for each in seconds if each)

    def _load_seconds(self, node: Node) -> float | None:
        put = self.put_speed.seconds(node.payload_bytes)
        if Where.MEMORY in node.where or put is None:
            return put
        read = self.reload_seconds(node)
        return None if read is None else put + read
