"""The logits after a prompt are kept: the same prompt is answered without any computation."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache.entry import Kind
from rekindle.cache.index import HERE, Match, Node
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.restore import Restore
from rekindle.engine.slots import MAX_ENDS
from rekindle.generation.events import CachedSpan, CacheSource, PromptEvaluated
from rekindle.generation.model_state import ModelClass
from rekindle.generation.questions import ForgetKey, ListStored, Quarantine
from rekindle.generation.request import CacheTerms, Sampling
from tests.support.caches import cache_opener
from tests.support.fake_backend import FakeBackend, expected_reply
from tests.support.loop_driver import Bench
from tests.support.preparers import SteppedPreparer

PENALISED = Sampling(temperature=0, repeat_penalty=1.1)

_fresh = itertools.count(10_000, 10_000)


def text(length: int) -> list[int]:
    start = next(_fresh)
    return list(range(start, start + length))


def ends(bench: Bench) -> list[Node]:
    nodes: list[Node] = list(bench.loop._cache._index.nodes())
    return [node for node in nodes if node.kind is Kind.CHECKPOINT]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
@pytest.mark.parametrize("max_tokens", [1, 8, 300])
def test_a_prompt_that_is_sent_again_computes_no_token_of_it(length: int, max_tokens: int) -> None:
    bench = Bench(FakeBackend())
    prompt = text(length)
    bench.ask("cold", prompt, max_tokens)
    warm = bench.ask("warm", prompt)
    assert warm.evaluated.spans == (CachedSpan(CacheSource.LIVE, 0, length),)
    assert warm.tokens == expected_reply(prompt, 8)
    assert warm.n_computed == 7


def test_the_end_of_a_prompt_survives_eviction_and_a_restart(tmp_path: Path) -> None:
    prompt = text(700)
    bench = Bench(FakeBackend(n_slots=1), cache_opener(tmp_path))
    bench.ask("cold", prompt)
    bench.ask("other", text(100))
    stored = bench.ask("from memory", prompt)
    assert stored.evaluated.spans == (CachedSpan(CacheSource.MEMORY, 0, 700),)
    assert stored.n_computed == 7
    bench.close()
    bench = Bench(FakeBackend(), cache_opener(tmp_path))
    restarted = bench.ask("from disk", prompt)
    assert restarted.evaluated.spans == (CachedSpan(CacheSource.DISK, 0, 700),)
    assert restarted.n_computed == 7
    assert restarted.tokens == expected_reply(prompt, 8)


def test_an_earlier_prompt_of_a_conversation_needs_only_its_stored_end() -> None:
    """Its rows are live. The slot has the end of the last prompt only."""
    bench = Bench(FakeBackend())
    first = text(300)
    reply = bench.ask("first", first).tokens
    bench.ask("second", [*first, *reply, *text(40)])
    n_imports = len(bench.backend.imports)
    again = bench.ask("first again", first)
    assert (again.evaluated.n_cached, again.n_computed) == (300, 7)
    assert len(bench.backend.imports) == n_imports
    assert again.tokens == expected_reply(first, 8)


def test_a_follower_forks_the_whole_prompt_with_its_end() -> None:
    bench = Bench(FakeBackend())
    prompt = text(900)
    bench.submit("leads", prompt, 20)
    bench.submit("follows", prompt, 20)
    bench.run()
    assert bench.tokens("leads") == bench.tokens("follows") == expected_reply(prompt, 20)
    assert bench.backend.n_computed == 900 + 2 * 19


def test_an_end_that_is_damaged_is_a_miss_and_the_last_token_is_computed() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    bench.ask("cold", prompt)
    bench.ask("other", text(100))
    [end] = [node for node in ends(bench) if node.stop == 600]
    entries = bench.loop._cache._memory._entries
    entries[end.key] = replace(entries[end.key], payload=b"short")
    warm = bench.ask("warm", prompt)
    assert warm.tokens == expected_reply(prompt, 8)
    assert warm.evaluated.n_cached < 600
    assert bench.loop._cache.counters.disk.quarantined == 1
    assert bench.backend.n_sampled_from_stored == 0


def test_without_its_end_a_prompt_that_is_all_there_computes_one_token() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    bench.ask("cold", prompt)
    bench.ask("other", text(100))
    cache: PrefixCache = bench.loop._cache
    for node in ends(bench):
        cache._holdings.discard(node)
    warm = bench.ask("warm", prompt)
    assert (warm.evaluated.n_cached, warm.n_computed) == (599, 1 + 7)
    assert warm.tokens == expected_reply(prompt, 8)


def test_rows_that_are_gone_make_their_end_useless() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    bench.ask("cold", prompt, 1)
    bench.ask("other", text(100), 1)
    cache: PrefixCache = bench.loop._cache
    behind = [node for node in cache._index.nodes() if node.start == 512]
    [short] = [node for node in behind if node.kind is Kind.BLOCK]
    cache._holdings.discard(short)
    warm = bench.ask("warm", prompt)
    assert (warm.evaluated.n_cached, warm.n_computed) == (512, 88 + 7)


def test_a_prompt_that_may_not_be_cached_leaves_no_end() -> None:
    bench = Bench(FakeBackend())
    bench.submit("private", text(300), cache_prompt=False)
    bench.run()
    assert ends(bench) == []


def test_another_namespace_does_not_find_the_end() -> None:
    bench = Bench(FakeBackend())
    prompt = text(300)
    bench.ask("mine", prompt, terms=CacheTerms(namespace="mine"))
    assert bench.ask("theirs", prompt, terms=CacheTerms(namespace="theirs")).evaluated.n_cached == 0


@pytest.mark.parametrize(
    "model_class", [each for each in ModelClass if each is not ModelClass.DENSE]
)
def test_a_model_with_checkpoints_stores_no_logits_in_their_place(model_class: ModelClass) -> None:
    bench = Bench(FakeBackend(model_class=model_class))
    prompt = text(600)
    bench.ask("cold", prompt)
    bench.ask("warm", prompt)
    assert bench.backend.n_sampled_from_stored == 0
    for node in ends(bench):
        payload = bench.loop._cache._holdings.payload(node)
        assert payload is not None
        assert len(payload) > FakeBackend.logits_bytes


def test_a_requeued_reply_goes_on_from_its_tokens() -> None:
    """The slot has the end of the prompt. It is not sampled a second time."""
    bench = Bench(FakeBackend(n_slots=2, n_cells=1024))
    prompts = {"one": text(300), "two": text(300)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 300)
    bench.run(2000)
    for name, prompt in prompts.items():
        assert bench.tokens(name) == expected_reply(prompt, 300)


def test_a_slot_keeps_few_ends_while_nothing_is_stored() -> None:
    bench = Bench(FakeBackend(n_slots=1), cache_opener(memory_bytes=0))
    prompt = text(50)
    for turn in range(MAX_ENDS + 3):
        prompt += [*bench.ask(f"turn {turn}", prompt).tokens, *text(5)]
    assert len(bench.loop._slots.all[0].ends) <= MAX_ENDS


def test_a_prompt_that_crashed_the_engine_loses_its_end_too() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    bench.ask("cold", prompt, 1)
    assert bench.question(Quarantine(namespace="", tokens=tuple(prompt))) == 4
    assert [node for node in ends(bench) if node.stop == 600] == []


def test_the_first_token_of_a_kept_end_is_delivered_before_the_next_batch() -> None:
    bench = Bench(FakeBackend())
    prompt = text(300)
    bench.ask("cold", prompt)
    decode, n_delivered = bench.backend.decode, []

    def noting(*arguments: Any, **keywords: Any) -> Any:
        n_delivered.append(len(bench.tokens("warm")))
        return decode(*arguments, **keywords)

    bench.backend.decode = noting  # type: ignore[method-assign]
    bench.ask("warm", prompt)
    assert n_delivered[0] == 1


def test_a_crash_while_a_kept_end_is_sampled_is_counted_for_its_request() -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    sample, seen = bench.backend.sample_stored, []

    def noting(*arguments: Any) -> Any:
        seen.append(bench.loop._activity.last().numbers)
        return sample(*arguments)

    bench.backend.sample_stored = noting  # type: ignore[method-assign,assignment]
    bench.submit("late", text(300), 8, sampling=PENALISED, number=6)
    for _ in range(5):
        bench.loop._activity.begin_step()
        bench.step()
    preparer.work()
    bench.loop._activity.begin_step()
    bench.run()
    assert seen == [(6,)]


def test_a_prompt_is_reported_as_evaluated_before_its_sampler_is_ready() -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(), preparer=preparer)
    prompt = text(300)
    bench.ask("cold", prompt)
    bench.submit("late", prompt, sampling=PENALISED)
    for _ in range(3):
        bench.step()
    assert [type(event) for event in bench.events("late")] == [PromptEvaluated]
    preparer.work()
    bench.run()
    assert bench.tokens("late") == expected_reply(prompt, 8)


def test_an_end_says_nothing_about_the_speed_of_rows() -> None:
    bench = Bench(FakeBackend())
    first = text(300)
    reply = bench.ask("first", first).tokens
    bench.ask("second", [*first, *reply, *text(40)])
    speed = bench.loop._cache.gate.put_speed
    before = speed.seconds(1)
    bench.ask("first again", first)
    assert bench.backend.n_sampled_from_stored == 1
    assert speed.seconds(1) == before


@pytest.mark.parametrize("length", [100, 256, 600])
def test_a_conversation_is_listed_once_and_deleted_with_all_of_its_ends(length: int) -> None:
    bench = Bench(FakeBackend())
    prompt = text(length)
    for turn in range(3):
        prompt += [*bench.ask(f"turn {turn}", prompt).tokens, *text(50)]
    bench.run()
    [listed] = bench.question(ListStored(namespace="", limit=10))
    bench.question(ForgetKey(namespace="", key=listed.key, at=time.time()))
    assert list(bench.loop._cache._index.nodes()) == []


def test_the_end_of_a_prompt_that_another_conversation_passes_is_kept() -> None:
    bench = Bench(FakeBackend())
    shared = text(100)
    reply = bench.ask("shared", shared).tokens
    for name in ("one", "other"):
        bench.ask(name, [*shared, *reply, *text(60)])
    bench.run()
    one, other = bench.question(ListStored(namespace="", limit=10))
    bench.question(ForgetKey(namespace="", key=one.key, at=time.time()))
    assert [node.stop for node in ends(bench)] == [100, 100 + 8 + 60]
    bench.question(ForgetKey(namespace="", key=other.key, at=time.time()))
    assert list(bench.loop._cache._index.nodes()) == []


def test_a_crash_behind_the_first_token_makes_the_ends_of_its_prompt_suspect() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(600)
    reply = bench.ask("cold", prompt).tokens
    bench.ask("other", text(100))
    bench.question(Quarantine(namespace="", tokens=(*prompt, *reply)))
    assert [node for node in ends(bench) if node.stop == 600] == []


@pytest.mark.parametrize("model_class", list(ModelClass))
def test_logits_that_waited_for_a_sampler_are_not_kept_for_a_private_prompt(
    model_class: ModelClass,
) -> None:
    preparer = SteppedPreparer()
    bench = Bench(FakeBackend(model_class=model_class), preparer=preparer)
    prompt = text(300)
    bench.submit("private", prompt, sampling=PENALISED, cache_prompt=False)
    for _ in range(5):
        bench.step()
    preparer.work()
    bench.run()
    assert bench.tokens("private") == expected_reply(prompt, 8)
    assert all(not slot.ends for slot in bench.loop._slots.all)
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("length", [1, 2, 257, 512])
def test_an_end_that_is_evicted_during_its_restore_is_computed(length: int) -> None:
    bench = Bench(FakeBackend(n_slots=1))
    prompt = text(length)
    bench.ask("cold", prompt)
    bench.ask("other", text(100))
    cache = bench.loop._cache
    restore = cache.restore

    def losing(match: Match, **keywords: int) -> Restore:
        begun = restore(match, **keywords)
        if match.checkpoint is not None:
            cache._holdings.remove(match.checkpoint, HERE)
        return begun

    cache.restore = losing  # type: ignore[method-assign]
    warm = bench.ask("warm", prompt)
    assert warm.tokens == expected_reply(prompt, 8)
    assert warm.evaluated.n_cached == length - 1
    bench.assert_nothing_is_left()


def test_the_use_of_a_live_end_counts_for_its_stored_copy() -> None:
    """Otherwise the copy would be evicted as unused."""
    bench = Bench(FakeBackend())
    prompt = text(300)
    bench.ask("cold", prompt)
    bench.ask("warm", prompt)
    [end] = ends(bench)
    assert end.hits == 1
