"""A model of the shape of an 8B Llama with random weights, to measure what only size shows.

    python -m bench.models.big FILE [N_LAYERS]

16 GB in half precision. It knows nothing, but its steps, rows and logits are as large as real ones.
Needs the `gguf` package.
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from rekindle.bench.throughput import WORDS

N_VOCAB, N_EMBD, N_FF = 128_256, 4096, 14_336
N_LAYERS, N_HEAD, N_HEAD_KV, HEAD_DIM = 32, 32, 8, 128
N_RANDOM = 2**24  # drawn once; every tensor takes them from another place on
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_big_model(path: Path, n_layers: int = N_LAYERS) -> None:
    writer = GGUFWriter(str(path), "llama", use_temp_file=False)
    writer.add_name("random 8B")
    writer.add_context_length(131_072)
    writer.add_block_count(n_layers)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(N_VOCAB)
    _add_tokenizer(writer)
    _add_weights(writer, n_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter) -> None:
    """Every byte is a token, and so are some words; the others are there for their number."""
    alphabet, merges = _byte_alphabet(), _merges()
    pieces = [merge.replace(" ", "") for merge in merges]
    n_text = N_VOCAB - len(CONTROL)
    fillers = [f"filler{number}" for number in range(n_text - len(alphabet) - len(pieces))]
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
    """Letter by letter from the space before a word to its end."""
    merges = []
    for word in WORDS.split():
        spaced = _byte_alphabet()[ord(" ")] + word
        merges += [f"{spaced[:place]} {spaced[place]}" for place in range(1, len(spaced))]
    return list(dict.fromkeys(merges))


def _byte_alphabet() -> list[str]:
    """GPT-2's: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def _add_weights(writer: GGUFWriter, n_layers: int) -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal(N_RANDOM, dtype=np.float32).astype(np.float16)

    def matrix(name: str, n_in: int, n_out: int, gain: float = 1.0) -> None:
        scaled = values * np.float16(gain / np.sqrt(n_in))
        shifted = np.roll(scaled, int(random.integers(N_RANDOM)))
        writer.add_tensor(f"{name}.weight", np.resize(shifted, (n_out, n_in)))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, dtype=np.float32))

    matrix("token_embd", N_EMBD, N_VOCAB, gain=8.0)
    for layer in range(n_layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        matrix(f"{block}.attn_q", N_EMBD, N_HEAD * HEAD_DIM, gain=1.5)
        matrix(f"{block}.attn_k", N_EMBD, N_HEAD_KV * HEAD_DIM, gain=1.5)
        matrix(f"{block}.attn_v", N_EMBD, N_HEAD_KV * HEAD_DIM)
        matrix(f"{block}.attn_output", N_HEAD * HEAD_DIM, N_EMBD)
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.ffn_gate", N_EMBD, N_FF)
        matrix(f"{block}.ffn_up", N_EMBD, N_FF)
        matrix(f"{block}.ffn_down", N_FF, N_EMBD)
    norm("output_norm")
    matrix("output", N_EMBD, N_VOCAB)


if __name__ == "__main__":
    write_big_model(Path(sys.argv[1]), *map(int, sys.argv[2:]))
