"""The warning before a conversation outgrows the context."""

import logging

import pytest

from tests.chat.accounts.test_accounts import REPLY, Bench

N_CTX = 512  # tokens of the fake engine


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.name == "rekindle.context"]


def history(n_turns: int) -> list[str]:
    """User and assistant take turns."""
    return ["Tell me.", *[REPLY, "And then what happened?"] * (n_turns - 1)]


def test_a_conversation_is_warned_once_before_its_next_turn_does_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    sizes: list[int] = []
    with caplog.at_level(logging.WARNING):
        while len(sizes) < 2 or 2 * sizes[-1] - sizes[-2] <= N_CTX:
            assert not warnings(caplog), "a turn that fits is no reason to warn"
            stats = bench.ask(*history(len(sizes) + 1))
            sizes.append(stats.n_prompt + stats.n_generated)
        [line] = warnings(caplog)
        assert "session=s " in line
        assert f"ctx_size={N_CTX}" in line
        bench.ask(*history(len(sizes)))  # regenerated
        assert len(warnings(caplog)) == 1


def test_a_first_turn_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Bench().ask("Tell me. " * 35)
    assert not warnings(caplog)
