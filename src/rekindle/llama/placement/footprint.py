"""What a model takes in memory, from the header of its file: weights, rows, recurrent state.

The rules are llama.cpp's (`llama-hparams.cpp`, `llama-kv-cache*.cpp`, `src/models`). An
architecture with rules of its own counts as dense, which takes more than it needs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.config.choices import KvType
from rekindle.config.placement import TensorOverride
from rekindle.generation.model_state import ModelClass
from rekindle.llama.placement.gguf_header import MAX_LAYERS, GgufHeader

_F32_BYTES = 4
_CELLS = 256  # llama.cpp's contexts have a multiple of this
# Values of a block, and its bytes.
_KV_BLOCKS = {
    KvType.F16: (1, 2),
    KvType.F32: (1, 4),
    KvType.BF16: (1, 2),
    KvType.Q8_0: (32, 34),
    KvType.Q5_1: (32, 24),
    KvType.Q5_0: (32, 22),
    KvType.Q4_1: (32, 20),
    KvType.Q4_0: (32, 18),
    KvType.IQ4_NL: (32, 18),
}
# Every n-th layer sees the whole context, where the file does not say.
_WINDOW_PATTERNS = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "llama4": 4,
    "olmo2": 4,
    "exaone4": 4,
    "exaone-moe": 4,
    "afmoe": 4,
    "mellum": 4,
    "plamo3": 8,
}
_DENSE_FIRST = {"cohere2moe": 4, "smallthinker": 4, "laguna": 4}  # the first of n, not the last
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
_INTERVALS = {"qwen3next", "qwen35", "qwen35moe", "minimax-01"}
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(?:up|down|gate|gate_up)_(?:ch|)exps")


@dataclass(frozen=True, slots=True)
class Layer:
    weight_bytes: int
    expert_bytes: int = 0  # of those
    host_bytes: int = 0  # of those, without experts: placed on the host by name
    n_k: int = 0  # values of a row; 0: the layer has no rows
    n_v: int = 0
    is_windowed: bool = False
    state_bytes: int = 0  # of one sequence


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What the settings say about rows."""

    type_k: KvType
    type_v: KvType
    swa_full: bool
    n_sequences: int
    n_ubatch: int

    def row_bytes(self, layer: Layer) -> int:
        return _bytes(self.type_k, layer.n_k) + _bytes(self.type_v, layer.n_v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    model_class: ModelClass
    n_ctx_train: int
    window: int
    layers: tuple[Layer, ...]
    input_bytes: int  # weights that stay on the host: the embeddings of tokens
    output_bytes: int
    n_vocab: int
    n_embd: int
    n_ff: int
    n_heads: int
    rope_depends_on_n_ctx: bool

    @property
    def weight_bytes(self) -> int:
        return self.input_bytes + self.output_bytes + sum(each.weight_bytes for each in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(layer.expert_bytes for layer in self.layers)

    def row_bytes(self, rows: RowFormat) -> int:
        """Return the bytes of a token that every position keeps."""
        return sum(rows.row_bytes(each) for each in self.layers if self._is_full(each, rows))

    def checkpoint_bytes(self, rows: RowFormat) -> int:
        """Return the bytes that a position keeps beside its rows: windows and recurrent state."""
        windows = sum(rows.row_bytes(each) for each in self.layers if not self._is_full(each, rows))
        return windows * self.window + sum(each.state_bytes for each in self.layers)

    def context_bytes(self, layer: Layer, n_ctx: int, rows: RowFormat) -> int:
        """Return what a layer takes of a context of that size."""
        n_cells = _padded(n_ctx)
        if not self._is_full(layer, rows):
            n_cells = _padded(min(n_cells, self.window * rows.n_sequences + rows.n_ubatch))
        return n_cells * rows.row_bytes(layer) + layer.state_bytes * rows.n_sequences

    def _is_full(self, layer: Layer, rows: RowFormat) -> bool:
        return rows.swa_full or not layer.is_windowed


def footprint(header: GgufHeader, overrides: Sequence[TensorOverride] = ()) -> Footprint:
    """Compute the footprint. `overrides` are the operator's."""
    n_layers = max(header.count("block_count") - header.count("nextn_predict_layers"), 0)
    if n_layers > MAX_LAYERS:
        raise ValueError(f"it has {n_layers} layers")
    n_embd, n_heads = header.count("embedding_length"), header.count("attention.head_count")
    recurrent = _recurrent_layers(header, n_layers)
    window, windowed = _windows(header, n_layers, recurrent)
    weights = _weights(header, n_layers, overrides)
    layers = []
    for number in range(n_layers):
        n_k, n_v = _row_values(header, number, n_layers, is_windowed=windowed[number])
        has_rows = not recurrent[number] or header.architecture == "falcon-h1"
        layers.append(
            replace(
                weights[number],
                n_k=n_k if has_rows else 0,
                n_v=n_v if has_rows else 0,
                is_windowed=windowed[number] and has_rows and n_k > 0,
                state_bytes=_state_bytes(header) if recurrent[number] else 0,
            )
        )
    tokens, output = header.tensors.get("token_embd.weight", 0), header.tensors.get("output.weight")
    rest = sum(header.tensors.values()) - sum(each.weight_bytes for each in weights) - tokens
    # Without weights of its own, the output takes a second copy of the embeddings on a GPU.
    return Footprint(
        model_class=_class_of(layers),
        n_ctx_train=header.count("context_length"),
        window=window,
        layers=tuple(layers),
        input_bytes=tokens if output is not None else 0,
        output_bytes=rest if output is not None else rest + tokens,
        n_vocab=header.count("vocab_size") or header.lengths.get("tokenizer.ggml.tokens", 0),
        n_embd=n_embd,
        n_ff=header.count("feed_forward_length"),
        n_heads=n_heads,
        rope_depends_on_n_ctx=header.count("rope.scaling.original_context_length") > 0,
    )


def _class_of(layers: Sequence[Layer]) -> ModelClass:
    has_rows = any(layer.n_k for layer in layers)
    if any(layer.state_bytes for layer in layers):
        return ModelClass.HYBRID if has_rows else ModelClass.RECURRENT
    windowed = any(layer.is_windowed for layer in layers)
    return ModelClass.SLIDING_WINDOW if windowed else ModelClass.DENSE


def _weights(header: GgufHeader, n_layers: int, overrides: Sequence[TensorOverride]) -> list[Layer]:
    patterns = [(re.compile(each.pattern), each.buffer_type == "CPU") for each in overrides]
    layers = [Layer(0)] * n_layers
    for name, n_bytes in header.tensors.items():
        match = _BLOCK.match(name)
        if not match or int(match[1]) >= n_layers:
            continue
        placed = next((is_host for pattern, is_host in patterns if pattern.search(name)), None)
        layer = layers[int(match[1])]
        layers[int(match[1])] = replace(
            layer,
            weight_bytes=layer.weight_bytes + n_bytes,
            host_bytes=layer.host_bytes + (n_bytes if placed else 0),
            expert_bytes=layer.expert_bytes
            + (n_bytes if placed is None and _EXPERTS.search(name) else 0),
        )
    return layers


def _row_values(
    header: GgufHeader, number: int, n_layers: int, *, is_windowed: bool
) -> tuple[int, int]:
    """Return the values of K and of V of one token in one layer."""
    if number >= _layers_with_rows(header, n_layers):
        return 0, 0
    heads = header.per_layer("attention.head_count", n_layers) or [0] * n_layers
    kv_heads = (header.per_layer("attention.head_count_kv", n_layers) or heads)[number]
    head = header.count("embedding_length") // max(heads[number], max(heads), 1)
    suffix = "_swa" if is_windowed else ""
    n_k = header.count("attention.key_length", head)
    n_v = header.count("attention.value_length", head)
    n_k = header.count(f"attention.key_length{suffix}", n_k)
    n_v = header.count(f"attention.value_length{suffix}", n_v)
    if header.count("attention.key_length_mla"):
        n_v = 0  # V is a part of K
    return kv_heads * n_k, kv_heads * n_v


def _layers_with_rows(header: GgufHeader, n_layers: int) -> int:
    """Return how many layers have rows of their own; later ones share them."""
    if header.architecture == "gemma3n":
        return min(20, n_layers)
    return n_layers - header.count("attention.shared_kv_layers")


def _recurrent_layers(header: GgufHeader, n_layers: int) -> list[bool]:
    if header.architecture in _RECURRENT or header.architecture == "falcon-h1":
        return [True] * n_layers
    if listed := header.per_layer("attention.recurrent_layers", n_layers):
        return [bool(each) for each in listed]
    if header.architecture in _INTERVALS:
        interval = max(header.count("full_attention_interval", 4), 1)
        return [(number + 1) % interval != 0 for number in range(n_layers)]
    if header.has_list("attention.head_count_kv") and _state_bytes(header):
        kv_heads = header.per_layer("attention.head_count_kv", n_layers) or []
        n_ff = header.per_layer("feed_forward_length", n_layers) or []
        if header.architecture.startswith("nemotron_h"):
            return [not kv and not ff for kv, ff in zip(kv_heads, n_ff, strict=True)]
        return [not each for each in kv_heads]
    return [False] * n_layers


def _windows(
    header: GgufHeader, n_layers: int, recurrent: Sequence[bool]
) -> tuple[int, list[bool]]:
    """Return the size of the window, and which layers have it."""
    none = [False] * n_layers
    window = header.count(
        "attention.sliding_window", 8192 if header.architecture == "llama4" else 0
    )
    if not window or header.architecture == "phi3":
        return 0, none
    if header.architecture.startswith("lfm2"):
        return window, [not each for each in recurrent]
    if header.has_list("attention.sliding_window_pattern"):
        listed = header.per_layer("attention.sliding_window_pattern", n_layers) or []
        return window, [bool(each) for each in listed]
    first = _DENSE_FIRST.get(header.architecture)
    pattern = header.count(
        "attention.sliding_window_pattern", first or _WINDOW_PATTERNS.get(header.architecture, 1)
    )
    if pattern == 0:
        return window, [True] * n_layers
    place = 0 if first else pattern - 1
    windowed = [number % pattern != place for number in range(n_layers)]
    return (window, windowed) if any(windowed) else (0, none)


def _state_bytes(header: GgufHeader) -> int:
    """Return the recurrent state of one layer for one sequence."""
    n_embd = header.count("embedding_length")
    if head_size := header.count("wkv.head_size"):
        n_values = n_embd * (header.count("token_shift_count", 2) + head_size)
    elif length := header.count("shortconv.l_cache"):
        n_values = n_embd * (length - 1)
    elif head_size := header.count("kda.head_dim"):
        n_inner = header.count("attention.head_count") * head_size
        n_values = n_inner * (3 * (header.count("ssm.conv_kernel", 4) - 1) + head_size)
    else:
        n_state, n_inner = header.count("ssm.state_size"), header.count("ssm.inner_size")
        n_mixed = n_inner + 2 * header.count("ssm.group_count") * n_state
        n_values = n_inner * n_state + max(header.count("ssm.conv_kernel") - 1, 0) * n_mixed
    return n_values * _F32_BYTES


def _bytes(kind: KvType, n_values: int) -> int:
    n_block, n_bytes = _KV_BLOCKS[kind]
    return -(-n_values // n_block) * n_bytes


def _padded(n_cells: int) -> int:
    return -(-n_cells // _CELLS) * _CELLS
