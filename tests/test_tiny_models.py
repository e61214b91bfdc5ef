"""The tiny models are what other tests take them for: loadable, one of each memory class."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama
import pytest

from tests.support.tiny_models import SLIDING_WINDOW, TinyArchitecture, write_tiny_model
from tests.support.tiny_vocabulary import TURN_END, vocabulary


class Memory(NamedTuple):
    recurrent: bool = False
    hybrid: bool = False
    window: int = 0


@pytest.mark.parametrize(
    ("architecture", "memory"),
    [
        (TinyArchitecture.LLAMA, Memory()),
        (TinyArchitecture.GEMMA3, Memory(window=SLIDING_WINDOW)),
        (TinyArchitecture.QWEN35, Memory(hybrid=True)),
        (TinyArchitecture.LFM2_SWA, Memory(hybrid=True, window=SLIDING_WINDOW)),
        (TinyArchitecture.MAMBA2, Memory(recurrent=True)),
    ],
)
def test_model_is_of_its_memory_class_and_decodes(
    tmp_path: Path, architecture: TinyArchitecture, memory: Memory
) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", architecture)
    again = write_tiny_model(tmp_path / "again.gguf", architecture)
    other = write_tiny_model(tmp_path / "other.gguf", architecture, seed=2)
    assert path.read_bytes() == again.read_bytes() != other.read_bytes()
    with loaded(path) as model:
        assert memory == Memory(
            recurrent=llama.llama_model_is_recurrent(model),
            hybrid=llama.llama_model_is_hybrid(model),
            window=llama.llama_model_n_swa(model),
        )
        assert decodes(model, n_tokens=5)


def test_vocabulary_keeps_every_byte_and_ends_turns_with_a_control_token(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", TinyArchitecture.LLAMA)
    with loaded(path) as model:
        vocab = llama.llama_model_get_vocab(model)
        text = 'hello, world {"a": 1} \u00e9\u4f60'.encode()
        buffer = (llama.llama_token * 64)()
        n = llama.llama_tokenize(vocab, text, len(text), buffer, len(buffer), 0, 0)
        assert 0 < n < len(text)
        assert b"".join(piece(vocab, token) for token in buffer[:n]) == text
        turn_end = vocabulary().id(TURN_END)
        assert llama.llama_vocab_is_control(vocab, turn_end)
        assert llama.llama_vocab_is_eog(vocab, turn_end)


@contextmanager
def loaded(path: Path) -> Iterator[Any]:
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model
    try:
        yield model
    finally:
        llama.llama_model_free(model)


def decodes(model: Any, n_tokens: int) -> bool:
    params = llama.llama_context_default_params()
    params.n_ctx = 64
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * n_tokens)(*range(n_tokens))
    try:
        return bool(llama.llama_decode(context, llama.llama_batch_get_one(tokens, n_tokens)) == 0)
    finally:
        llama.llama_free(context)


def piece(vocab: Any, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(64)
    n = llama.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, 0)
    return buffer.raw[:n]
