import pytest

from rekindle.generation.forgetting import Owner, Scope, Tombstone, Tombstones, sessions_over

NAMESPACE = "a7"


@pytest.mark.parametrize("session", ["s", "s/agent", "s/agent/deeper", None])
def test_a_deleted_session_includes_its_sub_agents(session: str | None) -> None:
    tombstone = Tombstone(scope=Scope(namespace=NAMESPACE, session="s"), at=10.0)
    owner = Owner(namespace=NAMESPACE, session=session, asked_at=5.0)

    assert tombstone.scope.covers_session(session)
    assert tombstone.covers(owner)
    assert Tombstones([tombstone]).cover(owner)


@pytest.mark.parametrize("session", ["", "st", "t/s", "s agent", "t/s/agent"])
def test_a_session_whose_name_only_resembles_the_deleted_one_stays(session: str) -> None:
    tombstone = Tombstone(scope=Scope(namespace=NAMESPACE, session="s"), at=10.0)
    owner = Owner(namespace=NAMESPACE, session=session, asked_at=5.0)

    assert not tombstone.scope.covers_session(session)
    assert not tombstone.covers(owner)
    assert not Tombstones([tombstone]).cover(owner)


@pytest.mark.parametrize("session", ["s/agent", "s/other"])
def test_a_deleted_sub_agent_leaves_its_parent_and_its_siblings(session: str) -> None:
    tombstone = Tombstone(scope=Scope(session="s/agent"), at=10.0)

    assert Tombstones([tombstone]).cover(
        Owner(namespace=NAMESPACE, session=session, asked_at=5.0)
    ) == (session == "s/agent")
    assert not tombstone.covers(Owner(namespace=NAMESPACE, session="s", asked_at=5.0))


@pytest.mark.parametrize("session", ["", "s", "a/b/c", "/", "a//b", "a/"])
def test_the_scopes_over_a_session_are_those_that_cover_it(session: str) -> None:
    names = {"", "s", "a", "a/b", "a/b/c", "a/", "a//b", "/", "a/c", "b"}

    covering = {name for name in names if Scope(session=name).covers_session(session)}

    assert covering == names & set(sessions_over(session))


def test_many_deletions_of_namespaces_displace_none_of_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.generation.forgetting.MAX_TOMBSTONES", 100)
    scope = Scope(namespace=NAMESPACE, session="s")
    known = Tombstones([Tombstone(scope=Scope(), at=1.0), Tombstone(scope=scope, at=2.0)])
    for number in range(1000):
        known.add(Tombstone(scope=Scope(namespace=f"salt-{number}"), at=10.0 + number))
    assert len(known.all()) <= 100
    assert known.cover(Owner(namespace="other", session="s", asked_at=0.5))
    assert known.cover(Owner(namespace=NAMESPACE, session="s", asked_at=1.5))
    assert known.cover(Owner(namespace="salt-999", session="s", asked_at=1000.0))


def test_many_deletions_of_sessions_displace_no_deletion_of_a_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.generation.forgetting.MAX_TOMBSTONES", 100)
    known = Tombstones(
        [Tombstone(scope=Scope(), at=1.0), Tombstone(scope=Scope(namespace=NAMESPACE), at=2.0)]
    )
    for number in range(1000):
        scope = Scope(namespace=f"salt-{number}", session=f"s{number}")
        known.add(Tombstone(scope=scope, at=10.0 + number))
    assert len(known.all()) <= 100
    assert len(known._last_at) <= 100
    assert known.cover(Owner(namespace="other", session="s", asked_at=0.5))
    assert known.cover(Owner(namespace=NAMESPACE, session="s", asked_at=1.5))
    assert known.cover(Owner(namespace="salt-999", session="s999", asked_at=11.0))
