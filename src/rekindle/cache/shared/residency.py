"""What of the holdings is in the shared store, on its way there, or on its way back.

Nobody lists what others have stored: a prompt is looked up there by the keys of its blocks when
it arrives, and what is found joins the index. A store that does not answer costs the request a
few milliseconds, once; then it is left alone until it is well again. Owned by the engine thread.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.cache.disk.transfers import Arrived, ReadFailed, Vanished, WriteFailed, Written
from rekindle.cache.entry import BLOCK_TOKENS, Header, Key
from rekindle.cache.index import Match, Node, Where
from rekindle.cache.keys import PrefixKeys
from rekindle.cache.policy import Speed, admits_to_shared
from rekindle.cache.residency import Holdings
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.shared.transfers import (
    N_PROBERS,
    Inquiry,
    Probed,
    SharedEvent,
    SharedTransfers,
)
from rekindle.cache.stores.back_store import BackStore, WriteRules
from rekindle.config import MIB
from rekindle.errors import EntryCorrupt, EntryMissing
from rekindle.generation.events import CacheSource
from rekindle.generation.status import TierStatus

# All of these are picked.
MIN_PROBE_TOKENS = 64  # that a prompt must lack before anybody is asked
PROBE_SHARE = 0.1  # of the time that computing them would take may be spent on asking
PROBE_SECONDS = (0.01, 0.25)  # and at least and at most this
DEAR_PROBE_SECONDS = (0.25, 1.0)  # where each name takes a round trip of its own
MAX_BEHIND_BYTES = 256 * MIB  # on their way there at once
MAX_OWED = 4096
MAX_KNOWN = 100_000  # entries that are nowhere but there
TOUCH_SECONDS = 600.0  # between two words that an entry is still in use


@dataclass(slots=True, eq=False)
class Probe:
    """A question on its way. `is_over`: answered, or it took too long."""

    deadline: float
    is_over: bool = False


class SharedStock(BackStore):
    def __init__(
        self,
        store: SharedStore,
        transfers: SharedTransfers,
        holdings: Holdings,
        rules: WriteRules,
        count: Callable[[str, int], None],
        read_speed: Speed,
    ) -> None:
        super().__init__(
            Where.SHARED,
            transfers,
            holdings,
            lambda name, amount: count(f"shared_{name}", amount),
            read_speed,
        )
        self._store = store
        self._transfers = transfers
        self._rules = rules
        self._n_probes = 0
        self._probes: dict[int, Probe] = {}
        self._known: OrderedDict[Key, float] = OrderedDict()  # when its use was last told
        self._behind_bytes = 0
        self._stop_listening: Callable[[], None] = lambda: None
        self._owed: OrderedDict[Key, Node] = OrderedDict()  # offered again when there is room

    @property
    def is_well(self) -> bool:
        return self._store.health.is_well

    def start(self) -> None:
        self._transfers.start()
        self._stop_listening = self._store.health.on_change(self._transfers.wake)

    def close(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        self.poll()
        while self._owed and self.is_well and (left := deadline - time.monotonic()) > 0:
            if not self.wait(left):
                break
            self.poll()
        self._stop_listening()
        self._transfers.close(max(deadline - time.monotonic(), 0.0))
        while (event := self._transfers.poll()) is not None:
            self._on(event)

    def poll(self) -> None:
        while (event := self._transfers.poll()) is not None:
            self._on(event)
        while self._owed and self._behind_bytes < MAX_BEHIND_BYTES // 2 and self.is_well:
            _, node = self._owed.popitem(last=False)
            self._offer_again([node])

    def wait(self, timeout_seconds: float) -> bool:
        event = self._transfers.wait(timeout_seconds)
        if event is not None:
            self._on(event)
        return event is not None

    def ask(
        self, keys: PrefixKeys, match: Match, n_limit: int, compute_seconds: float | None
    ) -> Probe | None:
        """Starts to look up what of a prompt lies behind `match`; None: nobody is asked.

        `compute_seconds` is what computing it would take; None: nobody knows yet.
        """
        if not self.is_well:
            return None
        n_whole = match.n_tokens // BLOCK_TOKENS
        self._count("probes", 1)
        self._n_probes += 1
        probe = Probe(time.monotonic() + self._patience(compute_seconds))
        self._probes[self._n_probes] = probe
        self._transfers.probe(
            Inquiry(
                id=self._n_probes,
                parent=keys.after_blocks(n_whole),
                start=n_whole * BLOCK_TOKENS,
                tokens=keys.between(n_whole * BLOCK_TOKENS, n_limit),
            )
        )
        return probe

    def give_up(self, probe: Probe) -> None:
        """It took too long. What it finds in the end is welcome all the same."""
        self.poll()  # it may have come while others were let in
        if probe.is_over:
            return
        probe.is_over = True
        self._count("probes_failed", 1)
        if len(self._probes) <= N_PROBERS:  # else it stood behind others
            self.note_slow()

    def note_slow(self) -> None:
        self._store.health.note_slow("an answer took too long")

    def offer(self, node: Node, *, was_reused: bool) -> None:
        """Writes the entry, and what leads to it, if it is worth the network and there is room."""
        if not self._may_be_offered(node):
            return
        is_admitted = admits_to_shared(
            self._rules.policy,
            n_prefix_tokens=node.stop,
            min_tokens=self._rules.min_tokens,
            was_reused=was_reused,
            is_pinned=node.retention.pinned_until > time.time(),
            rank=node.retention.rank,
        )
        if not is_admitted:
            self._count("writes_refused", 1)
            return
        if not self._has_way:
            self._owe(node)
            return
        path = self._unwritten_path(node)
        if not path:  # a part of it is on disk only
            self._count("writes_refused", 1)
        for each in path:
            if not self._has_way:
                self._owe(node)
                return
            self._behind_bytes += each.payload_bytes
            self._begin_write(each)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Now and then: what is used from memory here would seem forgotten there."""
        if not self.is_well:
            return
        now = time.monotonic()
        due = [
            node.key
            for node in nodes
            if Where.SHARED in node.where and now >= self._known.get(node.key, 0.0) + TOUCH_SECONDS
        ]
        if due:
            self._transfers.touch(due)
            for key in due:
                self._note_known(key, now)

    def drop(self, keys: Sequence[Key]) -> None:
        self._transfers.drop(keys)

    def quarantine(self, node: Node, why: str) -> None:
        if Where.SHARED in node.where:
            self._count("quarantined", 1)
            self._transfers.quarantine(node.key, why)

    def status(self) -> TierStatus:
        """Of what is there only that is known which this server wrote or looked up."""
        return TierStatus(
            name=CacheSource.SHARED,
            n_entries=len(self._known),
            n_bytes=0,
            budget_bytes=0,
            trouble=self._store.health.trouble,
            directory=self._store.place,
        )

    def _patience(self, compute_seconds: float | None) -> float:
        is_dear = self._store.objects.reads_are_dear
        least, most = DEAR_PROBE_SECONDS if is_dear else PROBE_SECONDS
        if compute_seconds is None:
            return most
        return min(max(compute_seconds * PROBE_SHARE, least), most)

    def _on(self, event: SharedEvent) -> None:
        match event:
            case Probed(id, headers, trouble):
                self._on_probed(self._probes.pop(id), headers, trouble)
            case Written(key, _, _):
                self._behind_bytes -= self._writing[key].payload_bytes
                self._note_known(key, time.monotonic())
                self._on_written(key)
                self._forget_some()
            case WriteFailed(key, trouble):
                self._count("writes_failed", 1)
                if trouble is not None and not self.is_well:  # else it is this entry's fault
                    self._owe(self._writing[key])
                self._behind_bytes -= self._writing[key].payload_bytes
                self._end_write(key)
            case Vanished(keys):
                for key in keys:
                    self._known.pop(key, None)
                self._on_vanished(keys)
            case Arrived(entry, seconds):
                self._on_arrived(entry, seconds)
            case ReadFailed(key, error):
                self._count("quarantined", isinstance(error, EntryCorrupt))
                self._count("vanished", isinstance(error, EntryMissing))
                self._known.pop(key, None)
                self._on_read_failed(key)

    def _on_probed(self, probe: Probe, headers: list[Header], trouble: str | None) -> None:
        if trouble is not None and not probe.is_over:
            self._count("probes_failed", 1)
        probe.is_over = True
        now = time.monotonic()
        for header in headers:
            self._holdings.add(header, Where.SHARED)
            self._note_known(header.key, now)
        self._forget_some()

    @property
    def _has_way(self) -> bool:
        return self._behind_bytes < MAX_BEHIND_BYTES and self.is_well

    def _owe(self, node: Node) -> None:
        self._owed[node.key] = node
        while len(self._owed) > MAX_OWED:
            self._owed.popitem(last=False)

    def _note_known(self, key: Key, now: float) -> None:
        self._known[key] = now
        self._known.move_to_end(key)

    def _forget_some(self) -> None:
        """Those that were not used for the longest time. They stay in the store."""
        while len(self._known) > MAX_KNOWN:
            key, _ = self._known.popitem(last=False)
            node = self._holdings.index.get(key)
            if node is not None and node.leases:
                self._note_known(key, time.monotonic())
                return  # the next one that comes makes up for it
            if node is not None:
                self._holdings.remove(node, Where.SHARED)
