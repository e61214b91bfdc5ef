"""The limit of open files: raised where the system allows it, and obeyed where it does not."""

import pytest

from rekindle.api.connections.limits import SPARE_CONNECTIONS
from rekindle.api.connections.open_files import OTHER_FILES, connections_within_file_limit

resource = pytest.importorskip("resource")
N_OTHERS = SPARE_CONNECTIONS + OTHER_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (5000, 5000, 1024),
        (256, 5000, 1024),
        (256, resource.RLIM_INFINITY, 1024),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024),
        (256, N_OTHERS + 100, 100),
        (64, 64, 1),
    ],
)
def test_as_many_connections_as_the_hard_limit_has_files_for(
    soft: int, hard: int, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connections_within_file_limit(1024) == allowed
    new_soft, new_hard = limits[-1]
    assert new_hard == hard
    assert new_soft in (resource.RLIM_INFINITY, hard) or new_soft >= allowed + N_OTHERS


@pytest.mark.parametrize("error", [ValueError("not allowed to raise maximum limit"), OSError(22)])
def test_a_system_that_refuses_a_higher_limit_keeps_its_own(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int, pair: tuple[int, int]) -> None:
        raise error

    soft = N_OTHERS + 10
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert connections_within_file_limit(1024) == 10
    assert f"max_connections=1024 lowered to 10, this process may open only {soft}" in caplog.text
