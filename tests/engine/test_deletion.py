"""What is deleted does not come back: from slots, transfers, the disk, a restart."""

import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from rekindle.cache.disk.catalogue import CatalogRow
from rekindle.cache.disk.reconcile import Differences
from rekindle.cache.disk.tier import DiskTier
from rekindle.cache.entry import token_bytes
from rekindle.cache.forgetting.tombstone_file import TombstoneFile
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.stores.transfers import Lane
from rekindle.engine.orders import Ask
from rekindle.errors import PromptDeleted
from rekindle.generation.events import PromptEvaluated
from rekindle.generation.forgetting import Deleted, Place, Scope, Tombstone
from rekindle.generation.model_state import ModelClass
from rekindle.generation.questions import Forget, ForgetKey, ListStored
from rekindle.generation.request import CacheTerms
from tests.support.caches import cache_opener, in_one_go
from tests.support.deletions import forget, forget_key
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.index_check import check_index
from tests.support.loop_driver import Bench
from tests.support.stepped_transfers import AT_ONCE, Pace, SteppedPool

ALL_CLASSES = list(ModelClass)
WINDOW = 8  # tokens in a row that tell one prompt from another

_fresh = count(1_000_000, 10_000)


def text(length: int) -> list[int]:
    start = next(_fresh)
    return list(range(start, start + length))


def asked(session: str = "s", namespace: str = "", *, at: float | None = None) -> CacheTerms:
    now = time.time() if at is None else at
    return CacheTerms(session=session, namespace=namespace, asked_at=now)


class LazyPool(SteppedPool):
    """Does nothing on its own, not even when somebody waits."""

    def wait(self, timeout_seconds: float) -> object | None:
        return self.poll()


class Server:
    """An engine on a directory, whose transfers the test does."""

    def __init__(
        self, directory: Path, backend: FakeBackend | None = None, *, is_lazy: bool = False
    ) -> None:
        """`is_lazy`: the index is not read at the start."""
        self.directory = directory
        opened: list[PrefixCache] = []
        pools: list[SteppedPool] = []

        def pool(notify: Callable[[], None]) -> SteppedPool:
            pools.append((LazyPool if is_lazy else SteppedPool)(notify))
            return pools[-1]

        opener = cache_opener(directory, opened=opened, make_pool=pool)
        self.bench = Bench(backend or FakeBackend(n_slots=4), opener)
        [self.cache], [self.pool] = opened, pools

    def settle(self) -> None:
        """Let everything end: requests, exports, transfers."""
        n_quiet = 0
        for _ in range(2000):
            self.bench.step()
            is_busy = self.pool.work(AT_ONCE) or self.cache.poll()
            status = self.bench.loop.status()
            is_over = status.n_running == status.n_waiting == 0 and self.bench.is_at_rest
            n_quiet = n_quiet + 1 if is_over and not is_busy else 0
            if n_quiet > 2:
                return
        raise AssertionError("it never ends")

    def forget(self, question: Forget | ForgetKey | None = None) -> Deleted:
        order = Ask(forget() if question is None else question)
        self.bench.loop.inbox.put(order)
        for _ in range(500):
            self.bench.step()
            self.pool.work(AT_ONCE)
            if order.outcome.done():
                return order.outcome.result(timeout=0)
        raise AssertionError("no answer")

    def ask(self, name: str, prompt: list[int], terms: CacheTerms) -> int:
        """Run a request. Return how many tokens of its prompt it found."""
        self.bench.submit(name, prompt, 1, terms=terms)
        self.settle()
        [evaluated] = [e for e in self.bench.events(name) if isinstance(e, PromptEvaluated)]
        return evaluated.n_cached

    def step_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(500):
            if is_so():
                return
            self.bench.step()
        raise AssertionError("it never was")


def windows(prompt: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(prompt) - WINDOW + 1, WINDOW):
        yield prompt[first : first + WINDOW]


def encoded(tokens: list[int]) -> tuple[bytes, bytes]:
    return token_bytes(tokens), array("i", tokens).tobytes()


def in_files(directory: Path, prompt: list[int]) -> list[str]:
    """Return the files of a directory that hold a part of the prompt."""
    wanted = [bytes_ for piece in windows(prompt) for bytes_ in encoded(piece)]
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [path.name for path in files if any(each in path.read_bytes() for each in wanted)]


def in_process(server: Server, prompt: list[int]) -> list[str]:
    """Return the parts of an engine that hold a part of the prompt."""
    wanted = [token_bytes(piece) for piece in windows(prompt)]
    holders = []
    for node in server.cache._index.nodes():
        if any(each in node.tokens for each in wanted):
            holders.append(f"index {node.start}")
    for named in server.cache._names.all():
        if any(each in named.tokens for each in wanted):
            holders.append(f"name {named.name}")
    for slot in server.bench.loop._slots.all:
        if slot.keys is not None and any(
            each in slot.keys.between(0, slot.n_rows) for each in wanted
        ):
            holders.append(f"slot {slot.id}")
    return holders


def assert_is_gone(server: Server, prompt: list[int]) -> None:
    assert in_process(server, prompt) == []
    assert in_files(server.directory, prompt) == []


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_slot_that_runs_stores_nothing_after_a_delete(
    tmp_path: Path, model_class: ModelClass
) -> None:
    server = Server(tmp_path, FakeBackend(model_class=model_class, n_slots=2))
    prompt = text(2000)
    server.bench.submit("a", prompt, 300, terms=asked(), boundaries=(500, 1500))
    server.step_until(lambda: len(server.cache._index) > 2)
    server.pool.work(AT_ONCE)
    server.forget()
    server.settle()
    assert server.bench.tokens("a") == expected_reply(prompt, 300)
    assert_is_gone(server, prompt)
    server.bench.close()
    assert_is_gone(server, prompt)
    assert list(tmp_path.rglob("*.kv")) == []


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_request_deleted_while_it_decodes_ends_for_its_client_and_leaves_an_empty_slot(
    tmp_path: Path, model_class: ModelClass
) -> None:
    server = Server(tmp_path, FakeBackend(model_class=model_class, n_slots=1))
    prompt = text(300)
    server.bench.submit("a", prompt, 400, terms=asked())
    server.step_until(lambda: len(server.bench.tokens("a")) > 5)
    deleted = server.forget()
    assert deleted.counts[Place.LIVE] == 1
    server.settle()
    assert server.bench.tokens("a") == expected_reply(prompt, 400)
    assert server.bench.loop._slots.all[0].is_empty
    assert_is_gone(server, prompt)


def test_a_waiting_request_computes_cold_and_stores_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeBackend(n_slots=1))
    prompt = text(700)
    server.bench.ask("before", prompt, 1, terms=asked())
    server.bench.submit("runs", text(10), 100, terms=asked("other"))
    server.step_until(lambda: bool(server.bench.tokens("runs")))
    server.bench.submit("waits", prompt, 1, terms=asked())
    server.bench.step()
    server.forget(forget(session="s"))
    before = server.bench.backend.n_computed
    server.settle()
    assert server.bench.backend.n_computed - before >= len(prompt)
    assert_is_gone(server, prompt)


def test_a_restore_under_way_leaves_nothing(tmp_path: Path) -> None:
    first = Server(tmp_path)
    prompt = text(2000)
    first.bench.ask("a", prompt, 1, terms=asked())
    first.settle()
    first.bench.close()
    server = Server(tmp_path)
    server.settle()
    server.bench.submit("b", prompt, 2, terms=asked())
    for _ in range(3):
        server.bench.step()
        server.pool.work(Pace(1, 0))
    [sequence] = server.bench.loop._run_queue.running
    assert sequence.restore is not None
    server.forget()
    server.settle()
    assert server.bench.tokens("b") == expected_reply(prompt, 2)
    assert_is_gone(server, prompt)


def test_a_new_request_takes_no_rows_of_a_deleted_one_and_is_stored(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(600)
    server.bench.submit("old", prompt, 200, terms=asked())
    server.step_until(lambda: bool(server.bench.tokens("old")))
    server.forget()
    new = server.bench.ask("new", prompt, 1, terms=asked(at=time.time() + 1))
    assert new.evaluated.n_cached == 0
    server.settle()
    assert server.bench.ask("again", prompt, 1, terms=asked()).evaluated.n_cached == 600


def test_a_request_that_arrives_after_its_deletion_leaves_an_empty_slot(tmp_path: Path) -> None:
    """It was asked before the deletion, and has waited since."""
    server = Server(tmp_path)
    prompt, terms = text(600), asked(at=time.time() - 1)
    server.forget()
    server.bench.ask("late", prompt, 1, terms=terms)
    server.settle()
    assert all(slot.is_empty for slot in server.bench.loop._slots.all)
    assert server.ask("new", prompt, asked(at=time.time() + 1)) == 0


def test_a_follower_does_not_wait_for_a_deleted_prefill(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(4000)
    server.bench.submit("leads", prompt, 1, terms=asked())
    server.bench.step()
    server.bench.submit("follows", prompt, 1, terms=asked("t"))
    server.bench.step()
    [waiting] = server.bench.loop._run_queue.waiting
    assert waiting.leader is not None
    server.forget(forget(session="s"))
    server.settle()
    assert server.bench.tokens("follows") == expected_reply(prompt, 1)


def test_a_write_under_way_leaves_no_file_and_no_row(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(1500)
    server.pool.work(AT_ONCE)
    server.bench.ask("a", prompt, 1, terms=asked())
    assert server.cache._disk is not None
    assert len(server.cache._disk.writing) > 3
    server.pool.work(Pace(0, 2))  # two are written, the engine does not know it yet
    server.forget()
    server.settle()
    assert_is_gone(server, prompt)


def test_a_server_that_dies_before_it_deletes_finds_nothing_at_its_next_start(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    prompt, kept = text(700), text(700)
    server.bench.ask("a", prompt, 1, terms=asked(namespace="x"))
    server.bench.ask("b", kept, 1, terms=asked(namespace="y"))
    server.settle()
    server.bench.close()
    tombstone = Tombstone(scope=Scope(namespace="x"), at=time.time())
    TombstoneFile(tmp_path).add(tombstone)
    after = Server(tmp_path)
    after.settle()
    assert_is_gone(after, prompt)
    assert after.ask("c", kept, asked(namespace="y")) == 700


def test_another_server_on_the_directory_writes_nothing_that_was_deleted(tmp_path: Path) -> None:
    one, other = Server(tmp_path), Server(tmp_path)
    prompt = text(700)
    other.bench.ask("a", prompt, 1, terms=asked())
    one.forget()
    other.settle()  # it has not heard of the deletion, but its writes are refused
    assert in_files(tmp_path, prompt) == []
    later = text(700)
    other.bench.ask("b", later, 1, terms=asked(at=time.time() + 1))
    other.settle()
    assert in_files(tmp_path, later) != []


def test_a_delete_while_the_index_is_read_is_not_undone_by_it(tmp_path: Path) -> None:
    first = Server(tmp_path)
    prompts = [text(600) for _ in range(5)]
    for number, prompt in enumerate(prompts):
        first.bench.ask(f"{number}", prompt, 1, terms=asked())
    first.settle()
    first.bench.close()
    server = Server(tmp_path, is_lazy=True)
    # The catalogue is listed, and the engine has not heard of it.
    server.pool._work(Lane.WRITE, 1)
    server.bench.loop.inbox.put(Ask(forget()))
    server.bench.step()
    server.settle()
    for prompt in prompts:
        assert_is_gone(server, prompt)


def test_a_name_that_was_read_before_its_deletion_does_not_come_back(tmp_path: Path) -> None:
    first = Server(tmp_path)
    prompt = text(600)
    terms = CacheTerms(session="s", name="mine", asked_at=time.time())
    first.bench.submit("a", prompt, 0, terms=terms)
    first.settle()
    first.bench.close()
    server = Server(tmp_path, is_lazy=True)
    server.pool._work(Lane.WRITE, 1)  # names are on their way to the engine
    server.bench.loop.inbox.put(Ask(forget(session="s")))
    server.bench.step()
    server.settle()
    assert server.cache.is_listed
    assert_is_gone(server, prompt)


def test_deleting_a_session_keeps_what_others_have_sent(tmp_path: Path) -> None:
    server = Server(tmp_path)
    system, mine, theirs = text(512), text(600), text(600)
    server.bench.ask("a", system + mine, 1, terms=asked("a"))
    server.bench.ask("b", system + theirs, 1, terms=asked("b"))
    server.settle()
    deleted = server.forget(forget(session="a"))
    server.settle()
    assert deleted.counts[Place.DISK] == 4  # three blocks, and the logits after them
    assert_is_gone(server, mine)
    check_index(server.cache._index)
    again = server.bench.ask("c", system + theirs, 1, terms=asked("b"))
    assert again.evaluated.n_cached == len(system + theirs)
    server.forget(forget(session="b"))
    server.settle()
    assert_is_gone(server, system + theirs)


def test_deleting_a_namespace_leaves_the_others_alone(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(700)
    for namespace in ("x", "y"):
        server.bench.ask(namespace, prompt, 1, terms=asked(namespace=namespace))
    server.settle()
    server.forget(forget("x"))
    server.settle()
    found = {
        namespace: server.bench.ask(
            f"{namespace} again", prompt, 1, terms=asked(namespace=namespace)
        ).evaluated.n_cached
        for namespace in ("x", "y")
    }
    assert found == {"x": 0, "y": 700}


def test_names_and_pins_do_not_survive_a_deletion(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(600)
    terms = CacheTerms(session="s", name="mine", asked_at=time.time())
    server.bench.submit("a", prompt, 0, terms=terms)
    server.settle()
    deleted = server.forget(forget(session="s"))
    assert deleted.counts[Place.NAMES] == 1
    server.settle()
    assert_is_gone(server, prompt)


def test_a_request_that_waits_for_the_disk_fails_when_its_prompt_is_deleted(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    server.pool.work(AT_ONCE)
    terms = CacheTerms(persist=True, asked_at=time.time())
    server.bench.submit("a", text(600), 0, terms=terms)
    server.step_until(lambda: server.bench.loop._persisting.is_busy)
    server.forget()
    [*_, end] = server.bench.events("a")
    assert isinstance(end, PromptDeleted)


def test_a_deleted_key_does_not_come_back_from_a_slot_that_runs(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(600)
    server.bench.ask("a", prompt, 1, terms=asked())
    server.settle()
    [stored] = server.bench.question(ListStored(namespace="", limit=10))
    longer = prompt + server.bench.tokens("a") + text(300)
    server.bench.submit("b", longer, 300, terms=asked())
    server.step_until(lambda: bool(server.bench.tokens("b")))
    assert server.forget(forget_key(stored.key)).unreached == ()
    server.settle()
    assert server.bench.tokens("b") == expected_reply(longer, 300)
    assert_is_gone(server, longer)
    server.bench.close()
    assert in_files(tmp_path, longer) == []


@pytest.mark.parametrize("model_class", ALL_CLASSES)
@pytest.mark.parametrize("length", [100, 256, 600])
def test_a_conversation_that_is_deleted_by_its_listed_key_is_gone(
    tmp_path: Path, length: int, model_class: ModelClass
) -> None:
    """With the ends, checkpoints and blocks of all of its turns."""
    server = Server(tmp_path, FakeBackend(n_slots=4, model_class=model_class))
    prompt = text(length)
    for turn in range(3):
        prompt += text(50)
        server.ask(f"turn {turn}", prompt, asked())
        prompt += server.bench.tokens(f"turn {turn}")
    listed = server.bench.question(ListStored(namespace="", limit=10))
    server.forget(forget_key(max(listed, key=lambda each: each.n_tokens).key))
    server.settle()
    assert_is_gone(server, prompt)
    assert list(server.cache._index.nodes()) == []
    server.bench.close()
    assert in_files(tmp_path, prompt) == []


def test_a_deletion_empties_the_quarantine_and_the_log_of_the_catalogue(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt, other = text(600), text(600)
    server.bench.ask("a", prompt, 1, terms=asked())
    server.bench.ask("b", other, 1, terms=asked(namespace="y"))
    server.settle()
    for node in server.cache.match(server.cache.keys(prompt, ""), 600).nodes[::-1]:
        server.cache.distrust(node, "a test")
    server.settle()
    assert in_files(tmp_path, prompt) != []
    deleted = server.forget(forget("y"))  # nobody knows whose the quarantined files are
    assert deleted.counts[Place.QUARANTINE] == 3
    assert deleted.unreached == ()
    server.forget()  # the slot has the rows
    server.settle()
    assert_is_gone(server, prompt)
    assert_is_gone(server, other)


def test_a_start_does_not_index_deleted_rows_before_it_deletes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Server(tmp_path)
    first.bench.ask("a", text(600), 1, terms=asked())
    first.settle()
    first.bench.close()
    TombstoneFile(tmp_path).add(forget().tombstone)
    monkeypatch.setattr(DiskTier, "reconcile", lambda self, on_progress: Differences([], 0))
    server = Server(tmp_path)
    assert server.cache.is_listed
    assert len(server.cache._index) == 0


def test_a_prompt_is_not_matched_between_two_slices_of_its_deletion(tmp_path: Path) -> None:
    server = Server(tmp_path)
    prompt = text(600)
    server.bench.ask("a", prompt, 1, terms=asked())
    keys = server.cache.keys(prompt, "")
    assert server.cache.match(keys, 600).n_tokens == 600
    tombstone = forget().tombstone
    server.cache.begin_to_forget(tombstone)
    slices = server.cache.forget(tombstone)
    next(slices)
    assert len(server.cache._index) > 0
    assert server.cache.match(keys, 600).n_tokens == 0
    in_one_go(slices)
    assert len(server.cache._index) == 0


def test_a_delete_in_the_middle_of_a_long_index_is_carried_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Server(tmp_path)
    prompts = [text(600) for _ in range(5)]
    for number, prompt in enumerate(prompts):
        first.bench.ask(f"{number}", prompt, 1, terms=asked())
    first.settle()
    first.bench.close()
    server = Server(tmp_path, is_lazy=True)
    listed = DiskTier.rows
    left: list[int] = []

    def rows(tier: DiskTier) -> Iterator[list[CatalogRow]]:
        for batch in listed(tier):
            yield batch
            if not left:
                server.bench.loop.inbox.put(Ask(forget()))
                server.bench.step()
                yield []
                left.append(len(list(tmp_path.rglob("*.kv"))))

    monkeypatch.setattr(DiskTier, "rows", rows)
    server.settle()
    assert left == [0]
    for prompt in prompts:
        assert_is_gone(server, prompt)


N_ROUNDS = 30
Place_ = tuple[str, str]  # namespace and session


@pytest.mark.parametrize("seed", range(6))
def test_nothing_comes_back_in_any_order_of_events(tmp_path: Path, seed: int) -> None:
    """Requests, deletions, transfers, kills and starts in random order; then a look everywhere."""
    rng = random.Random(seed)
    model_class = rng.choice(ALL_CLASSES)

    def start() -> Server:
        backend = FakeBackend(model_class=model_class, n_slots=3, n_cells=4096)
        return Server(tmp_path, backend, is_lazy=rng.random() < 0.5)

    server = start()
    names = count()
    gone: list[list[int]] = []
    kept: dict[Place_, list[list[int]]] = defaultdict(list)
    for _ in range(N_ROUNDS):
        namespace, session = rng.choice("xy"), rng.choice("st")
        known = kept[namespace, session]
        match rng.randrange(9):
            case 0 | 1 | 2:
                before = rng.choice(known) if known and rng.random() < 0.5 else []
                prompt = before + text(rng.randrange(100, 900))
                known.append(prompt)
                time.sleep(0.001)  # the clock goes on between a deletion and a request
                terms = asked(session, namespace)
                server.bench.submit(f"r{next(names)}", prompt, rng.randrange(1, 60), terms=terms)
            case 3 | 4 | 5:
                for _ in range(rng.randrange(1, 30)):
                    server.bench.step()
            case 6:
                server.pool.work(Pace(rng.randrange(4), rng.randrange(12)))
            case 7:
                sessions = rng.choice(["s", "t", "st"])
                question = forget(namespace, None if sessions == "st" else sessions)
                TombstoneFile(tmp_path).add(question.tombstone)  # the server does this first
                server.bench.loop.inbox.put(Ask(question))
                server.bench.step()
                for each in sessions:
                    gone += kept.pop((namespace, each), [])
            case 8 if rng.random() < 0.5:
                server.pool.work(Pace(0, rng.randrange(20)))
                kept.clear()
                server = start()  # what the one before was about to do is lost
    server.settle()
    check_index(server.cache._index)
    for prompt in gone:
        assert_is_gone(server, prompt[-100:])  # the rest may be that of another prompt
    if model_class is ModelClass.DENSE:
        for (namespace, session), prompts in kept.items():
            for prompt in prompts:
                n_found = server.ask(f"r{next(names)}", prompt, asked(session, namespace))
                assert n_found >= len(prompt) - 1
    server.bench.close()
    for prompt in gone:
        assert in_files(tmp_path, prompt[-100:]) == []
