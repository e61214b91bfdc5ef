"""The status of slots while a request goes through its phases."""

from itertools import groupby

from rekindle.generation.events import Finished
from rekindle.generation.status import SlotPhase, SlotStatus
from tests.support.fake_backend import FakeBackend
from tests.support.loop_driver import Bench

PROMPT = list(range(1, 1201))
OTHER = list(range(5001, 6201))


def glances(bench: Bench, name: str) -> list[SlotStatus]:
    """The only slot, after each step until the request has ended."""
    seen: list[SlotStatus] = []
    while not any(isinstance(event, Finished) for event in bench.events(name)):
        bench.step()
        seen += bench.loop.status().slots
    return seen


def phases(seen: list[SlotStatus]) -> list[SlotPhase]:
    return [phase for phase, _ in groupby(each.phase for each in seen)]


def test_slot_status_shows_prefill_decode_and_idle() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.submit("a", PROMPT, max_tokens=4)
    seen = glances(bench, "a")
    assert phases(seen) == [SlotPhase.PREFILLING, SlotPhase.DECODING, SlotPhase.IDLE]
    assert all(each.n_cached == 0 for each in seen)
    done = [each.n_rows for each in seen if each.phase is SlotPhase.PREFILLING]
    assert done == sorted(done)


def test_cached_tokens_are_reported_while_the_rest_is_computed() -> None:
    bench = Bench(FakeBackend(n_slots=1))
    bench.ask("first", PROMPT, 1)
    bench.submit("next", [*PROMPT, *OTHER], max_tokens=1)
    seen = glances(bench, "next")
    running = [each for each in seen if each.request_id == "next"]
    assert running
    assert {each.n_cached for each in running} == {len(PROMPT)}
    assert seen[-1].n_cached == 0
