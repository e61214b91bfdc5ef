"""The engine process dies at random moments, and no client notices more than a pause.

`make crash` kills a thousand times.
"""

import sys
from pathlib import Path

import pytest

from tests.campaigns.engine_crash import crashing
from tests.support.crash_requests import EMBEDDED
from tests.support.tiny_models import TinyArchitecture

SEED = 1  # no death is a hang
HANG_SECONDS = 120.0  # an engine that gets no core is not killed as well
# The embedded model is slow: a few kinds of requests, and one of each way to sample.
FEW = (*("chat with logprobs", "responses", "messages", "a tool call", "penalties"),)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("model", "n_deaths", "only"),
    [
        (EMBEDDED, 3, FEW),
        (TinyArchitecture.GEMMA3, 3, ()),
        (TinyArchitecture.QWEN35, 2, ()),
        (TinyArchitecture.MAMBA2, 2, ()),
    ],
)
def test_deaths_of_the_engine_change_no_reply_and_leave_nothing_behind(
    tmp_path: Path, model: str, n_deaths: int, only: tuple[str, ...]
) -> None:
    with crashing(model, tmp_path, seed=SEED, only=only, hang_seconds=HANG_SECONDS) as crashes:
        crashes.record(n_times=1)
        crashes.disturb(n_deaths)
        crashes.check_nothing_is_left()
    assert sum(crashes.tally.causes.values()) == n_deaths
    assert crashes.tally.n_replies >= len(crashes.tally.kinds) > 0
