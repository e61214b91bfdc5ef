"""The llama.cpp backend on tiny random models, one for each class of memory it has."""

from collections.abc import Iterator

import pytest

from rekindle.errors import ContextFull, EngineError
from rekindle.generation import Sampling, TokenSampled
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.model import Model
from tests.conftest import TinyModels
from tests.support.tiny_models import TinyArchitecture

ALL = list(TinyArchitecture)
N_PROMPT = 320  # beyond every tiny model's window, and not a multiple of 64 blocks alone


@pytest.fixture(params=ALL, scope="module")
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Model]:
    model = Model(tiny_models(request.param), gpu_layers=0)
    yield model
    model.close()


@pytest.fixture
def backend(model: Model) -> Iterator[LlamaBackend]:
    backend = make_backend(model)
    yield backend
    backend.close()


def make_backend(model: Model, *, n_cells: int = 2048) -> LlamaBackend:
    return LlamaBackend(
        model,
        ContextParams(
            n_cells=n_cells,
            n_slots=4,
            n_batch=512,
            n_ubatch=256,
            n_threads=1,
            flash_attn="auto",
            type_k="f16",
            type_v="f16",
            swa_full=False,
        ),
    )


def prompt(n_tokens: int, seed: int = 1) -> list[int]:
    return [3 + (seed * 7919 + index * 104729) % 500 for index in range(n_tokens)]


def prefill(backend: LlamaBackend, slot: int, tokens: list[int], start: int = 0) -> None:
    for begin in range(start, len(tokens), 64):
        chunk = tokens[begin : begin + 64]
        positions = list(range(begin, begin + len(chunk)))
        backend.decode(chunk, positions, [slot] * len(chunk), [len(chunk) - 1])


def continue_greedily(
    backend: LlamaBackend, slot: int, tokens: list[int], n_tokens: int = 12
) -> list[int]:
    """`tokens` is all the slot holds but the last, which is decoded first."""
    sampler = backend.new_sampler(Sampling(temperature=0), (), None)
    reply: list[int] = []
    token, position = tokens[-1], len(tokens) - 1
    for _ in range(n_tokens):
        backend.decode([token], [position], [slot], [0])
        [sampled] = backend.sample([sampler], [0])
        assert isinstance(sampled, TokenSampled)
        token, position = sampled.token, position + 1
        reply.append(token)
    sampler.close()
    return reply


def save(backend: LlamaBackend, slot: int, n_tokens: int) -> tuple[list[bytes], bytes]:
    """What a slot holds, as blocks of 128 rows and a checkpoint."""
    blocks = [
        backend.export_rows(slot, start, min(start + 128, n_tokens))
        for start in range(0, n_tokens, 128)
    ]
    return blocks, backend.export_checkpoint(slot)


def restore(
    backend: LlamaBackend, slot: int, n_tokens: int, saved: tuple[list[bytes], bytes]
) -> None:
    blocks, checkpoint = saved
    for index, rows in enumerate(blocks):
        backend.import_rows(slot, 128 * index, min(128 * (index + 1), n_tokens), rows)
    backend.import_checkpoint(slot, checkpoint)


def test_a_restored_slot_is_byte_equal_and_continues_as_the_original(
    model: Model, backend: LlamaBackend
) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:-1])
    saved = save(backend, 0, N_PROMPT - 1)
    expected = continue_greedily(backend, 0, tokens)
    backend.clear_slot(0)

    restore(backend, 1, N_PROMPT - 1, saved)
    assert backend.n_positions(1) == N_PROMPT - 1
    assert save(backend, 1, N_PROMPT - 1) == saved
    assert continue_greedily(backend, 1, tokens) == expected

    # In a context that never saw the prompt, too.
    other = make_backend(model)
    restore(other, 2, N_PROMPT - 1, saved)
    assert continue_greedily(other, 2, tokens) == expected
    other.close()


def test_a_copied_slot_goes_on_without_disturbing_its_source(backend: LlamaBackend) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:-1])
    before = save(backend, 0, N_PROMPT - 1)
    for target in (1, 2, 3):
        backend.copy_slot(0, target)
    replies = [continue_greedily(backend, slot, tokens) for slot in (1, 2, 3)]
    assert replies[0] == replies[1] == replies[2]
    assert save(backend, 0, N_PROMPT - 1) == before
    assert continue_greedily(backend, 0, tokens) == replies[0]


def test_trim_keeps_exactly_the_prefix_or_says_it_cannot(backend: LlamaBackend) -> None:
    tokens = prompt(N_PROMPT)
    prefill(backend, 0, tokens[:192])  # whole chunks: shorter ones give other rounding
    expected = continue_greedily(backend, 0, tokens[:193])
    backend.clear_slot(0)

    prefill(backend, 0, tokens)
    whole = save(backend, 0, N_PROMPT)
    if backend.trim_slot(0, 192):
        assert backend.n_positions(0) == 192
        assert continue_greedily(backend, 0, tokens[:193]) == expected
    else:
        assert save(backend, 0, N_PROMPT) == whole


@pytest.mark.parametrize("model", [TinyArchitecture.LLAMA], indirect=True)
def test_a_dense_model_can_always_be_trimmed(backend: LlamaBackend) -> None:
    prefill(backend, 0, prompt(N_PROMPT))
    assert backend.trim_slot(0, 5)


@pytest.mark.parametrize("model", [TinyArchitecture.LLAMA], indirect=True)
def test_more_tokens_than_cells_is_context_full_and_changes_nothing(model: Model) -> None:
    backend = make_backend(model, n_cells=256)
    tokens = prompt(250)
    prefill(backend, 0, tokens[:-1])
    before = save(backend, 0, 249)
    with pytest.raises(ContextFull):
        backend.decode(prompt(64, seed=2), list(range(64)), [1] * 64, [63])
    assert save(backend, 0, 249) == before
    backend.clear_slot(0)
    backend.decode(prompt(64, seed=2), list(range(64)), [1] * 64, [63])
    backend.close()


def test_bytes_that_llama_refuses_leave_an_empty_slot(backend: LlamaBackend) -> None:
    prefill(backend, 0, prompt(128))
    rows, checkpoint = backend.export_rows(0, 0, 128), backend.export_checkpoint(0)
    if rows:
        with pytest.raises(EngineError):
            backend.import_rows(1, 0, 128, rows[:-40])
        assert backend.n_positions(1) == 0
    if checkpoint:
        with pytest.raises(EngineError):
            backend.import_checkpoint(1, checkpoint[:-4])
        assert backend.n_positions(1) == 0
    # The one that was there before is unharmed.
    assert backend.n_positions(0) == 128


def test_two_slots_in_one_batch_do_not_see_each_other(backend: LlamaBackend) -> None:
    first, second = prompt(64, seed=1), prompt(64, seed=2)
    alone = []
    for slot, tokens in ((0, first), (1, second)):
        prefill(backend, slot, tokens)
        alone.append(save(backend, slot, 64))
        backend.clear_slot(slot)
    positions = list(range(64))
    backend.decode(first + second, positions * 2, [0] * 64 + [1] * 64, [63, 127])
    together = [save(backend, slot, 64) for slot in (0, 1)]
    assert [len(rows) for rows, _ in together] == [len(rows) for rows, _ in alone]
    for slot, tokens in ((0, first), (1, second)):
        mixed = continue_greedily(backend, slot, [*tokens, 9], n_tokens=4)
        backend.clear_slot(slot)
        prefill(backend, slot, tokens)
        assert continue_greedily(backend, slot, [*tokens, 9], n_tokens=4) == mixed
