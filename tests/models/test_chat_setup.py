"""What the settings make of a model's own defaults."""

import pytest

from rekindle.config.choices import ReasoningSwitch
from rekindle.config.model import ChatSettings
from rekindle.config.sampling import SamplingSettings
from rekindle.errors import StartupError
from rekindle.generation.request import SamplerName, Sampling
from rekindle.models.chat_setup import reasoning_limit_of, sampling_with, template_kwargs_of


def test_the_operators_sampling_replaces_that_of_the_models_file() -> None:
    own = Sampling(temperature=0.6, top_k=20, seed=3)
    assert sampling_with(own, SamplingSettings()) == own
    given = SamplingSettings(temperature=0.0, min_p=0.1, ignore_eos=True, n_predict=5)
    assert sampling_with(own, given) == Sampling(
        temperature=0.0, top_k=20, min_p=0.1, seed=3, ignore_eos=True
    )


def test_reasoning_is_turned_on_by_the_templates_switch_and_off_by_the_budget() -> None:
    auto, on, off = (ChatSettings(reasoning=each) for each in ReasoningSwitch)
    assert [template_kwargs_of(each) for each in (auto, on, off)] == [
        {},
        {"enable_thinking": True},
        {},
    ]
    assert [reasoning_limit_of(each) for each in (auto, on, off)] == [None, None, 0]
    both = ChatSettings(
        reasoning=ReasoningSwitch.ON,
        chat_template_kwargs='{"enable_thinking": false, "a": 1}',
        reasoning_budget=7,
    )
    assert template_kwargs_of(both) == {"enable_thinking": False, "a": 1}
    assert reasoning_limit_of(both) == 7


def test_seed_minus_1_is_another_one_for_each_request() -> None:
    assert sampling_with(Sampling(seed=3), SamplingSettings(seed=-1)).seed is None


def test_the_order_of_samplers_is_read_from_names() -> None:
    given = SamplingSettings(samplers="top_k;Top-P; typical_p", dry_sequence_breakers=("\\n", "x"))
    sampling = sampling_with(Sampling(), given)
    assert sampling.samplers == (SamplerName.TOP_K, SamplerName.TOP_P, SamplerName.TYPICAL_P)
    assert sampling.dry_sequence_breakers == ("\n", "x")
    with pytest.raises(StartupError, match="unknown name 'top_q'"):
        sampling_with(Sampling(), SamplingSettings(samplers="top_k;top_q"))
