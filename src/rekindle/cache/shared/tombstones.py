"""Deletions that all servers of a store share: each is a tombstone in one group of the store.

    d/<folder>   group: sealed tombstones, one for each scope

Every server reads the group every few seconds. Until it has done so after a start or an outage, it
neither reads nor writes entries and turns. A tombstone that the store has lost is added again.
"""

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from rekindle.cache.shared.deletion import CLOCK_SECONDS, Deletion, OnProgress, Removal, Removed
from rekindle.cache.shared.health import GuardedObjects
from rekindle.cache.shared.sealing import Seal
from rekindle.errors import CacheError, TierFailed
from rekindle.generation.forgetting import Deleted, Owner, Place, Scope, Tombstone, Tombstones

_log = logging.getLogger(__name__)

# All of these are picked.
POLL_SECONDS, DEAR_POLL_SECONDS = 2.0, 10.0  # between two reads of the group; DEAR: with S3
KEEP_SECONDS = 30 * 24 * 3600  # for which the store keeps a tombstone
MAX_TOMBSTONES = 10_000  # in the store; then only half of them are kept
MAX_RESTORED = 100  # tombstones that the store has lost are added again at one read
MAX_AHEAD_SECONDS = 24 * 3600.0  # by which another server's clock may be ahead
FORGET_SECONDS = 60.0  # for which a caller waits
RESUME_SECONDS = 3600.0  # for which a deletion runs in the background before it starts again
TAKE_OVER_SECONDS = 900.0  # until a server ends the deletion of another that has stopped
# Until every server knows a deletion and has ended its writes. DEAR: with S3
SETTLE_SECONDS, DEAR_SETTLE_SECONDS = 10.0, 30.0

_CLOSE_SECONDS = 2.0
_LEAST_STEP = 0.001  # seconds between two tombstones of one scope
_GOES_ON = "The deletion continues in the background. Nothing that it covers is read meanwhile."


class StoreDeletions:
    """Any thread may call. `objects` is the store behind its circuit breaker."""

    def __init__(self, objects: GuardedObjects, seal: Seal, forgotten: Tombstones) -> None:
        self.forgotten = forgotten
        self._objects = objects
        self._seal = seal
        self._now = time.time
        self._group = f"d/{seal.folder('')}"
        self._poll_lock = threading.Lock()
        self._lock = threading.Lock()  # guards the fields below
        self._known: dict[Scope, _Known] = {}  # what the store has, or should have
        self._pending: dict[Scope, Removal] = {}  # to be run in the background
        self._undone_since: dict[Scope, float] = {}  # others' deletions under way, monotonic
        self._listeners: list[Callable[[Tombstone], None]] = []
        self._polled_at: float | None = None  # start of the last read of the group
        self._is_stale = False  # the group must be read before anything else is
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._watcher: threading.Thread | None = None
        self._resumer: threading.Thread | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Read the group once, then from time to time in a thread."""
        self._is_stale = True
        try:
            self.refresh()
        except TierFailed as error:
            _log.debug("shared: deletions not read yet: %s", error.message)
        self._stop_listening = self._objects.health.on_change(self._on_health)
        self._watcher = threading.Thread(target=self._watch, name="shared-deletions", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop_listening()
        self._closing.set()
        self._woken.set()
        for thread in (self._watcher, self._resumer):
            if thread is not None:
                thread.join(_CLOSE_SECONDS)

    def on_tombstone(self, listener: Callable[[Tombstone], None]) -> Callable[[], None]:
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # -- deleting -------------------------------------------------------------------------------

    def forget(self, tombstone: Tombstone, *, seconds: float, on_progress: OnProgress) -> Deleted:
        self.forgotten.add(tombstone)
        job, n_objects, trouble = Removal(tombstone), 0, None
        try:
            removed = self._run([job], seconds, on_progress)
            n_objects = removed.n_objects
            if not removed.is_complete:
                trouble = f"The shared store is not done. {_GOES_ON}"
        except TierFailed as error:
            trouble = f"The shared store does not answer: {error.message}. {_GOES_ON}"
        if trouble is not None:
            _log.warning("shared: deletion incomplete: %s", trouble)
            self._add_job(job)
            self._woken.set()
        return Deleted(
            counts={Place.SHARED: n_objects} if n_objects else {},
            unreached=() if trouble is None else (trouble,),
        )

    def adopt(self, tombstones: Iterable[Tombstone]) -> None:
        for tombstone in tombstones:
            self.forgotten.add(tombstone)
            self._add_job(Removal(tombstone))
        self._woken.set()

    def covers(self, owner: Owner) -> bool:
        """Return whether a deletion covers the owner. Raises TierFailed if that is not known."""
        self.ensure_fresh()
        return self.forgotten.cover(owner)

    def ensure_fresh(self) -> None:
        """Read the group if it was not read since a start or an outage. Raises TierFailed."""
        if self._is_stale:
            self.refresh()

    def note_write(self, name: str, owner: Owner) -> bool:
        """Note that an object was written. Return False, and remove it, if a deletion came."""
        if not self.forgotten.cover(owner):
            return True
        self._objects.remove([name])
        return False

    def _run(self, jobs: Sequence[Removal], seconds: float, on_progress: OnProgress) -> Removed:
        """Publish the tombstones of one namespace, and remove their objects."""
        deadline = time.monotonic() + seconds
        for job in jobs:
            if not job.is_second:
                self._publish(job.tombstone.scope, self._to_publish(job.tombstone))
        deletion = Deletion(self._objects, self._seal, deadline=deadline, on_progress=on_progress)
        removed = deletion.run([job.reach(self._now()) for job in jobs])
        if removed.is_complete:
            for job in jobs:
                self._end(job)
        return removed

    def _end(self, job: Removal) -> None:
        """Look again later: servers write until they know the deletion, and some are killed."""
        scope, at = job.tombstone.scope, job.tombstone.at
        with self._lock:
            if self._pending.get(scope) is job:
                del self._pending[scope]
            known = self._known.get(scope)
        if not job.is_second:
            is_dear = self._objects.reads_are_dear
            due_at = time.monotonic() + (DEAR_SETTLE_SECONDS if is_dear else SETTLE_SECONDS)
            self._add_job(Removal(job.tombstone, is_second=True, due_at=due_at))
        elif known is not None and known.own_at == at:
            self._publish(scope, known._replace(is_done=True))

    def _add_job(self, job: Removal) -> None:
        with self._lock:
            other = self._pending.get(job.tombstone.scope)
            if other is None or other.tombstone.at <= job.tombstone.at:
                self._pending[job.tombstone.scope] = job

    def _to_publish(self, tombstone: Tombstone) -> "_Known":
        """Return the tombstone as the store shall have it: later than the one it has."""
        with self._lock:
            before = self._known.get(tombstone.scope)
        if before is None:
            return _Known(tombstone.at, is_done=False, own_at=tombstone.at)
        if before.own_at >= tombstone.at:
            return before._replace(is_done=False)
        at = max(tombstone.at, before.at + _LEAST_STEP)
        return _Known(at, is_done=False, own_at=tombstone.at)

    def _publish(self, scope: Scope, known: "_Known") -> None:
        member = self._encoded(scope, known)
        self._objects.add(self._group, member, keep_seconds=KEEP_SECONDS)
        with self._lock:
            if known.replaces(self._known.get(scope)):
                self._known[scope] = known

    # -- deletions of other servers -------------------------------------------------------------

    def refresh(self) -> None:
        """Read the group, and take over what is new in it. Raises TierFailed."""
        with self._poll_lock:
            began_at = self._now()
            [members] = self._objects.members([self._group], limit=MAX_TOMBSTONES)
            newest, surplus = self._sorted_out(members)
            with self._lock:
                new = [self._take_over(each) for each in newest.values() if self._is_new(each)]
                for found in newest.values():
                    self._note_progress(found)
                lost, trimmed = self._compared(newest, is_full=len(members) >= MAX_TOMBSTONES)
            surplus += trimmed
            self._polled_at = began_at
            self._is_stale = False
            if surplus:
                self._objects.discard(self._group, surplus)
            for scope in lost[:MAX_RESTORED]:
                self._publish(scope, self._known[scope])
        for tombstone in new:
            self._tell(tombstone)

    def _sorted_out(self, members: Sequence[str]) -> tuple[dict[Scope, "_Found"], list[str]]:
        """Return the newest tombstone of each scope, and the members to remove."""
        now = self._now()
        newest: dict[Scope, _Found] = {}
        surplus = []
        for member in members:
            found = self._decoded(member)
            if found is None or not now - KEEP_SECONDS < found.at < now + MAX_AHEAD_SECONDS:
                surplus.append(member)
                continue
            other = newest.setdefault(found.scope, found)
            if other is not found:
                newest[found.scope] = later = max(found, other, key=lambda each: each.order)
                surplus.append(found.member if later is other else other.member)
        return newest, surplus

    def _is_new(self, found: "_Found") -> bool:
        known = self._known.get(found.scope)
        return known is None or found.at > known.at

    def _take_over(self, found: "_Found") -> Tombstone:
        """Note another server's deletion. Return it by this server's clock."""
        # The tombstone was published between the last read of the group and this one.
        earliest = found.at if self._polled_at is None else self._polled_at - found.delay
        own_at = min(max(found.at, earliest), self._now() - found.delay)
        self._known[found.scope] = _Known(found.at, found.is_done, own_at)
        return Tombstone(scope=found.scope, at=own_at)

    def _note_progress(self, found: "_Found") -> None:
        """Run a deletion whose server seems to have stopped before it was complete."""
        scope = found.scope
        known = self._known[scope]
        if found.at == known.at and found.is_done:
            self._known[scope] = known = known._replace(is_done=True)
        if known.is_done:
            self._undone_since.pop(scope, None)
        elif scope not in self._pending:
            since = self._undone_since.setdefault(scope, time.monotonic())
            if time.monotonic() - since > TAKE_OVER_SECONDS:
                tombstone = Tombstone(scope=scope, at=known.own_at)
                self._pending[scope] = Removal(tombstone, is_second=True)

    def _compared(
        self, newest: dict[Scope, "_Found"], *, is_full: bool
    ) -> tuple[list[Scope], list[str]]:
        """Return which tombstones the store has lost, and the members to remove for lack of room.

        All servers keep the same ones: the newest, and of sessions only if there is room. The
        others are forgotten here when the store does not have them any more.
        """
        oldest = self._now() - KEEP_SECONDS
        known = {scope: each for scope, each in self._known.items() if each.at > oldest}
        kept = list(known)
        if len(kept) > MAX_TOMBSTONES // 2:
            kept.sort(key=lambda scope: known[scope].worth(scope), reverse=True)
            del kept[MAX_TOMBSTONES // 2 :]
        staying = {*kept, *(() if is_full else newest)}
        self._known = {scope: each for scope, each in known.items() if scope in staying}
        trimmed = [each.member for scope, each in newest.items() if scope not in staying]
        return [] if is_full else [s for s in kept if _lacks(newest.get(s), known[s])], trimmed

    def _tell(self, tombstone: Tombstone) -> None:
        self.forgotten.add(tombstone)
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(tombstone)
            except Exception:  # the other listeners, and later deletions, must be told
                _log.exception("shared: a deletion of another server was not applied")

    # -- threads --------------------------------------------------------------------------------

    def _watch(self) -> None:
        seconds = DEAR_POLL_SECONDS if self._objects.reads_are_dear else POLL_SECONDS
        while True:
            self._woken.wait(seconds)
            self._woken.clear()
            if self._closing.is_set():
                return
            if not self._objects.health.is_well:
                continue
            try:
                self.refresh()
            except CacheError as error:
                _log.debug("shared: deletions not read: %s", error.message)
                continue
            except Exception:  # without this thread no deletion would arrive any more
                _log.exception("shared: deletions not read")
            if self._due() and (self._resumer is None or not self._resumer.is_alive()):
                self._resumer = threading.Thread(
                    target=self._resume, name="shared-deletion", daemon=True
                )
                self._resumer.start()

    def _resume(self) -> None:
        """Run the deletions that are due, one namespace at a time, until the store fails again."""
        for jobs in self._due().values():
            if self._closing.is_set():
                return
            try:
                removed = self._run(jobs, RESUME_SECONDS, lambda n_objects: None)
            except CacheError as error:
                _log.debug("shared: deletion incomplete: %s", error.message)
                return
            _log.info("shared: deletion resumed objects=%d complete=%s", *removed)

    def _due(self) -> dict[str | None, list[Removal]]:
        """Return the jobs that are due by namespace. Drop those that another process has done."""
        now = time.monotonic()
        with self._lock:
            self._pending = {
                scope: job
                for scope, job in self._pending.items()
                if job.is_second or not self._is_done(job.tombstone)
            }
            due = [job for job in self._pending.values() if job.due_at <= now]
        jobs: dict[str | None, list[Removal]] = {}
        for job in due:
            jobs.setdefault(job.tombstone.scope.namespace, []).append(job)
        return jobs

    def _is_done(self, tombstone: Tombstone) -> bool:
        known = self._known.get(tombstone.scope)
        # What is removed reaches CLOCK_SECONDS further than the deletion.
        return known is not None and known.is_done and tombstone.at <= known.own_at + CLOCK_SECONDS

    def _on_health(self) -> None:
        """Have the group read before anything else: others may have deleted in an outage."""
        self._is_stale = True
        self._woken.set()

    # -- members --------------------------------------------------------------------------------

    def _encoded(self, scope: Scope, known: "_Known") -> str:
        delay = max(self._now() - known.own_at, 0.0)
        member = _Member(scope.namespace, scope.session, known.at, delay, known.is_done)
        sealed = self._seal.seal(msgspec.json.encode(member), self._group)
        return base64.urlsafe_b64encode(sealed).decode()

    def _decoded(self, member: str) -> "_Found | None":
        try:
            sealed = base64.b64decode(member, altchars=b"-_", validate=True)
            wire = msgspec.json.decode(self._seal.open(sealed, self._group), type=_Member)
        except (ValueError, msgspec.MsgspecError, CacheError):
            return None
        if wire.namespace is None and wire.session is not None:
            return None
        scope = Scope(namespace=wire.namespace, session=wire.session)
        return _Found(scope, wire.at, wire.is_done, max(wire.delay, 0.0), member)


class _Known(NamedTuple):
    at: float  # as in the store
    is_done: bool  # its objects were removed
    own_at: float  # by the clock of this server

    def replaces(self, other: "_Known | None") -> bool:
        return other is None or (self.at, self.is_done) > (other.at, other.is_done)

    def worth(self, scope: Scope) -> tuple[bool, float]:
        """Order by what is kept first. A session's deletion that is done is needed least."""
        return scope.session is None or not self.is_done, self.at


class _Found(NamedTuple):
    """A member of the group. `delay`: seconds from the deletion until it was added."""

    scope: Scope
    at: float
    is_done: bool
    delay: float
    member: str

    @property
    def order(self) -> tuple[float, bool, str]:
        """The last of a scope counts, on every server."""
        return self.at, self.is_done, self.member


def _lacks(found: _Found | None, known: _Known) -> bool:
    return found is None or found.order[:2] < (known.at, known.is_done)


class _Member(msgspec.Struct, frozen=True, array_like=True):
    namespace: str | None
    session: str | None
    at: float
    delay: float
    is_done: bool
