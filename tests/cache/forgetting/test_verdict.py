"""Which entries deletions remove, and what they leave to others."""

import random
from threading import Thread

import pytest

from rekindle.cache.entry import Key, namespace_root
from rekindle.cache.forgetting.deletions import Deletions
from rekindle.cache.forgetting.verdict import Link, Verdict
from rekindle.generation.forgetting import Scope, Tombstone

MODEL = b"m" * 16


def tombstone(at: float, namespace: str | None = "", session: str | None = None) -> Tombstone:
    return Tombstone(scope=Scope(namespace=namespace, session=session), at=at)


def test_a_deletion_in_another_namespace_covers_nothing_of_unknown_time() -> None:
    deletions = Deletions(MODEL, [tombstone(50.0, "x"), tombstone(50.0, "", "s")])
    root = namespace_root(MODEL, "")
    assert not deletions.covers(root, "t", 0.0)
    assert deletions.covers(root, "s", 0.0)
    assert deletions.covers(namespace_root(MODEL, "x"), "t", 0.0)


def test_the_sub_agents_of_a_deleted_session_are_covered() -> None:
    deletions = Deletions(MODEL, [tombstone(50.0, "", "s")])
    root = namespace_root(MODEL, "")
    for session, is_covered in (("s/agent", True), ("s/a/b", True), ("sa", False), ("t/s", False)):
        assert deletions.covers(root, session, 40.0) == is_covered
        assert deletions.covers(b"", session, 40.0) == is_covered


def test_a_sub_agent_keeps_nothing_of_its_deleted_session() -> None:
    root = namespace_root(MODEL, "")
    first = Link(b"1", root, root, "s", 10.0)
    second = Link(b"2", b"1", root, "s/agent", 10.0)
    assert doomed([first, second], [tombstone(50.0, "", "s")]) == {b"1", b"2"}


def test_deletions_that_several_threads_add_are_all_kept() -> None:
    deletions = Deletions(MODEL)

    def add(thread: int) -> None:
        for number in range(200):
            deletions.add([tombstone(50.0, "", f"{thread}-{number}")])

    threads = [Thread(target=add, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    root = namespace_root(MODEL, "")
    names = [f"{thread}-{number}" for thread in range(4) for number in range(200)]
    assert [name for name in names if not deletions.covers(root, name, 40.0)] == []


def doomed(links: list[Link], tombstones: list[Tombstone]) -> set[Key]:
    """Judge entries that are listed parents first."""
    verdict = Verdict(tombstones, MODEL)
    for link in reversed(links):
        verdict.look_back(link)
    return {link.key for link in links if verdict.judge(link)}


def one_by_one(links: list[Link], tombstones: list[Tombstone]) -> set[Key]:
    left = links
    for each in tombstones:
        verdict = Verdict([each], MODEL)
        for link in reversed(left):
            verdict.look_back(link)
        left = [link for link in left if not verdict.judge(link)]
        heirs = verdict.heirs
        left = [
            link._replace(**heirs[link.key]._asdict()) if link.key in heirs else link
            for link in left
        ]
    return {link.key for link in links} - {link.key for link in left}


@pytest.mark.parametrize("seed", range(200))
def test_several_deletions_at_once_remove_what_they_remove_one_by_one(seed: int) -> None:
    noise = random.Random(seed)
    links: list[Link] = []
    for number in range(noise.randrange(1, 40)):
        parent = noise.choice([None, *links])
        namespace = noise.choice(["", "x"])
        root = parent.root if parent else namespace_root(MODEL, namespace)
        # A prompt is stored from its start on.
        asked_at = noise.uniform(parent.asked_at if parent else 0.0, 100.0)
        key = number.to_bytes(2, "big")
        session = noise.choice(["s", "t", "u", "s/a"])
        links.append(Link(key, parent.key if parent else root, root, session, asked_at))
    tombstones = [
        tombstone(noise.uniform(0.0, 110.0), noise.choice([None, "", "x"]), session)
        for session in noise.sample(["s", "t", "s/a", None], noise.randrange(1, 4))
    ]
    tombstones.sort(key=lambda each: each.at)
    assert doomed(links, tombstones) == one_by_one(links, tombstones)
