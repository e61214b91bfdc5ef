"""Deletes what clients sent from every place of this server: engines, stores, records.

A deletion is written to the cache directory first. From then on no server of the directory brings
back what the deletion covers. Deletions that arrive while one is under way run together after it.
A watcher applies the deletions of other servers and of `rekindle cache forget`.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.shared.connection import SharedStore
from rekindle.cache.tools.forgetting import any_covers, forget_everything, forget_texts
from rekindle.errors import CacheError, RekindleError
from rekindle.generation.forgetting import (
    MAX_TOMBSTONES,
    NEVER,
    Deleted,
    Place,
    Scope,
    Tombstone,
    Tombstones,
    total,
)
from rekindle.generation.questions import Forget
from rekindle.models.pool import ModelPool
from rekindle.models.serving_model import ServingModel

T = TypeVar("T")
_log = logging.getLogger("rekindle.forgetting")

WATCH_SECONDS = 1.0  # between two looks at the directory; picked
ENGINE_SECONDS = 30.0  # for the answer of one engine; picked
# Another server may write turns until its own watcher has seen the deletion; picked.
AGAIN_SECONDS = 3.0
MAX_RECENT = 1000  # deletions that a model being loaded may have missed; picked
# Deletions wait for disks and stores in threads of their own: asyncio's serve requests.
MAX_DISK_THREADS, MAX_STORE_THREADS = 4, 4  # picked

Delete = Callable[[Tombstone], int]  # returns how much was deleted


class Records(NamedTuple):
    """Things of one place that this process keeps."""

    place: Place
    delete: Delete
    blocks: bool  # it waits for a disk, so it runs in a thread

    def delete_each(self, tombstones: Sequence[Tombstone]) -> list[Deleted]:
        return [self._deleted(tombstone) for tombstone in tombstones]

    def _deleted(self, tombstone: Tombstone) -> Deleted:
        try:
            n_deleted = self.delete(tombstone)
        except RekindleError as error:
            return Deleted(counts={}, unreached=(f"{self.place}: {error.message}.",))
        return Deleted(counts={self.place: n_deleted} if n_deleted else {})


class _Added(NamedTuple):
    at: float  # monotonic time
    tombstone: Tombstone


class Forgetting:
    """Runs on the event loop."""

    def __init__(
        self,
        pool: ModelPool,
        forgotten: Tombstones,
        records: Sequence[Records],
        *,
        directory: Path | None,  # None: nothing is stored on disk
        shared: SharedStore | None,
    ) -> None:
        self._pool = pool
        self._forgotten = forgotten
        self._records = records
        self._directory = directory
        self._file = TombstoneFile(directory) if directory is not None else None
        self._shared = shared
        self._unfinished: list[Tombstone] = []  # from before the start
        self._seen: dict[Scope, float] = {}  # what the file had when it was last read
        # Deletions that are not applied yet: those with a client that waits, and all others.
        self._asked: list[tuple[Tombstone, asyncio.Future[Deleted]]] = []
        self._heard: list[Tombstone] = []
        self._worker: asyncio.Task[None] | None = None  # applies them
        self._recent: deque[_Added] = deque(maxlen=MAX_RECENT)
        self._owed: deque[tuple[ServingModel, Tombstone]] = deque(maxlen=MAX_TOMBSTONES)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the server, once it has started
        self._tasks: set[asyncio.Task[Any]] = set()
        self._disk = ThreadPoolExecutor(MAX_DISK_THREADS, thread_name_prefix="forget")
        self._store = ThreadPoolExecutor(MAX_STORE_THREADS, thread_name_prefix="forget-shared")
        pool.on_loaded = self._catch_up

    def restore(self) -> None:
        """Read the deletions from before the start, and repeat them. Blocking, before `start`.

        A server that was killed may have written something after a deletion.
        """
        if self._file is not None:
            self._unfinished = self._read(self._file.unfinished)
        for tombstone in self._new_in(self._in_file()):
            self._forgotten.add(tombstone)
        for tombstone in self._shared.tombstones() if self._shared is not None else ():
            self._forgotten.add(tombstone)
        if self._directory is not None and self._forgotten.all():
            forget_texts(self._directory, [self._forgotten.cover])
        if self._shared is not None:
            self._shared.adopt(self._forgotten.all())

    def start(self) -> None:
        """Complete old deletions and watch for those of others, until the event loop ends."""
        self._follow(self._unfinished)
        self._spawn(self._forever(self._retry))
        if self._file is not None:
            self._spawn(self._forever(self._look))
        if self._shared is not None:
            self._loop = asyncio.get_running_loop()
            self._shared.on_tombstone(self._hear_from_thread)

    def close(self) -> None:
        """Begin nothing more. After the event loop has ended."""
        for executor in (self._disk, self._store):
            executor.shutdown(wait=False, cancel_futures=True)

    async def forget(self, scope: Scope, at: float) -> Deleted:
        """Delete everything in scope whose request had arrived by then.

        A caller that is cancelled does not stop the deletion.
        """
        tombstone = Tombstone(scope=scope, at=at)
        self._forgotten.add(tombstone)  # refuses from now on what the deletion covers
        work = asyncio.create_task(self._forget(tombstone))
        self._tasks.add(work)
        work.add_done_callback(self._tasks.discard)
        return await asyncio.shield(work)

    async def _forget(self, tombstone: Tombstone) -> Deleted:
        scope = tombstone.scope
        kept = await self._keep(tombstone)
        parts = await asyncio.gather(self._apply(tombstone), self._publish(tombstone))
        deleted = total([kept, *parts])
        _log.info(
            "forgetting: deleted namespace=%s session=%s counts=%s unreached=%d",
            "all" if scope.namespace is None else scope.namespace or "-",
            scope.session or "-",
            ",".join(f"{place}:{n}" for place, n in deleted.counts.items()) or "-",
            len(deleted.unreached),
        )
        return deleted

    async def _keep(self, tombstone: Tombstone) -> Deleted:
        """Write the deletion to the directory, so that every server and engine knows it."""
        unreached = []
        if self._file is not None:
            try:
                await _in_thread(self._disk, partial(self._file.add, tombstone))
            except CacheError as error:
                line = f"The deletion cannot be kept in the cache directory: {error.message}."
                unreached.append(line)
        self._kept(tombstone)
        return Deleted(counts={}, unreached=tuple(unreached))

    def _kept(self, tombstone: Tombstone) -> None:
        """Note when the directory had the deletion: models whose load began later have read it."""
        self._recent.append(_Added(time.monotonic(), tombstone))

    async def _publish(self, tombstone: Tombstone) -> Deleted:
        """Delete from the shared store, and have its other servers delete."""
        if self._shared is None:
            return Deleted(counts={})
        work = _in_thread(self._store, partial(self._shared.forget, tombstone))
        try:
            return await work
        except Exception as error:
            return _unreached("The shared store", error)

    # -- on this server -------------------------------------------------------------------------

    async def _apply(self, tombstone: Tombstone) -> Deleted:
        """Delete from every place of this server, with the deletions that wait as well."""
        answer: asyncio.Future[Deleted] = asyncio.get_running_loop().create_future()
        self._asked.append((tombstone, answer))
        self._wake()
        return await answer

    def _follow(self, tombstones: Sequence[Tombstone]) -> None:
        """Delete the same from every place of this server, in the background."""
        self._heard += tombstones
        self._wake()

    def _wake(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = self._spawn(self._work())

    async def _work(self) -> None:
        """Apply all deletions that wait at once, until none waits."""
        while self._asked or self._heard:
            asked, self._asked = self._asked, []
            heard, self._heard = self._heard, []
            try:
                deleted = await self._apply_all([tombstone for tombstone, _ in asked], heard)
            except Exception as error:  # every client must have an answer
                deleted = [_unreached("The deletion", error)] * len(asked)
            for (_, answer), part in zip(asked, deleted, strict=True):
                answer.set_result(part)

    async def _apply_all(
        self, asked: Sequence[Tombstone], heard: Sequence[Tombstone]
    ) -> list[Deleted]:
        """Return what each of `asked` has deleted. A failure in one place stops no other."""
        tombstones = [*asked, *heard]
        loaded = self._pool.serving()
        for serving in loaded:
            for tombstone in tombstones:
                serving.responder.forget(tombstone)
        work = [self._delete(each, tombstones) for each in self._records]
        work += [self._ask(serving, tombstones) for serving in loaded]
        parts = await asyncio.gather(*work)
        if self._directory is not None:
            # After the engines: what they hold is counted by them.
            groups = [[each] for each in asked] + ([heard] if heard else [])
            parts.append(await self._delete_in(self._directory, groups))
            self._spawn(self._repeat(self._directory, tombstones))
        return [total([part[n] for part in parts]) for n in range(len(asked))]

    async def _delete(self, records: Records, tombstones: Sequence[Tombstone]) -> list[Deleted]:
        try:
            if records.blocks:
                return await _in_thread(self._disk, partial(records.delete_each, tombstones))
            return records.delete_each(tombstones)
        except Exception as error:
            return [_unreached(records.place.capitalize(), error)] * len(tombstones)

    async def _delete_in(
        self, directory: Path, groups: Sequence[Sequence[Tombstone]]
    ) -> list[Deleted]:
        """Delete from the directory what no engine has deleted, of every model."""
        try:
            return await _in_thread(self._disk, partial(forget_everything, directory, groups))
        except Exception as error:
            return [_unreached("The cache directory", error)] * len(groups)

    async def _ask(self, serving: ServingModel, tombstones: Sequence[Tombstone]) -> list[Deleted]:
        """Have an engine delete. After its first failure the rest waits for `_retry`."""
        deleted: list[Deleted] = []
        try:
            for tombstone in tombstones:
                async with asyncio.timeout(ENGINE_SECONDS):
                    deleted.append(await serving.engine.ask(Forget(tombstone=tombstone)))
        except Exception as error:
            if not isinstance(error, (RekindleError, TimeoutError)):
                _log.error("forgetting: an engine failed to delete", exc_info=error)
            rest = tombstones[len(deleted) :]
            self._owed.extend((serving, tombstone) for tombstone in rest)
            line = (
                f"The engine of `{serving.card.id}` does not answer."
                " It deletes its part when it does."
            )
            deleted += [Deleted(counts={}, unreached=(line,))] * len(rest)
        return deleted

    async def _retry(self) -> None:
        """Ask engines again that did not answer. An unloaded engine has nothing left to delete."""
        owed = list(self._owed)
        self._owed.clear()
        await asyncio.gather(
            *(
                self._ask(each, [tombstone for serving, tombstone in owed if serving is each])
                for each in self._pool.serving()
            )
        )

    def _catch_up(self, serving: ServingModel, since: float) -> None:
        """Have a model that was just loaded delete what was deleted since the load began."""
        missed = [added.tombstone for added in self._recent if added.at >= since]
        if len(missed) == MAX_RECENT:
            missed = self._forgotten.all()  # there may have been more
        for tombstone in missed:
            serving.responder.forget(tombstone)
        self._spawn(self._ask(serving, missed))

    async def _repeat(self, directory: Path, tombstones: Sequence[Tombstone]) -> None:
        """Delete what another server wrote before it knew of the deletions."""
        await asyncio.sleep(AGAIN_SECONDS)
        await _in_thread(self._disk, partial(forget_texts, directory, [any_covers(tombstones)]))

    # -- deletions of others --------------------------------------------------------------------

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await work()
            except Exception:  # without this, no deletion of others would arrive
                _log.exception("forgetting: the deletions of others were not applied")

    async def _look(self) -> None:
        """Apply what other processes have written to the directory."""
        if self._file is None or not self._file.changed():
            return
        # All are noted before the first is applied, which may take a while.
        found = await _in_thread(self._disk, self._in_file)
        new = [each for each in self._new_in(found) if self._forgotten.add(each)]
        if new:
            _log.info("forgetting: another process deleted, applying it here scopes=%d", len(new))
            self._follow(new)
        for tombstone in new:
            self._kept(tombstone)
            self._spawn(self._publish(tombstone))

    def _new_in(self, found: Sequence[Tombstone]) -> list[Tombstone]:
        """Return what the file did not have before: memory drops the oldest, the file later."""
        before, self._seen = self._seen, {each.scope: each.at for each in found}
        return [each for each in found if before.get(each.scope, NEVER) < each.at]

    def _hear_from_thread(self, tombstone: Tombstone) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hear, tombstone)

    def _hear(self, tombstone: Tombstone) -> None:
        """Apply a deletion of a server that shares the store."""
        if self._forgotten.add(tombstone):
            self._spawn(self._keep(tombstone))
            self._follow([tombstone])

    def _in_file(self) -> list[Tombstone]:
        return self._read(self._file.all) if self._file is not None else []

    def _read(self, tombstones: Callable[[], list[Tombstone]]) -> list[Tombstone]:
        try:
            return tombstones()
        except CacheError as error:
            _log.warning("forgetting: the deletions of others cannot be read: %s", error.message)
            return []

    def _spawn(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        task = asyncio.create_task(_finished(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _finished(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        _log.exception("forgetting: failed")


async def _in_thread(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _unreached(what: str, error: Exception) -> Deleted:
    if isinstance(error, RekindleError):
        line = error.message
    else:
        _log.error("forgetting: %s failed", what, exc_info=error)
        line = f"{what} failed. The server log has the details."
    return Deleted(counts={}, unreached=(line,))
