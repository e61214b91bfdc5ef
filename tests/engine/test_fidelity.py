"""Random trees of conversations, and everything that can happen to their stored state.

`python -m tests.campaigns.fidelity` runs 10,000 operations and more.
"""

from pathlib import Path

import pytest

from rekindle.generation.model_state import ModelClass
from tests.support.fidelity import PIECES_COMPARED
from tests.support.fidelity_machine import count_checked_operations
from tests.support.fidelity_subjects import FakeSubject, LlamaSubject
from tests.support.tiny_models import MEMORY_CLASSES, TinyArchitecture

# In few worlds nothing may be restored: hypothesis draws other ones beside other loaded modules.
N_WORLDS = 20


@pytest.mark.parametrize("model_class", list(ModelClass))
def test_every_reply_equals_the_cold_reply_and_every_account_is_right(
    model_class: ModelClass,
) -> None:
    """On a backend that counts every cell and every token."""
    counts = count_checked_operations(FakeSubject(model_class), n_worlds=N_WORLDS, n_operations=20)
    assert counts[PIECES_COMPARED] > 0


@pytest.mark.parametrize("architecture", MEMORY_CLASSES)
def test_restored_state_equals_the_saved_one_and_continues_like_the_live_one(
    architecture: TinyArchitecture, tmp_path: Path
) -> None:
    """On llama.cpp, byte for byte and logit for logit."""
    subject = LlamaSubject(architecture, tmp_path)
    try:
        counts = count_checked_operations(subject, n_worlds=6, n_operations=15)
    finally:
        subject.close()
    assert counts[PIECES_COMPARED] > 0
