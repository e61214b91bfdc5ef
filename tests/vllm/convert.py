"""SmolLM2 as Hugging Face has it, from the embedded GGUF: what vLLM loads, and its tokenizer.

`python -m tests.vllm.convert FOLDER` writes all of it, in float32.
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from rekindle.models.source import resolve_model

METADATA_BYTES = 16 * 2**20  # more than enough
GGUF_MAGIC = int.from_bytes(b"GGUF", "little")
STRING, ARRAY = 8, 9  # GGUF's types
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
CONTROL = 3  # GGUF's token types
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


Metadata = dict[str, Any]


def read_metadata(path: Path) -> Metadata:
    """Read the metadata; gguf's own reader takes seconds for it."""
    with path.open("rb") as file:
        return dict(_pairs(_Bytes(file.read(METADATA_BYTES))))


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    added = [
        {
            "id": token,
            "content": tokens[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, kind in enumerate(kinds)
        if kind == CONTROL
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    bos, eos = (tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    _write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {text: token for token, text in enumerate(tokens)},
                "merges": merges,
            },
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "chat_template": metadata["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
        },
    )
    end = metadata["tokenizer.ggml.eos_token_id"]
    _write(folder / "generation_config.json", {"eos_token_id": end})
    _write(folder / "config.json", _config(metadata, n_vocab=len(tokens), eos=end))


def write_weights(path: Path, folder: Path) -> None:
    """A safetensors file: the length of a JSON header, the header, the bytes."""
    reader = GGUFReader(path)
    metadata = read_metadata(path)
    n_heads = metadata["llama.attention.head_count"]
    n_kv_heads = metadata["llama.attention.head_count_kv"]
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    n_bytes = 0
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            values = _rows_as_written(values, n_heads)
        elif ".attn_k." in tensor.name:
            values = _rows_as_written(values, n_kv_heads)
        data = np.ascontiguousarray(values).tobytes()
        offsets = [n_bytes, n_bytes + len(data)]
        header[_name(tensor.name)] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": offsets,
        }
        parts.append(data)
        n_bytes += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            file.write(part)


def _config(metadata: Metadata, *, n_vocab: int, eos: int) -> dict[str, Any]:
    def of(name: str) -> Any:
        return metadata[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_theta": of("rope.freq_base"),
        "tie_word_embeddings": True,
        "vocab_size": n_vocab,
        "eos_token_id": eos,
        "dtype": "float32",
    }


def _rows_as_written(values: Any, n_heads: int) -> Any:
    """GGUF interleaves the two halves that RoPE turns."""
    n_rows = values.shape[0]
    halves = values.reshape(n_heads, n_rows // n_heads // 2, 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def _name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, form: str) -> Any:
        [value] = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def text(self) -> str:
        n_bytes = self.take("Q")
        self._at += n_bytes
        return self._data[self._at - n_bytes : self._at].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            of, count = self.take("I"), self.take("Q")
            return [self.value(of) for _ in range(count)]
        return self.take(SCALARS[kind])


def _pairs(data: _Bytes) -> Iterator[tuple[str, Any]]:
    assert data.take("I") == GGUF_MAGIC
    assert data.take("I") == 3
    data.take("Q")  # of tensors
    for _ in range(data.take("Q")):
        yield data.text(), data.value(data.take("I"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    embedded = resolve_model(None).path
    write_tokenizer(read_metadata(embedded), target)
    write_weights(embedded, target)
