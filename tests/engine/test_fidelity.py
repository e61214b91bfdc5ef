"""Random trees of conversations, and everything that can happen to what is stored of them.

`python -m tests.campaigns.fidelity` takes 10,000 operations and more.
"""

from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from rekindle.generation.model_state import ModelClass
from tests.support.fidelity_machine import budget, machine_for
from tests.support.fidelity_subjects import FakeSubject, LlamaSubject
from tests.support.tiny_models import TinyArchitecture


@pytest.mark.parametrize("model_class", list(ModelClass))
def test_every_reply_is_the_cold_one_and_every_account_is_right(model_class: ModelClass) -> None:
    """On a backend that counts every cell and every token."""
    machine = machine_for(FakeSubject(model_class))
    run_state_machine_as_test(machine, settings=budget(n_worlds=6, n_operations=20))


@pytest.mark.parametrize("architecture", list(TinyArchitecture))
def test_restored_state_equals_the_saved_one_and_continues_like_the_live_one(
    architecture: TinyArchitecture, tmp_path: Path
) -> None:
    """On llama.cpp, byte for byte and logit for logit."""
    subject = LlamaSubject(architecture, tmp_path)
    try:
        machine = machine_for(subject)
        run_state_machine_as_test(machine, settings=budget(n_worlds=3, n_operations=15))
    finally:
        subject.close()
