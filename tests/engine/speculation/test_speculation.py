"""Drafts in the engine's own steps: where they come from, and what they must never do."""

from collections.abc import Sequence
from itertools import count

import pytest

from rekindle.engine.speculation.drafter import Drafter
from rekindle.errors import ContextFull
from rekindle.generation.drafts import DraftSource
from rekindle.generation.events import Finished, StopCause
from rekindle.generation.model_state import ModelClass
from rekindle.generation.request import CacheTerms
from tests.engine.speculation.test_equality import Free
from tests.support.caches import cache_opener
from tests.support.deletions import forget
from tests.support.fake_backend import END, FakeBackend, FakeSampler, expected_reply, next_token
from tests.support.loop_driver import Bench

_fresh = count(100_000, 1_000)


def text(length: int) -> list[int]:
    start = next(_fresh)
    return list(range(start, start + length))


def drafting(backend: FakeBackend | None = None, **options: object) -> Bench:
    bench = Bench(backend or FakeBackend(n_draft_rows=16), **options)  # type: ignore[arg-type]
    bench.loop._speculation._costs = Free()  # type: ignore[assignment]
    return bench


def drafted(bench: Bench, name: str) -> dict[DraftSource, tuple[int, int]]:
    """Return how many tokens were drafted and accepted, by source."""
    found: dict[DraftSource, tuple[int, int]] = {}
    for event in bench.events(name):
        told = getattr(event, "drafted", None)
        if told is not None:
            before = found.get(told.source, (0, 0))
            found[told.source] = (before[0] + told.n_tokens, before[1] + told.n_accepted)
    return found


def follows(texts: Sequence[Sequence[int]]):  # type: ignore[no-untyped-def]
    """Return a model that recites these texts, and something new behind them."""
    after: dict[tuple[int, ...], int] = {}
    for each in texts:
        after |= {(each[at - 2], each[at - 1]): each[at] for at in range(2, len(each))}
    return lambda prefix: after.get(tuple(prefix[-2:])) or next_token(prefix)


def test_the_same_prompt_again_is_drafted_from_its_earlier_reply() -> None:
    bench, prompt = drafting(), text(300)
    first = bench.ask("first", prompt, 100)
    n_steps = len(bench.backend.batches)
    again = bench.ask("again", prompt, 100)
    assert again.tokens == first.tokens == expected_reply(prompt, 100)
    n_drafted, n_accepted = drafted(bench, "again")[DraftSource.REPLY]
    assert n_drafted == n_accepted > 80
    assert len(bench.backend.batches) - n_steps < 20
    assert not drafted(bench, "first")


def test_an_earlier_reply_is_found_in_the_cache_when_its_slot_is_gone() -> None:
    bench, prompt = drafting(FakeBackend(n_draft_rows=16, n_slots=1)), text(300)
    first = bench.ask("first", prompt, 300)
    bench.ask("other", text(500), 4)
    again = bench.ask("again", prompt, 300)
    assert again.tokens == first.tokens
    assert drafted(bench, "again")[DraftSource.REPLY][1] > 200


def test_what_a_grammar_forces_is_drafted_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = drafting(), text(300)
    reply = expected_reply(prompt, 100)
    forced = lambda _: reply[len(bench.tokens("call")) :][:20]  # noqa: E731
    monkeypatch.setattr(FakeSampler, "forced_tokens", forced)
    n_steps = len(bench.backend.batches)
    assert bench.ask("call", prompt, 100).tokens == reply
    n_drafted, n_accepted = drafted(bench, "call")[DraftSource.GRAMMAR]
    assert n_drafted == n_accepted > 80
    assert len(bench.backend.batches) - n_steps < 20


def test_text_of_the_prompt_is_drafted_when_the_reply_repeats_it() -> None:
    file = text(200)
    bench = drafting(FakeBackend(n_draft_rows=16, reply=follows([file])))
    asked = bench.ask("rewrite", [*file, 7, *file[:3]], 150)
    assert asked.tokens == file[3:153]
    n_drafted, n_accepted = drafted(bench, "rewrite")[DraftSource.CONTEXT]
    assert n_accepted == n_drafted > 100


def test_text_of_another_session_is_drafted_from_the_store() -> None:
    file = text(600)
    bench = drafting(FakeBackend(n_draft_rows=16, reply=follows([file])))
    bench.ask("reader", [*file, 5], 1, terms=CacheTerms(session="one"))
    asked = bench.ask("writer", [*text(20), *file[:4]], 150, terms=CacheTerms(session="two"))
    assert asked.tokens == file[4:154]
    assert drafted(bench, "writer")[DraftSource.STORE][1] > 100


def test_the_store_is_there_after_a_restart(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file, prompt = text(600), text(300)
    reply = follows([file])
    before = drafting(FakeBackend(n_draft_rows=16, reply=reply), open_cache=cache_opener(tmp_path))
    before.ask("reader", [*file, 5], 1)
    first = before.ask("reply", prompt, 280)
    before.loop.stop()
    after = drafting(FakeBackend(n_draft_rows=16, reply=reply), open_cache=cache_opener(tmp_path))
    again = after.ask("again", prompt, 280)
    assert again.tokens == first.tokens
    assert drafted(after, "again")[DraftSource.REPLY][1] > 200
    asked = after.ask("writer", [*text(20), *file[:4]], 150)
    assert asked.tokens == file[4:154]
    assert drafted(after, "writer")[DraftSource.STORE][1] > 100


def test_a_draft_never_crosses_a_namespace() -> None:
    file, prompt = text(600), text(300)
    bench = drafting(FakeBackend(n_draft_rows=16, reply=follows([file])))
    mine, yours = CacheTerms(namespace="mine"), CacheTerms(namespace="yours")
    bench.ask("reader", [*file, 5], 1, terms=mine)
    bench.ask("reply", prompt, 100, terms=mine)
    bench.ask("writer", [*text(20), *file[:4]], 100, terms=yours)
    bench.ask("again", prompt, 100, terms=yours)
    assert not drafted(bench, "writer")
    assert not drafted(bench, "again")


def test_a_request_without_the_cache_drafts_only_from_itself() -> None:
    file, prompt = text(600), text(300)
    bench = drafting(FakeBackend(n_draft_rows=16, reply=follows([file])))
    bench.ask("reader", [*file, 5], 1)
    bench.ask("reply", prompt, 100)
    bench.ask("again", prompt, 100, cache_prompt=False)
    assert not drafted(bench, "again")
    asked = bench.ask("rewrite", [*file, 7, *file[:3]], 100, cache_prompt=False)
    assert asked.tokens == file[3:103]
    assert set(drafted(bench, "rewrite")) == {DraftSource.CONTEXT}


def test_nothing_is_drafted_for_a_request_that_does_not_want_it() -> None:
    bench, prompt = drafting(), text(300)
    bench.ask("first", prompt, 50)
    bench.ask("again", prompt, 50, speculate=False)
    assert not drafted(bench, "again")


def test_nothing_is_drafted_from_deleted_content() -> None:
    file, prompt = text(600), text(300)
    bench = drafting(FakeBackend(n_draft_rows=16, reply=follows([file])))
    bench.ask("reader", [*file, 5], 1)
    bench.ask("reply", prompt, 300)
    bench.question(forget())
    bench.ask("writer", [*text(20), *file[:4]], 100)
    bench.ask("again", prompt, 100)
    assert not drafted(bench, "writer")
    assert not drafted(bench, "again")


def test_a_deletion_ends_the_drafts_of_a_running_reply() -> None:
    bench, prompt = drafting(), text(300)
    bench.ask("first", prompt, 400, terms=CacheTerms(session="gone"))
    bench.submit("again", prompt, 400, terms=CacheTerms(session="stays"))
    for _ in range(6):
        bench.step()
    before = sum(each[0] for each in drafted(bench, "again").values())
    assert before > 0
    bench.question(forget(session="gone"))
    before = sum(each[0] for each in drafted(bench, "again").values())
    bench.run()
    assert sum(each[0] for each in drafted(bench, "again").values()) == before
    assert bench.tokens("again") == expected_reply(prompt, 400)


def test_rejected_tokens_leave_no_rows_and_reach_no_store() -> None:
    """The model changes its mind in the middle of an earlier reply."""
    prompt = text(300)
    turns = {0: next_token}
    bench = drafting(FakeBackend(n_draft_rows=16, reply=lambda prefix: turns[0](prefix)))
    bench.ask("first", prompt, 300)
    turns[0] = lambda prefix: next_token(prefix) + (len(prefix) > 400)
    again = bench.ask("again", prompt, 300)
    assert again.tokens == expected_reply(prompt, 300, turns[0])
    n_drafted, n_accepted = drafted(bench, "again")[DraftSource.REPLY]
    assert n_drafted > n_accepted > 50
    bench.assert_nothing_is_left()  # cells are counted one by one
    third = bench.ask("third", [*prompt, *again.tokens, 5], 20)
    assert third.evaluated.n_cached >= 599
    assert third.tokens == expected_reply([*prompt, *again.tokens, 5], 20, turns[0])


def test_a_reply_ends_at_its_limit_and_at_its_end_of_turn() -> None:
    prompt = text(300)
    reply = lambda prefix: END if len(prefix) >= 377 else next_token(prefix)  # noqa: E731
    bench = drafting(FakeBackend(n_draft_rows=16, reply=reply))
    bench.ask("first", prompt, 200)
    for limit in (1, 2, 3, 17, 18, 76, 77, 78, 200):
        asked = bench.ask(f"{limit}", prompt, limit)
        assert asked.tokens == expected_reply(prompt, min(limit, 77), reply)
        end = bench.events(f"{limit}")[-1]
        assert isinstance(end, Finished)
        assert end.cause is (StopCause.LENGTH if limit <= 77 else StopCause.END_OF_TURN)
    bench.assert_nothing_is_left()


def test_a_failed_sampler_fails_one_reply_and_removes_its_rows() -> None:
    bench, prompt = drafting(), text(300)
    first = bench.ask("first", prompt, 60)
    bench.backend.fail_sampling_of = {first.tokens[30]}
    bench.submit("again", prompt, 60)
    bench.submit("other", text(100), 60)
    bench.run()
    assert bench.tokens("again") == first.tokens[:31]
    assert len(bench.tokens("other")) == 60
    bench.assert_nothing_is_left()


def test_a_full_context_leaves_drafts_out() -> None:
    bench, prompt = drafting(FakeBackend(n_draft_rows=16, n_cells=420, n_slots=2)), text(300)
    first = bench.ask("first", prompt, 100)
    again = bench.ask("again", prompt, 119)
    assert again.tokens[:100] == first.tokens
    bench.assert_nothing_is_left()


def test_models_whose_state_cannot_lose_tokens_say_so() -> None:
    for model_class in ModelClass:
        bench = drafting(FakeBackend(n_draft_rows=16, model_class=model_class))
        prompt = text(300)
        bench.ask("first", prompt, 60)
        bench.ask("again", prompt, 60)
        why = bench.loop.status().no_drafts_because
        if model_class in (ModelClass.DENSE, ModelClass.SLIDING_WINDOW):
            assert why is None
            assert drafted(bench, "again")
        else:
            assert model_class in (why or "")
            assert not drafted(bench, "again")


def test_switched_off_says_so() -> None:
    why = Bench(FakeBackend()).loop.status().no_drafts_because
    assert "--speculate off" in (why or "")


def test_the_counters_sum_what_the_events_tell() -> None:
    bench, prompt = drafting(), text(300)
    for name in ("first", "again", "third"):
        bench.ask(name, prompt, 100)
    told = [drafted(bench, name).get(DraftSource.REPLY, (0, 0)) for name in ("again", "third")]
    counted = bench.loop._cache.counters.drafts.reply
    assert (counted.n_tokens, counted.n_accepted) == tuple(map(sum, zip(*told, strict=True)))


def test_a_stream_that_nothing_is_known_about_gets_plain_steps() -> None:
    bench = drafting()
    asked = bench.ask("prose", text(50), 200)
    assert asked.tokens == expected_reply(bench.backend.tokens(0)[:50], 200)
    assert max(map(sum, bench.backend.batches[2:])) == 1


def test_where_llama_cpp_has_no_room_for_a_draft_the_reply_goes_on_without() -> None:
    class Tight(FakeBackend):
        def decode(
            self, tokens: list[int], positions: list[int], slots: list[int], outputs: list[int]
        ) -> None:
            if len(outputs) > len(set(slots)):
                raise ContextFull("no room for drafts")
            super().decode(tokens, positions, slots, outputs)

    bench, prompt = drafting(Tight(n_draft_rows=16)), text(300)
    first = bench.ask("first", prompt, 60)
    bench.ask("idle", text(100), 2)
    again = bench.ask("again", prompt, 60)
    assert again.tokens == first.tokens
    assert not drafted(bench, "again")
    assert sum(slot.n_rows > 0 for slot in bench.loop.status().slots) >= 2  # none was evicted


def test_a_prefill_is_not_delayed_by_the_drafts_of_others() -> None:
    bench, prompt = drafting(FakeBackend(n_draft_rows=64, n_ubatch=128)), text(300)
    bench.ask("first", prompt, 400)
    bench.submit("again", prompt, 400)
    for _ in range(4):
        bench.step()
    bench.submit("new", text(1000), 4)
    n_batches = len(bench.backend.batches)
    bench.run()
    mixed = [batch for batch in bench.backend.batches[n_batches:] if max(batch) >= 64]
    assert mixed
    assert all(min(batch) <= 1 + 0.021 * max(batch) for batch in mixed if len(batch) > 1)


def test_a_first_token_is_delivered_before_a_draft_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = drafting()
    delivered: list[int] = []

    def note(drafter: Drafter, token: int) -> None:
        delivered.append(len(bench.tokens("a")))
        usual(drafter, token)

    usual = Drafter.note
    monkeypatch.setattr(Drafter, "note", note)
    bench.ask("a", text(100), max_tokens=3)
    assert delivered[0] == 1
    assert len(delivered) == 2
