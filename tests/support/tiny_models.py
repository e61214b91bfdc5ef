"""Writes tiny random-weight GGUF models, one for each memory class of llama.cpp.

They know nothing; they exercise KV cache, sliding window and recurrent state in files under a
megabyte. Input and output embeddings are not tied, so that a reply depends on its prompt and
does not repeat one token.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from tests.support.tiny_vocabulary import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    END_OF_TEXT,
    TURN_END,
    vocabulary,
)

SLIDING_WINDOW = 128
N_EMBD, N_LAYER, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF = 64, 4, 4, 2, 32, 96
EPSILON = 1e-5
# Control characters, which no text of a test has. Each byte has a token, in the order of bytes
# that have none of their own in the vocabulary's alphabet.
INFILL_TOKENS = {
    mark: vocabulary().id(chr(256 + byte))
    for byte, mark in enumerate(("pre", "suf", "mid", "rep", "sep"), start=1)
}


class TinyArchitecture(StrEnum):
    LLAMA = "llama"  # dense attention
    QWEN3_MOE = "qwen3moe"  # dense attention, and experts
    GEMMA3 = "gemma3"  # sliding-window layers and a global one
    QWEN35 = "qwen35"  # hybrid: recurrent (gated delta net) and attention layers
    LFM2_SWA = "lfm2-swa"  # hybrid: short convolutions and sliding-window attention
    MAMBA2 = "mamba2"  # recurrent only


# One architecture for each memory class; experts change the weights, not the memory.
MEMORY_CLASSES = [one for one in TinyArchitecture if one is not TinyArchitecture.QWEN3_MOE]


def write_tiny_model(
    path: Path,
    architecture: TinyArchitecture,
    *,
    seed: int = 1,
    context_length: int = 32768,
    pre_tokenizer: str = "gpt-2",
    metadata: Mapping[str, int] | None = None,
    infill: bool = False,
    and_write: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Equal arguments give equal bytes. `metadata` is written as it is.

    `infill`: with tokens for filling in the middle. `and_write` adds other metadata.
    """
    name, build = ARCHITECTURES[architecture]
    model = _Model(GGUFWriter(str(path), name), name, seed)
    model.writer.add_name(f"tiny random {architecture}")
    model.set("context_length", context_length)
    model.set("block_count", N_LAYER)
    model.set("embedding_length", N_EMBD)
    _add_tokenizer(model.writer, pre_tokenizer)
    for key, value in (metadata or {}).items():
        model.writer.add_uint32(key, value)
    if infill:
        for mark, token in INFILL_TOKENS.items():
            model.writer.add_uint32(f"tokenizer.ggml.fim_{mark}_token_id", token)
    if and_write is not None:
        and_write(model.writer)
    build(model)
    _write(model)
    return path


def write_tiny_reranker(path: Path, *, template: str | None = None) -> Path:
    """Write a model that gives a text two chances, as Qwen3-Reranker does."""
    model = _Model(GGUFWriter(str(path), "qwen3"), "qwen3", seed=1)
    model.set("context_length", 4096)
    model.set("block_count", N_LAYER)
    model.set("embedding_length", N_EMBD)
    model.set("pooling_type", 4)
    _add_tokenizer(model.writer, "gpt-2")
    if template is not None:
        model.writer.add_string("tokenizer.chat_template.rerank", template)
    model.writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
    _attention_keys(model)
    _embeddings(model)
    model.matrix("cls.output", N_EMBD, 2)
    for block in _blocks():
        model.norm(f"{block}.attn_norm")
        _attention(model, block)
        _query_key_norms(model, block)
        model.norm(f"{block}.ffn_norm")
        _feed_forward(model, block)
    _write(model)
    return path


def _write(model: "_Model") -> None:
    model.writer.write_header_to_file()
    model.writer.write_kv_data_to_file()
    model.writer.write_tensors_to_file()
    model.writer.close()


class _Model:
    """A GGUF file being filled. Shapes are in ggml's order: the row length first."""

    def __init__(self, writer: GGUFWriter, name: str, seed: int) -> None:
        self.writer = writer
        self._name = name
        self._random = np.random.default_rng(seed)

    def set(self, key: str, value: int | float | list[int]) -> None:
        key = f"{self._name}.{key}"
        if isinstance(value, int):
            self.writer.add_uint32(key, value)
        elif isinstance(value, float):
            self.writer.add_float32(key, value)
        else:
            self.writer.add_array(key, value)

    def matrix(self, name: str, n_in: int, n_out: int, *, gain: float = 1.0) -> None:
        """Outputs have about unit variance. Half precision, as llama.cpp wants of weights."""
        values = self._random.normal(0, gain / np.sqrt(n_in), (n_out, n_in))
        self.writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def experts(self, name: str, n_in: int, n_out: int, n_experts: int) -> None:
        values = self._random.normal(0, 1 / np.sqrt(n_in), (n_experts, n_out, n_in))
        self.writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def normal(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.1) -> None:
        self._add_vector(name, self._random.normal(mean, spread, shape[::-1]))

    def uniform(self, name: str, *shape: int, low: float, high: float) -> None:
        self._add_vector(name, self._random.uniform(low, high, shape[::-1]))

    def norm(self, name: str, n: int = N_EMBD) -> None:
        self.normal(f"{name}.weight", n, mean=1.0, spread=0.05)

    def _add_vector(self, name: str, values: NDArray[np.float64]) -> None:
        self.writer.add_tensor(name, values.astype(np.float32))


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    words = vocabulary()
    n_text = len(words.tokens) - len(CONTROL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types([TokenType.NORMAL] * n_text + [TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.id(END_OF_TEXT))
    writer.add_eos_token_id(words.id(TURN_END))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _embeddings(model: _Model, *, norm: str = "output_norm") -> None:
    n_vocab = len(vocabulary().tokens)
    model.set("vocab_size", n_vocab)
    model.matrix("token_embd", N_EMBD, n_vocab, gain=8.0)
    model.norm(norm)
    model.matrix("output", N_EMBD, n_vocab)


def _attention_keys(
    model: _Model, *, kv_heads: int | list[int] = N_HEAD_KV, head_dim: int = HEAD_DIM
) -> None:
    model.set("attention.head_count", N_HEAD)
    model.set("attention.head_count_kv", kv_heads)
    model.set("attention.key_length", head_dim)
    model.set("attention.value_length", head_dim)
    model.set("attention.layer_norm_rms_epsilon", EPSILON)
    model.set("rope.dimension_count", head_dim)
    model.set("rope.freq_base", 10000.0)
    model.set("feed_forward_length", N_FF)


def _attention(model: _Model, block: str, *, head_dim: int = HEAD_DIM, q_parts: int = 1) -> None:
    """The gain makes attention peaked enough that far tokens change the reply."""
    model.matrix(f"{block}.attn_q", N_EMBD, q_parts * N_HEAD * head_dim, gain=1.5)
    model.matrix(f"{block}.attn_k", N_EMBD, N_HEAD_KV * head_dim, gain=1.5)
    model.matrix(f"{block}.attn_v", N_EMBD, N_HEAD_KV * head_dim, gain=1.5)
    model.matrix(f"{block}.attn_output", N_HEAD * head_dim, N_EMBD)


def _query_key_norms(model: _Model, block: str, *, head_dim: int = HEAD_DIM) -> None:
    model.norm(f"{block}.attn_q_norm", head_dim)
    model.norm(f"{block}.attn_k_norm", head_dim)


def _feed_forward(model: _Model, block: str) -> None:
    model.matrix(f"{block}.ffn_gate", N_EMBD, N_FF)
    model.matrix(f"{block}.ffn_up", N_EMBD, N_FF)
    model.matrix(f"{block}.ffn_down", N_FF, N_EMBD)


def _state_space_keys(model: _Model, *, state: int, heads: int, inner: int, groups: int) -> None:
    model.set("ssm.conv_kernel", 4)
    model.set("ssm.inner_size", inner)
    model.set("ssm.state_size", state)
    model.set("ssm.time_step_rank", heads)
    model.set("ssm.group_count", groups)


def _llama(model: _Model) -> None:
    _attention_keys(model)
    _embeddings(model)
    for block in _blocks():
        model.norm(f"{block}.attn_norm")
        _attention(model, block)
        model.norm(f"{block}.ffn_norm")
        _feed_forward(model, block)


def _qwen3_moe(model: _Model) -> None:
    experts = 4
    _attention_keys(model)
    model.set("expert_count", experts)
    model.set("expert_used_count", 2)
    model.set("expert_feed_forward_length", N_FF)
    _embeddings(model)
    for block in _blocks():
        model.norm(f"{block}.attn_norm")
        _attention(model, block)
        _query_key_norms(model, block)
        model.norm(f"{block}.ffn_norm")
        model.matrix(f"{block}.ffn_gate_inp", N_EMBD, experts)
        model.experts(f"{block}.ffn_gate_exps", N_EMBD, N_FF, experts)
        model.experts(f"{block}.ffn_up_exps", N_EMBD, N_FF, experts)
        model.experts(f"{block}.ffn_down_exps", N_FF, N_EMBD, experts)


def _gemma3(model: _Model) -> None:
    _attention_keys(model)
    model.set("attention.sliding_window", SLIDING_WINDOW)
    model.set("attention.sliding_window_pattern", 4)
    model.set("rope.freq_base_swa", 10000.0)
    _embeddings(model)
    for block in _blocks():
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.norm(f"{block}.{name}")
        _attention(model, block)
        _query_key_norms(model, block)
        _feed_forward(model, block)


def _qwen35(model: _Model) -> None:
    """Delta-net layers at even places, gated attention at odd ones."""
    state, heads, groups = 32, 4, 2
    key, value = state * groups, state * heads
    _attention_keys(model)
    _state_space_keys(model, state=state, heads=heads, inner=value, groups=groups)
    model.set("full_attention_interval", 2)
    model.set("rope.dimension_sections", [8, 4, 4, 0])
    _embeddings(model)
    for i, block in enumerate(_blocks()):
        model.norm(f"{block}.attn_norm")
        model.norm(f"{block}.post_attention_norm")
        if i % 2:
            _attention(model, block, q_parts=2)  # the query and its gate
            _query_key_norms(model, block)
        else:
            model.matrix(f"{block}.attn_qkv", N_EMBD, 2 * key + value)
            model.matrix(f"{block}.attn_gate", N_EMBD, value)
            model.matrix(f"{block}.ssm_beta", N_EMBD, heads)
            model.matrix(f"{block}.ssm_alpha", N_EMBD, heads)
            model.normal(f"{block}.ssm_conv1d.weight", 4, 2 * key + value, spread=0.5)
            model.normal(f"{block}.ssm_dt.bias", heads, mean=-2.0, spread=0.5)
            model.uniform(f"{block}.ssm_a", heads, low=-1.0, high=-0.05)
            model.norm(f"{block}.ssm_norm", state)
            model.matrix(f"{block}.ssm_out", value, N_EMBD)
        _feed_forward(model, block)


def _lfm2_swa(model: _Model) -> None:
    """Short convolutions where a layer has no KV heads, sliding attention elsewhere."""
    kv_heads = [0, N_HEAD_KV] * (N_LAYER // 2)
    head_dim = N_EMBD // N_HEAD
    convolution = 3
    _attention_keys(model, kv_heads=kv_heads, head_dim=head_dim)
    model.set("shortconv.l_cache", convolution)
    model.set("attention.sliding_window", SLIDING_WINDOW)
    _embeddings(model, norm="token_embd_norm")
    for n_kv, block in zip(kv_heads, _blocks(), strict=True):
        model.norm(f"{block}.attn_norm")
        model.norm(f"{block}.ffn_norm")
        if n_kv:
            _attention(model, block, head_dim=head_dim)
            _query_key_norms(model, block, head_dim=head_dim)
        else:
            model.normal(f"{block}.shortconv.conv.weight", convolution, N_EMBD, spread=0.5)
            model.matrix(f"{block}.shortconv.in_proj", N_EMBD, 3 * N_EMBD)
            model.matrix(f"{block}.shortconv.out_proj", N_EMBD, N_EMBD)
        _feed_forward(model, block)


def _mamba2(model: _Model) -> None:
    inner, state, heads = 128, 16, 4
    mixed = inner + 2 * state
    _state_space_keys(model, state=state, heads=heads, inner=inner, groups=1)
    model.set("attention.layer_norm_rms_epsilon", EPSILON)
    model.set("attention.head_count", 0)
    model.set("feed_forward_length", 0)
    _embeddings(model)
    for block in _blocks():
        model.norm(f"{block}.attn_norm")
        model.matrix(f"{block}.ssm_in", N_EMBD, inner + mixed + heads)
        model.normal(f"{block}.ssm_conv1d.weight", 4, mixed, spread=0.5)
        model.normal(f"{block}.ssm_conv1d.bias", mixed)
        model.normal(f"{block}.ssm_dt.bias", heads, mean=-2.0, spread=0.5)
        model.uniform(f"{block}.ssm_a", 1, heads, low=-1.0, high=-0.05)
        model.normal(f"{block}.ssm_d", 1, heads, mean=1.0)
        model.normal(f"{block}.ssm_norm.weight", inner, 1, mean=1.0, spread=0.05)
        model.matrix(f"{block}.ssm_out", inner, N_EMBD)


def _blocks() -> list[str]:
    return [f"blk.{i}" for i in range(N_LAYER)]


ARCHITECTURES: dict[TinyArchitecture, tuple[str, Callable[[_Model], None]]] = {
    TinyArchitecture.LLAMA: ("llama", _llama),
    TinyArchitecture.QWEN3_MOE: ("qwen3moe", _qwen3_moe),
    TinyArchitecture.GEMMA3: ("gemma3", _gemma3),
    TinyArchitecture.QWEN35: ("qwen35", _qwen35),
    TinyArchitecture.LFM2_SWA: ("lfm2", _lfm2_swa),
    TinyArchitecture.MAMBA2: ("mamba2", _mamba2),
}
