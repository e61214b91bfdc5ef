"""Penalties against llama.cpp's own sampler, on the same random logits."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rekindle.generation.request import Sampling
from rekindle.llama.library import lib
from rekindle.llama.sampling.penalties import Penalties

N_VOCAB = 40


class NativePenalties:
    """llama.cpp's sampler, behind the methods of `Penalties`."""

    def __init__(self, sampling: Sampling, tokens: list[int]) -> None:
        self._sampler = lib.llama_sampler_init_penalties(
            N_VOCAB,
            sampling.repeat_last_n,
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._sampler, token)

    def apply(self, logits: NDArray[np.float32]) -> None:
        candidates = (lib.llama_token_data * N_VOCAB)()
        rows = np.frombuffer(
            memoryview(candidates), dtype=[("token", "i4"), ("logit", "f4"), ("p", "f4")]
        )
        rows["token"], rows["logit"] = np.arange(N_VOCAB), logits
        is_sorted = False
        array = lib.llama_token_data_array(candidates, N_VOCAB, -1, is_sorted)
        lib.llama_sampler_apply(self._sampler, ctypes.byref(array))
        logits[rows["token"]] = rows["logit"]

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)


TOKENS = st.lists(st.integers(0, N_VOCAB - 1), max_size=60)


@settings(max_examples=100, deadline=None)
@given(
    sampling=st.builds(
        Sampling,
        repeat_last_n=st.integers(1, 70),
        repeat_penalty=st.floats(0.5, 2.0, width=32),
        frequency_penalty=st.floats(-2.0, 2.0, width=32),
        presence_penalty=st.floats(-2.0, 2.0, width=32),
    ),
    prompt=TOKENS,
    reply=TOKENS,
    seed=st.integers(0, 99),
)
def test_penalties_are_those_of_llama_cpp_at_every_token(
    sampling: Sampling, prompt: list[int], reply: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    ours, native = Penalties(sampling, prompt, N_VOCAB), NativePenalties(sampling, prompt)
    for n_reply in range(len(reply) + 1):
        logits = random.normal(scale=8, size=N_VOCAB).astype(np.float32)
        logits[random.integers(N_VOCAB)] = -np.inf  # as under a grammar
        expected = logits.copy()
        ours.apply(logits)
        native.apply(expected)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
        if n_reply < len(reply):
            ours.accept(reply[n_reply])
            native.accept(reply[n_reply])
    native.close()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), TOKENS, TOKENS)
def test_penalties_of_a_begun_reply_are_those_of_one_that_was_followed(
    repeat_last_n: int, prompt: list[int], reply: list[int]
) -> None:
    sampling = Sampling(repeat_last_n=repeat_last_n, repeat_penalty=1.3, frequency_penalty=0.4)
    followed = Penalties(sampling, prompt, N_VOCAB)
    for token in reply:
        followed.accept(token)
    begun = Penalties(sampling, [*prompt, *reply], N_VOCAB)
    one, other = (np.linspace(-9, 9, N_VOCAB, dtype=np.float32) for _ in range(2))
    followed.apply(one)
    begun.apply(other)
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize("repeat_penalty", [1e-45, 1e300])
def test_an_absurd_repeat_penalty_gives_no_nan(repeat_penalty: float) -> None:
    penalties = Penalties(Sampling(repeat_penalty=repeat_penalty), [1, 2, 3, 4], N_VOCAB)
    logits = np.zeros(N_VOCAB, dtype=np.float32)
    logits[1:4] = -np.inf, 9.0, -9.0
    penalties.apply(logits)
    assert not np.isnan(logits).any()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), False),
        (Sampling(repeat_penalty=1.1), True),
        (Sampling(frequency_penalty=-0.1), True),
        (Sampling(presence_penalty=0.1), True),
        (Sampling(presence_penalty=0.1, repeat_last_n=0), False),
    ],
)
def test_only_a_penalty_that_changes_logits_counts(sampling: Sampling, *, expected: bool) -> None:
    assert sampling.has_penalties == expected
