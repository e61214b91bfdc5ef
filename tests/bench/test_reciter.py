"""A reciting model replies with its cycle, through llama.cpp and our own classes."""

from pathlib import Path

import pytest

from bench.models.big import fillers_of
from bench.models.reciter import TINY, TYPES, recital_of, write_reciter
from rekindle.llama.model import GgufModel
from tests.llama.driver import continue_greedily, make_backend, prefill, prompt


@pytest.mark.parametrize("kind", TYPES)
def test_the_greedy_reply_to_any_prompt_is_the_cycle(tmp_path: Path, kind: str) -> None:
    path = write_reciter(tmp_path / "reciter.gguf", TINY, TYPES[kind])
    recital = recital_of(TINY.n_vocab)
    model = GgufModel(path, gpu_layers=0)
    backend = make_backend(model)
    try:
        for slot, start in enumerate(
            (0, 2000, len(recital.tokens) - 5)
        ):  # the last one wraps around
            tokens = [*prompt(200, seed=slot), recital.token_at(start)]
            prefill(backend, slot, tokens[:-1])
            reply = continue_greedily(backend, slot, tokens, 40)
            assert reply == recital.stretch(start + 1, 40)
            text = model.vocabulary.detokenize(reply, render_special=False).decode()
            assert text == recital.text(start + 1, 40)
    finally:
        backend.close()
        model.close()


def test_the_cycle_holds_every_filler_once_and_no_other_token() -> None:
    recital = recital_of(TINY.n_vocab)
    token, seen = recital.token_at(7), set()
    while token not in seen:
        seen.add(token)
        assert recital.before(recital.after(token)) == token
        token = recital.after(token)
    assert seen == set(fillers_of(TINY.n_vocab))


def test_equal_arguments_write_equal_bytes(tmp_path: Path) -> None:
    one, other = (
        write_reciter(tmp_path / name, TINY, TYPES["q8_0"]).read_bytes() for name in ("a", "b")
    )
    assert one == other
