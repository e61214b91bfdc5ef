"""Reuse of live and stored rows, counted on a backend that computes nothing itself."""

from itertools import count

import pytest

from rekindle.cache.entry import Kind
from rekindle.engine.orders import Cancel
from rekindle.errors import ContextFull, DecodeFailed
from rekindle.generation.events import CachedSpan, CacheSource, PromptEvaluated
from rekindle.generation.model_state import ModelClass
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench

ALL_CLASSES = list(ModelClass)
# Models that cannot trim rows resume from a checkpoint at most this far before a prompt's end.
MAX_STEP_BACK = 64

_fresh = count(1_000_000, 100_000)


def text(length: int) -> list[int]:
    """Tokens that share nothing with any other text."""
    start = next(_fresh)
    return list(range(start, start + length))


def least_reused(model_class: ModelClass, n_shared: int) -> int:
    return n_shared if model_class is ModelClass.DENSE else n_shared - MAX_STEP_BACK


@pytest.mark.parametrize(
    ("cached", "prompt", "n_reused"),
    [
        ([], [1, 2, 3], 0),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], 4),
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 9, 4, 5], 2),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3], 2),
        ([1, 2, 3], [1], 0),
        ([1, 2, 3], [7, 8, 9], 0),
    ],
)
@pytest.mark.parametrize("holder", ["live", "stored"])
def test_a_token_is_computed_for_its_logits_unless_they_are_kept(
    cached: list[int], prompt: list[int], n_reused: int, holder: str
) -> None:
    bench = Bench(FakeBackend(n_slots=1))
    if cached:
        bench.ask("cached", cached, 1)
    if holder == "stored":
        bench.ask("other", text(300), 1)
    asked = bench.ask("prompt", prompt)
    assert asked.evaluated.n_cached == n_reused
    assert asked.n_computed == len(prompt) - n_reused + 7
    assert asked.tokens == expected_reply(prompt, 8)


def test_only_the_suffix_after_the_live_tokens_is_computed() -> None:
    bench = Bench(FakeBackend())
    shared = text(1000)
    bench.ask("a", shared, 1)
    longer = shared + text(50)
    asked = bench.ask("b", longer, 1)
    assert asked.n_computed == 50
    assert asked.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, 1000),)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_prompt_and_reply_are_both_reusable(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    prompt = text(300)
    reply = bench.ask("a", prompt, 40).tokens
    asked = bench.ask("b", prompt + reply + text(20), 1)
    # The last token of the reply was sampled and never computed.
    assert asked.n_computed == 1 + 20


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_returning_conversation_finds_all_of_its_rows(model_class: ModelClass) -> None:
    """One slot; A, B, C that shares the beginning of A, A again."""
    bench = Bench(FakeBackend(n_slots=1, model_class=model_class))
    a = text(1500)
    bench.ask("a", a)
    bench.ask("b", text(900))
    bench.ask("c", a[:700] + text(200))
    again = bench.ask("a again", a)
    assert again.evaluated.n_cached >= least_reused(model_class, 1499)
    assert again.tokens == expected_reply(a, 8)


def test_restoring_an_entry_leaves_it_whole() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    a = text(1000)
    bench.ask("a", a)
    for turn in range(3):
        bench.ask(f"other {turn}", text(600))
        # What is computed behind the restored copy must not show in the stored one.
        asked = bench.ask(f"a {turn}", a + text(30))
        assert asked.evaluated.n_cached == 1000
        assert {span.source for span in asked.evaluated.spans} == {CacheSource.MEMORY}


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_alternating_costs_two_cold_prefills(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(n_slots=1, model_class=model_class))
    conversations = [text(1200), text(1200)]
    computed = [bench.ask(f"cold {n}", conversations[n], 1).n_computed for n in (0, 1)]
    assert computed == [1200, 1200]
    for turn in range(5):
        for n in (0, 1):
            asked = bench.ask(f"{turn} {n}", conversations[n], 1)
            assert asked.n_computed <= 1200 - least_reused(model_class, 1199)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_new_session_reuses_the_system_prompt_inside_a_long_one(
    model_class: ModelClass,
) -> None:
    bench = Bench(FakeBackend(n_slots=1, n_cells=20_000, model_class=model_class))
    system = text(300)
    bench.ask("long", system + text(12_000), 1, boundaries=(300,))
    bench.ask("other", text(500), 1)
    asked = bench.ask("short", system + text(20), 1, boundaries=(300,))
    assert asked.n_computed == 20


def test_an_entry_serves_any_shared_length() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    a = text(1000)
    bench.ask("a", a)
    for n_shared in (1, 255, 256, 257, 511, 600, 999):
        bench.ask(f"other {n_shared}", text(300))
        asked = bench.ask(f"shares {n_shared}", a[:n_shared] + text(40), 1)
        assert asked.evaluated.n_cached == n_shared
        assert asked.n_computed == 40


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_dropping_the_last_message_costs_nothing(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    history = text(500)
    first = history + text(40)
    bench.ask("with a reminder", first, boundaries=(500, 535))
    asked = bench.ask("without", history + text(60), 1, boundaries=(500, 555))
    assert asked.n_computed == 60


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_discarded_fork_leaves_the_branch_point_reusable(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(n_slots=2, model_class=model_class))
    trunk = text(800)
    bench.ask("trunk", trunk, 1, boundaries=(800,))
    bench.ask("branch", trunk + text(300), 1, boundaries=(800,))
    bench.ask("other", text(300), 1)
    bench.ask("another", text(300), 1)
    asked = bench.ask("back", trunk + text(100), 1, boundaries=(800,))
    assert asked.n_computed <= 100 + 1


def test_a_reply_that_the_client_has_changed_is_cut_off_and_found_again() -> None:
    """In a fork, its rows would stay between those of the conversation."""
    bench = Bench(FakeBackend(n_slots=4))
    first = text(300)
    reply = bench.ask("first", first, 8).tokens
    changed = [*first, *text(9)]
    bench.ask("changed", changed, 1)
    assert [slot.n_rows > 0 for slot in bench.loop._slots.all].count(True) == 1
    again = bench.ask("as it was", [*first, *reply, 5], 1)
    assert again.n_computed == 2  # the last token of the reply, and the new one
    assert again.tokens == expected_reply([*first, *reply, 5], 1)


@pytest.mark.parametrize("n_reply", [8, 300])
def test_a_conversation_beside_another_with_the_same_beginning_stays_live(n_reply: int) -> None:
    bench = Bench(FakeBackend(n_slots=4))
    shared = text(300)
    one, two = [*shared, *text(20)], [*shared, *text(20)]
    bench.ask("one", one, n_reply)
    bench.ask("two", two, n_reply)
    for prompt in (one, two):
        sources = {span.source for span in bench.ask(f"{prompt[-1]}", prompt, 1).evaluated.spans}
        assert sources == {CacheSource.LIVE}


def test_without_cache_prompt_nothing_is_read_and_nothing_is_kept() -> None:
    bench = Bench(FakeBackend())
    prompt = text(600)
    bench.ask("kept", prompt, 1)
    asked = bench.ask("cold", prompt, 1, cache_prompt=False)
    assert asked.n_computed == 600
    assert asked.evaluated.spans == ()
    secret = text(600)
    bench.ask("secret", secret, 1, cache_prompt=False)
    assert bench.ask("again", secret, 1).n_computed == 600


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_only_completed_rows_are_reused_after_a_failed_decode(
    model_class: ModelClass,
) -> None:
    backend = FakeBackend(n_slots=1, model_class=model_class)
    bench = Bench(backend)
    prompt = text(1200)
    bench.submit("a", prompt, boundaries=(512,))
    bench.step()  # 512 computed, and stored
    backend.decode_failures.append(DecodeFailed("no", rows_intact=True))
    bench.run()
    assert isinstance(bench.events("a")[-1], DecodeFailed)
    asked = bench.ask("again", prompt, boundaries=(512,))
    assert asked.evaluated.n_cached == 512
    assert asked.tokens == expected_reply(prompt, 8)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_cancelled_prefill_is_resumed(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(n_slots=1, model_class=model_class))
    prompt = text(3000)
    bench.submit("a", prompt)
    for _ in range(3):
        bench.step()
    bench.loop.inbox.put(Cancel("a"))
    bench.step()
    asked = bench.ask("again", prompt, 1)
    assert asked.evaluated.n_cached >= 1024
    assert asked.tokens == expected_reply(prompt, 1)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
@pytest.mark.parametrize("n_slots", [4, 16])
def test_requests_that_share_a_prompt_compute_it_once(
    model_class: ModelClass, n_slots: int
) -> None:
    bench = Bench(FakeBackend(n_slots=n_slots, n_cells=30_000, model_class=model_class))
    shared = text(2000)
    prompts = {f"agent {n}": shared + text(30) for n in range(8)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, boundaries=(2000,))
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 8)
    assert bench.backend.n_computed <= 2000 + 8 * (30 + 7)


def test_identical_requests_compute_their_prompt_once() -> None:
    bench = Bench(FakeBackend(n_slots=4))
    prompt = text(1000)
    for n in range(4):
        bench.submit(str(n), prompt, 1)
    bench.run()
    assert bench.backend.n_computed == 1000
    for n in range(4):
        assert bench.tokens(str(n)) == expected_reply(prompt, 1)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_when_the_first_is_cancelled_the_next_resumes_from_its_rows(
    model_class: ModelClass,
) -> None:
    bench = Bench(FakeBackend(n_slots=4, n_cells=30_000, model_class=model_class))
    shared = text(3000)
    prompts = {str(n): shared + text(20) for n in range(4)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 1)
    for _ in range(3):
        bench.step()
    for name in ("0", "1"):
        bench.loop.inbox.put(Cancel(name))
        bench.step()
    bench.run()
    assert bench.tokens("2") == expected_reply(prompts["2"], 1)
    assert bench.tokens("3") == expected_reply(prompts["3"], 1)
    # Without rows to cut, what was computed behind the last checkpoint is lost.
    n_lost = 0 if model_class is ModelClass.DENSE else 2 * 512
    assert bench.backend.n_computed <= 3000 + 4 * 20 + n_lost


STATES = [each for each in ALL_CLASSES if each not in (ModelClass.DENSE, ModelClass.OPAQUE)]


@pytest.mark.parametrize("model_class", STATES)
@pytest.mark.parametrize("n_between", [0, 6])
def test_a_third_prompt_resumes_where_two_prompts_diverged(
    model_class: ModelClass, n_between: int
) -> None:
    """System prompts that end with a date: nothing but the prompts tells where they part."""
    bench = Bench(FakeBackend(n_slots=2, n_cells=30_000, model_class=model_class))
    shared = text(1300)
    prompts = [shared + text(150) for _ in range(4)]
    first, second = (bench.ask(str(n), prompts[n], 1) for n in range(2))
    for n in range(n_between):
        bench.ask(f"other {n}", text(900), 1)
    third, fourth = (bench.ask(str(n), prompts[n], 1) for n in (2, 3))
    assert first.evaluated.n_missing_checkpoint_tokens == 0
    assert second.evaluated.n_missing_checkpoint_tokens > 1000
    assert third.evaluated.n_cached == fourth.evaluated.n_cached == 1300
    for n, asked in ((2, third), (3, fourth)):
        assert asked.tokens == expected_reply(prompts[n], 1)
        assert asked.evaluated.n_missing_checkpoint_tokens == 0


@pytest.mark.parametrize("model_class", STATES)
def test_an_evicted_checkpoint_is_no_divergence(model_class: ModelClass) -> None:
    """The same conversation continues; only more memory would have helped."""
    bench = Bench(FakeBackend(n_slots=1, n_cells=30_000, model_class=model_class))
    prompt = text(1300)
    bench.ask("first", prompt, 1)
    bench.ask("other", text(900), 1)
    index = bench.loop._cache._index
    for node in [each for each in index.nodes() if each.kind is Kind.CHECKPOINT]:
        bench.loop._cache._holdings.remove(node, node.where)
    asked = bench.ask("on", prompt + text(100), 1)
    assert asked.evaluated.n_cached == 0
    assert asked.evaluated.n_missing_checkpoint_tokens == 0


def test_an_evicted_recurrent_checkpoint_is_stored_again_with_its_slot() -> None:
    bench = Bench(FakeBackend(n_slots=1, n_cells=30_000, model_class=ModelClass.RECURRENT))
    prompt = text(1300)
    bench.ask("first", prompt, 1)
    index = bench.loop._cache._index
    for node in [each for each in index.nodes() if each.kind is Kind.CHECKPOINT]:
        bench.loop._cache._holdings.remove(node, node.where)
    bench.ask("other", text(900), 1)
    assert bench.ask("on", prompt + text(100), 1).evaluated.n_cached >= 1300


def test_a_running_stream_is_forked_without_disturbing_it() -> None:
    bench = Bench(FakeBackend())
    prompt = text(600)
    bench.submit("first", prompt, 40)
    for _ in range(10):
        bench.step()
    before = bench.backend.n_computed
    bench.submit("second", prompt + text(10), 1)
    bench.run()
    assert bench.tokens("first") == expected_reply(prompt, 40)
    [evaluated] = [each for each in bench.events("second") if isinstance(each, PromptEvaluated)]
    assert evaluated.n_cached == 600
    assert bench.backend.n_computed - before <= 10 + 40


def test_a_full_context_empties_idle_slots_before_requeueing() -> None:
    backend = FakeBackend(n_slots=4, n_cells=2000)
    bench = Bench(backend)
    for n in range(3):
        bench.ask(f"idle {n}", text(500), 1)
    big = text(1500)
    asked = bench.ask("big", big, 300)
    assert asked.tokens == expected_reply(big, 300)
    assert asked.n_computed == 1500 + 299


def test_an_unexpectedly_full_context_costs_an_idle_slot_not_a_request() -> None:
    backend = FakeBackend(n_slots=2)
    bench = Bench(backend)
    bench.ask("idle", text(300), 1)
    prompt = text(100)
    bench.submit("a", prompt)
    bench.step()
    backend.decode_failures.append(ContextFull("no"))
    bench.run()
    assert bench.tokens("a") == expected_reply(prompt, 8)
    assert bench.backend.n_computed == 300 + 100 + 7


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_preempted_sequence_resumes_from_stored_rows(model_class: ModelClass) -> None:
    backend = FakeBackend(n_slots=2, n_cells=2048, model_class=model_class)
    bench = Bench(backend)
    prompts = {"a": text(900), "b": text(900)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 200)
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 200)
    n_needed = 2 * (900 + 199)
    assert n_needed <= backend.n_computed <= n_needed + 2 * MAX_STEP_BACK
    bench.assert_nothing_is_left()


def test_without_any_store_live_rows_are_still_reused() -> None:
    bench = Bench(FakeBackend(n_slots=2), cache_opener(memory_bytes=0))
    prompt = text(700)
    bench.ask("a", prompt, 1)
    assert bench.ask("b", prompt + text(10), 1).n_computed == 10


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_a_model_that_cannot_be_stored_still_continues_an_idle_slot(
    model_class: ModelClass,
) -> None:
    backend = FakeBackend(model_class=model_class, off_because="The round trip failed.")
    bench = Bench(backend)
    prompt = text(300)
    reply = bench.ask("a", prompt).tokens
    assert bench.ask("b", prompt + reply + text(10), 1).n_computed == 1 + 10
    bench.ask("shares a part", prompt[:200] + text(50), 1)
    assert not backend.exports + backend.imports
    assert not backend.copies
    assert not backend.trims
    cache = bench.loop.status().cache
    assert cache is not None
    assert cache.off_because == "The round trip failed."


def test_a_prompt_whose_twin_is_half_computed_waits_for_the_rest_however_short() -> None:
    """As n replies to one prompt, which arrive one after the other."""
    bench, prompt = Bench(FakeBackend(n_slots=4, n_ubatch=256)), text(300)
    bench.submit("first", prompt, 1)
    bench.step()
    assert bench.backend.n_computed == 256
    for name in ("second", "third"):
        bench.submit(name, prompt, 1)
    bench.run()
    assert bench.backend.n_computed == len(prompt)
