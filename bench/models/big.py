"""Write a model with the shape of an 8B Llama and random weights.

    python -m bench.models.big FILE [N_LAYERS]

16 GB in half precision. Its steps, rows and logits are as large as those of a real model.
Needs the `gguf` package.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from rekindle.bench.throughput import WORDS

N_RANDOM = 2**24  # drawn once; every tensor starts at another one of them
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    n_vocab: int
    n_embd: int
    n_ff: int
    n_layers: int
    n_head: int
    n_head_kv: int
    head_dim: int


LLAMA_8B = DenseShape(
    n_vocab=128_256,
    n_embd=4096,
    n_ff=14_336,
    n_layers=32,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
)


def main(path: Path, n_layers: int = LLAMA_8B.n_layers) -> None:
    write_dense_model(path, "random 8B", replace(LLAMA_8B, n_layers=n_layers))


def write_dense_model(path: Path, name: str, shape: DenseShape) -> None:
    """Write a Llama with random weights. Equal arguments give equal bytes."""
    writer = dense_writer(path, name, shape)
    _add_weights(writer, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dense_writer(path: Path, name: str, shape: DenseShape) -> GGUFWriter:
    """Return a writer that has everything but the weights."""
    writer = GGUFWriter(str(path), "llama", use_temp_file=False)
    writer.add_name(name)
    writer.add_context_length(131_072)
    writer.add_block_count(shape.n_layers)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    _add_tokenizer(writer, shape.n_vocab)
    return writer


def fillers_of(n_vocab: int) -> range:
    """Return the tokens that stand for no text of ours. Their texts are `filler0`, `filler1`..."""
    return range(len(_byte_alphabet()) + len(_merges()), n_vocab - len(CONTROL))


def filler_text(number: int) -> str:
    return f"filler{number}"


def _add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """Every byte and some words are tokens. Fillers bring the vocabulary to its size."""
    alphabet, merges = _byte_alphabet(), _merges()
    pieces = [merge.replace(" ", "") for merge in merges]
    n_text = n_vocab - len(CONTROL)
    fillers = [filler_text(number) for number in range(len(fillers_of(n_vocab)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *pieces, *fillers, *CONTROL])
    writer.add_token_types([TokenType.NORMAL] * n_text + [TokenType.CONTROL] * len(CONTROL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(n_text)
    writer.add_eos_token_id(n_text + 2)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(TEMPLATE)


def _merges() -> list[str]:
    """Return merges that build each word letter by letter, from the space before it."""
    merges = []
    for word in WORDS.split():
        spaced = _byte_alphabet()[ord(" ")] + word
        merges += [f"{spaced[:place]} {spaced[place]}" for place in range(1, len(spaced))]
    return list(dict.fromkeys(merges))


def _byte_alphabet() -> list[str]:
    """Return GPT-2's alphabet: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def _add_weights(writer: GGUFWriter, shape: DenseShape) -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal(N_RANDOM, dtype=np.float32).astype(np.float16)

    def matrix(name: str, n_in: int, n_out: int, gain: float = 1.0) -> None:
        scaled = values * np.float16(gain / np.sqrt(n_in))
        shifted = np.roll(scaled, int(random.integers(N_RANDOM)))
        writer.add_tensor(f"{name}.weight", np.resize(shifted, (n_out, n_in)))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.n_embd, dtype=np.float32))

    n_embd, n_kv = shape.n_embd, shape.n_head_kv * shape.head_dim
    n_query = shape.n_head * shape.head_dim
    matrix("token_embd", n_embd, shape.n_vocab, gain=8.0)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        matrix(f"{block}.attn_q", n_embd, n_query, gain=1.5)
        matrix(f"{block}.attn_k", n_embd, n_kv, gain=1.5)
        matrix(f"{block}.attn_v", n_embd, n_kv)
        matrix(f"{block}.attn_output", n_query, n_embd)
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.ffn_gate", n_embd, shape.n_ff)
        matrix(f"{block}.ffn_up", n_embd, shape.n_ff)
        matrix(f"{block}.ffn_down", shape.n_ff, n_embd)
    norm("output_norm")
    matrix("output", n_embd, shape.n_vocab)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
