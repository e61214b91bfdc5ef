"""llama-server's actions on slots, as names of prompts."""

from typing import Any

import httpx
import pytest

from rekindle.generation.events import CacheSource
from rekindle.generation.request import Pin, Rank
from rekindle.generation.status import CacheCounters, CacheStatus, StoredPrefix, TierStatus
from tests.api.client import post
from tests.api.fakes import FakeResponder, done


def named(name: str, n_bytes: int = 4096) -> StoredPrefix:
    return StoredPrefix(
        key=name,
        name=name,
        session="default",
        rank=Rank.MAIN,
        n_tokens=len(name),
        n_bytes=n_bytes,
        sources=(CacheSource.MEMORY,),
        hits=0,
        used_at=0.0,
        pinned_until=None,
    )


def holding(*names: str, off_because: str | None = None) -> FakeResponder:
    """A responder whose store has these names; the tokens of each are its letters."""
    responder = FakeResponder((done(0),))
    responder.store.stored = [named(name) for name in names]
    disk = TierStatus(name=CacheSource.DISK, n_entries=0, n_bytes=0, budget_bytes=1)
    responder.cache = CacheStatus(
        model_class="dense", off_because=off_because, tiers=(disk,), counters=CacheCounters()
    )
    return responder


def act(responder: FakeResponder, action: str, slot: object = 1, **fields: Any) -> httpx.Response:
    return post(f"/slots/{slot}?action={action}", fields, responder)


def test_saving_names_pins_and_writes_the_slots_prompt() -> None:
    responder = holding("slot:1", "a.bin")
    saved = act(responder, "save", filename="a.bin").json()
    assert saved.pop("timings")["save_ms"] >= 0
    assert saved == {"id_slot": 1, "filename": "a.bin", "n_saved": 6, "n_written": 4096}
    [started] = responder.started
    assert bytes(started.prompt.tokens) == b"slot:1"
    terms = started.options.terms
    assert (terms.name, terms.persist, started.options.max_tokens) == ("a.bin", True, 0)
    assert terms.pins == (Pin(6, 86400.0),)


def test_restoring_computes_the_saved_prompt_and_makes_it_the_slots() -> None:
    responder = holding("a.bin")
    restored = act(responder, "restore", 7, filename="a.bin").json()
    assert restored.pop("timings")["restore_ms"] >= 0
    assert restored == {"id_slot": 7, "filename": "a.bin", "n_restored": 5, "n_read": 4096}
    [started] = responder.started
    assert bytes(started.prompt.tokens) == b"a.bin"
    assert started.options.terms.name == "slot:7"
    assert started.options.terms.pins == ()


def test_erasing_deletes_what_the_slots_name_stands_for() -> None:
    responder = holding("slot:1", "a.bin")
    assert act(responder, "erase").json() == {"id_slot": 1, "n_erased": 6}
    assert [each.name for each in responder.store.stored] == ["a.bin"]
    assert act(responder, "erase").json() == {"id_slot": 1, "n_erased": 0}


@pytest.mark.parametrize(
    ("action", "slot", "fields", "param"),
    [
        ("save", 2, {"filename": "a"}, "id_slot"),
        ("restore", 1, {"filename": "unknown"}, "filename"),
        ("save", 1, {}, "filename"),
        ("save", 1, {"filename": "../a"}, "filename"),
        ("save", 1, {"filename": "slot:2"}, "filename"),
        ("save", 1, {"filename": 5}, "filename"),
        ("copy", 1, {"filename": "a"}, "action"),
        ("save", "x", {"filename": "a"}, "id_slot"),
        ("save", "9" * 40, {"filename": "a"}, "id_slot"),
    ],
)
def test_wrong_actions_are_errors(
    action: str, slot: object, fields: dict[str, Any], param: str
) -> None:
    reply = act(holding("slot:1"), action, slot, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_server_without_a_cache_saves_nothing() -> None:
    reply = act(holding("slot:1", off_because="--no-cache"), "save", filename="a")
    assert reply.status_code == 400
    assert "--no-cache" in reply.json()["error"]["message"]
