"""Write a model of a few megabytes with random weights, of any class of state.

Vocabulary and template are those of the embedded model, so prompts have realistic lengths.
Needs the `gguf` package.
"""

import tempfile
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField

from rekindle.models.source import resolve_model
from tests.support.tiny_models import N_EMBD, TinyArchitecture, write_tiny_model

TOKENIZER = "tokenizer."
EMBEDDING_GAIN = 8.0  # as in tests/support/tiny_models.py


def write_tiny_model_of_real_words(path: Path, architecture: TinyArchitecture) -> Path:
    words = GGUFReader(resolve_model(None).path)
    with tempfile.TemporaryDirectory() as folder:
        tiny = GGUFReader(write_tiny_model(Path(folder) / "tiny.gguf", architecture))
        writer = GGUFWriter(str(path), str(tiny.fields["general.architecture"].contents()))
        n_vocab = len(words.fields["tokenizer.ggml.tokens"].data)
        for field in tiny.fields.values():
            if field.name.endswith(".vocab_size"):
                writer.add_uint32(field.name, n_vocab)
            elif not field.name.startswith(TOKENIZER):
                _copy(writer, field)
        for field in words.fields.values():
            if field.name.startswith(TOKENIZER):
                _copy(writer, field)
        _add_weights(writer, tiny, n_vocab)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def _copy(writer: GGUFWriter, field: ReaderField) -> None:
    """Copy a field, except the counts of the header and the architecture."""
    if field.name.startswith("GGUF.") or field.name == "general.architecture":
        return
    kind, *rest = field.types
    inner = rest[-1] if kind is GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def _add_weights(writer: GGUFWriter, tiny: GGUFReader, n_vocab: int) -> None:
    random = np.random.default_rng(1)
    gains = {"token_embd.weight": EMBEDDING_GAIN, "output.weight": 1.0}
    for tensor in tiny.tensors:
        if gain := gains.get(tensor.name):
            values = random.normal(0, gain / np.sqrt(N_EMBD), (n_vocab, N_EMBD))
            writer.add_tensor(tensor.name, values.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
