"""llama.cpp's CPU flash attention, run alone and compared with attention in float64.

scripts/llama_cpp/attention.patch changes this operation. All tests but the last also hold for an
unpatched library, whose row-at-a-time path adds up f16 values in f16.
"""

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rekindle.llama.library import ggml

_F32, _F16, _Q8_0 = 0, 1, 8  # enum ggml_type
_Q8_0_BLOCK = 32
_NEG_INF = -np.inf

Array = NDArray[Any]
Masking = Callable[["Case", np.random.Generator], Array]


@dataclass(frozen=True, slots=True)
class Case:
    """The shape of one attention. `masking` gives the mask, [sequences, heads or 1, tokens, kv]."""

    n_tokens: int
    n_kv: int
    n_kv_heads: int = 2
    gqa_ratio: int = 4
    dk: int = 64
    dv: int = 64
    n_sequences: int = 1
    n_threads: int = 2
    kv_type: int = _F16
    masking: Masking | None = None
    has_sinks: bool = False
    softcap: float = 0.0
    max_bias: float = 0.0

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.gqa_ratio

    def __str__(self) -> str:
        parts = [
            f"{self.n_tokens}x{self.n_kv}",
            f"heads{self.n_heads}:{self.n_kv_heads}",
            f"size{self.dk}:{self.dv}",
            f"sequences{self.n_sequences}",
            f"threads{self.n_threads}",
            {_F32: "f32", _F16: "f16", _Q8_0: "q8_0"}[self.kv_type],
            self.masking.__name__.removeprefix("_") if self.masking else "unmasked",
        ]
        parts += ["sinks"] * self.has_sinks
        parts += [f"softcap{self.softcap:g}"] * bool(self.softcap)
        parts += [f"alibi{self.max_bias:g}"] * bool(self.max_bias)
        return "-".join(parts)


# --- masks ----------------------------------------------------------------------------------------


def _distances(case: Case) -> Array:
    """How far each cell lies behind each token. The last token is on the last cell."""
    positions = np.arange(case.n_kv - case.n_tokens, case.n_kv)
    return positions[:, None] - np.arange(case.n_kv)[None, :]


def _causal(case: Case, _random: np.random.Generator) -> Array:
    visible = _distances(case) >= 0
    mask = np.where(visible, 0.0, _NEG_INF)
    return np.broadcast_to(mask, (case.n_sequences, 1, *mask.shape))


def _window(case: Case, _random: np.random.Generator) -> Array:
    """Each token sees a few cells only, so most tiles are masked for all tokens."""
    distances = _distances(case)
    mask = np.where((distances >= 0) & (distances < 70), 0.0, _NEG_INF)
    return np.broadcast_to(mask, (case.n_sequences, 1, *mask.shape))


def _holes(case: Case, random: np.random.Generator) -> Array:
    """Cells of other sequences lie between the visible ones. Each token sees one cell at least."""
    shape = (case.n_sequences, 1, case.n_tokens, case.n_kv)
    mask = np.where(random.random(shape) < 0.4, 0.0, _NEG_INF)
    mask[..., random.integers(case.n_kv)] = 0.0
    mask[..., case.n_kv // 3 : case.n_kv // 3 + 130] = _NEG_INF  # two tiles or more
    mask[..., 0] = 0.0
    return mask


def _streams(case: Case, _random: np.random.Generator) -> Array:
    """Each token belongs to a sequence with as many cells of its own, in one buffer."""
    owner = np.arange(case.n_kv) * case.n_tokens // case.n_kv
    mask = np.where(owner == np.arange(case.n_tokens)[:, None], 0.0, _NEG_INF)
    return np.broadcast_to(mask, (case.n_sequences, 1, *mask.shape))


def _padding(case: Case, random: np.random.Generator) -> Array:
    """Every third token sees no cell at all, as the padding of a batch."""
    mask = np.array(_causal(case, random))
    mask[:, :, ::3] = _NEG_INF
    return mask


def _additive(case: Case, random: np.random.Generator) -> Array:
    mask = np.array(_causal(case, random))
    mask += random.normal(size=mask.shape)
    return mask


def _per_head(case: Case, random: np.random.Generator) -> Array:
    shape = (case.n_sequences, case.n_heads, case.n_tokens, case.n_kv)
    mask = np.where(random.random(shape) < 0.5, random.normal(size=shape), _NEG_INF)
    mask[..., 0] = 0.0
    return mask


def _alibi(case: Case, _random: np.random.Generator) -> Array:
    distances = _distances(case)
    mask = np.where(distances >= 0, -distances.astype(np.float64), _NEG_INF)
    return np.broadcast_to(mask, (case.n_sequences, 1, *mask.shape))


# --- inputs and the reference ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inputs:
    """q, k and v are [sequences, rows, heads, size] in float32; k and v hold exact f16 values."""

    q: Array
    k: Array
    v: Array
    mask: Array | None
    sinks: Array | None


def _make_inputs(case: Case, seed: int = 0) -> Inputs:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return random.normal(size=shape).astype(np.float32)

    def cells(size: int) -> Array:
        values = normal(case.n_sequences, case.n_kv, case.n_kv_heads, size)
        return values if case.kv_type == _F32 else values.astype(np.float16).astype(np.float32)

    return Inputs(
        # Scores of a few units: a row's weights lie on some tens of cells, as in a real model.
        q=2 * normal(case.n_sequences, case.n_tokens, case.n_heads, case.dk),
        k=cells(case.dk),
        v=cells(case.dv),
        mask=case.masking(case, random).astype(np.float16) if case.masking else None,
        sinks=2 * normal(case.n_heads) if case.has_sinks else None,
    )


def _slopes(case: Case) -> Array:
    """The factor of each head's mask (ALiBi)."""
    if not case.max_bias:
        return np.ones(case.n_heads)
    n_regular = 2 ** int(np.log2(case.n_heads))
    heads = np.arange(case.n_heads)
    regular = 2.0 ** (-case.max_bias / n_regular * (heads + 1))
    between = 2.0 ** (-case.max_bias / 2 / n_regular * (2 * (heads - n_regular) + 1))
    slopes: Array = np.where(heads < n_regular, regular, between)
    return slopes


def _reference(case: Case, inputs: Inputs) -> Array:
    """Return [sequences, tokens, heads, size]. A row without visible cells is zero."""
    q = inputs.q.astype(np.float64).transpose(0, 2, 1, 3)
    k = inputs.k.astype(np.float64).repeat(case.gqa_ratio, axis=2).transpose(0, 2, 3, 1)
    v = inputs.v.astype(np.float64).repeat(case.gqa_ratio, axis=2).transpose(0, 2, 1, 3)
    scores = q @ k / np.sqrt(case.dk)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if inputs.mask is not None:
        scores = scores + inputs.mask.astype(np.float64) * _slopes(case)[:, None, None]
    highest = scores.max(axis=-1, keepdims=True)
    if inputs.sinks is not None:
        highest = np.maximum(highest, inputs.sinks[:, None, None])
    weights = np.exp(scores - np.where(np.isinf(highest), 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    if inputs.sinks is not None:
        total = total + np.exp(inputs.sinks[:, None, None] - highest)
    rows: Array = (weights @ v / np.where(total == 0.0, 1.0, total)).transpose(0, 2, 1, 3)
    return rows


# --- the operation --------------------------------------------------------------------------------


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def _declare(name: str, restype: Any, *argtypes: Any) -> Any:
    # A function object of its own: other modules declare the same functions in their own way.
    return ctypes.CFUNCTYPE(restype, *argtypes)((name, ggml))


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_init = _declare("ggml_init", _POINTER, _InitParams)
_free = _declare("ggml_free", None, _POINTER)
_new_tensor = _declare("ggml_new_tensor_4d", _POINTER, _POINTER, _INT, *[ctypes.c_int64] * 4)
_data = _declare("ggml_get_data", _POINTER, _POINTER)
_n_bytes = _declare("ggml_nbytes", ctypes.c_size_t, _POINTER)
_permute = _declare("ggml_permute", _POINTER, _POINTER, _POINTER, *[_INT] * 4)
_attention = _declare("ggml_flash_attn_ext", _POINTER, *[_POINTER] * 5, *[_FLOAT] * 3)
_add_sinks = _declare("ggml_flash_attn_ext_add_sinks", None, _POINTER, _POINTER)
_new_graph = _declare("ggml_new_graph", _POINTER, _POINTER)
_expand = _declare("ggml_build_forward_expand", None, _POINTER, _POINTER)
_compute = _declare("ggml_graph_compute_with_ctx", _INT, _POINTER, _POINTER, _INT)

_CONTEXT_BYTES = 64 * 2**20


@pytest.fixture(scope="module", name="context_memory")
def _context_memory() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(_CONTEXT_BYTES)


def _quantise(rows: Array) -> Array:
    """Return q8_0 blocks: a f16 scale and 32 bytes each."""
    blocks = rows.reshape(-1, _Q8_0_BLOCK)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    values = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
    return np.concatenate([scales.view(np.int8), values], axis=1)


def _dequantise(rows: Array) -> Array:
    blocks = _quantise(rows)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    values: Array = (scales * blocks[:, 2:]).reshape(rows.shape)
    return values


_STORED: dict[int, Callable[[Array], Array]] = {
    _F32: lambda values: values.astype(np.float32),
    _F16: lambda values: values.astype(np.float16),
    _Q8_0: _quantise,
}


def _attend(case: Case, inputs: Inputs, memory: ctypes.Array[ctypes.c_char]) -> Array:
    """Return llama.cpp's rows, [sequences, tokens, heads, size]."""
    context = _init(_InitParams(_CONTEXT_BYTES, ctypes.addressof(memory), no_alloc=False))

    def tensor(type_: int, values: Array) -> int:
        new: int = _new_tensor(context, type_, *reversed(values.shape))
        stored = np.ascontiguousarray(_STORED[type_](values))
        assert stored.nbytes == _n_bytes(new)
        ctypes.memmove(_data(new), stored.ctypes.data, stored.nbytes)
        return new

    def heads_apart(tensor: int) -> int:
        permuted: int = _permute(context, tensor, 0, 2, 1, 3)
        return permuted

    try:
        result = _attention(
            context,
            heads_apart(tensor(_F32, inputs.q)),
            heads_apart(tensor(case.kv_type, inputs.k)),
            heads_apart(tensor(case.kv_type, inputs.v)),
            None if inputs.mask is None else tensor(_F16, inputs.mask),
            1 / np.sqrt(case.dk),
            case.max_bias,
            case.softcap,
        )
        if inputs.sinks is not None:
            _add_sinks(result, tensor(_F32, inputs.sinks.reshape(1, 1, 1, -1)))
        graph = _new_graph(context)
        _expand(graph, result)
        ctypes.memset(_data(result), 0xFF, _n_bytes(result))  # NaN: a row that nothing writes
        assert _compute(context, graph, case.n_threads) == 0
        rows = np.empty((case.n_sequences, case.n_tokens, case.n_heads, case.dv), np.float32)
        assert rows.nbytes == _n_bytes(result)
        ctypes.memmove(rows.ctypes.data, _data(result), rows.nbytes)
    finally:
        _free(context)
    return rows


# --- tolerances -----------------------------------------------------------------------------------


def _fewest_rows_in_tiles() -> int:
    """Return how many rows below one K head take the path in tiles, whatever the batch."""
    if not hasattr(ggml, "rekindle_attention"):
        return 2**31
    return 2 if _declare("ggml_cpu_has_avx2", _INT)() else 16


def _tolerance(case: Case) -> float:
    """The largest error of a row relative to its length; a wrong row is about 1 from the right one.

    At least twice what was measured with four seeds: 4e-6 in tiles, 9e-3 in rows of f16.
    """
    if case.kv_type == _Q8_0:
        return 6e-2  # the query is rounded to eight bits, too
    if case.kv_type == _F32:
        return 2e-5
    is_whole = case.dv % 4 == 0  # vectors of V, which NEON wants for tiles
    if is_whole and case.n_tokens * case.gqa_ratio >= _fewest_rows_in_tiles():
        return 2e-5
    # In a batch every library has tiles, but some CPUs want whole vectors.
    return 2e-5 if case.n_tokens >= 64 and case.dv % 16 == 0 else 2e-2


def _largest_error(rows: Array, reference: Array) -> float:
    lengths = np.linalg.norm(reference, axis=-1)
    assert not rows[lengths == 0.0].any(), "a token that sees no cell has a row that is not zero"
    errors = np.linalg.norm(rows - reference, axis=-1) / np.where(lengths == 0.0, 1.0, lengths)
    return float(errors.max())


def _assert_right(case: Case, memory: ctypes.Array[ctypes.c_char]) -> None:
    inputs = _make_inputs(case)
    rows = _attend(case, inputs, memory)
    assert np.isfinite(rows).all()
    if case.kv_type == _Q8_0:
        inputs = replace(inputs, k=_dequantise(inputs.k), v=_dequantise(inputs.v))
    assert _largest_error(rows, _reference(case, inputs)) < _tolerance(case)


# --- tests ----------------------------------------------------------------------------------------


_HEAD_SIZES = [(40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (64, 96), (36, 20)]


def _pick_cases(n_cases: int) -> list[Case]:
    choose = random.Random(55)
    maskings = [None, _causal, _window, _holes, _padding, _additive, _per_head, _alibi]
    cases = []
    for _ in range(n_cases):
        n_tokens = choose.choice([1, 1, 2, 3, 5, 16, 63, 64, 65, 130])
        masking = choose.choice(maskings)
        dk, dv = choose.choice(_HEAD_SIZES)
        cases.append(
            Case(
                n_tokens=n_tokens,
                n_kv=max(n_tokens, choose.choice([1, 7, 64, 65, 256, 511, 512, 513, 640, 1023])),
                n_kv_heads=choose.choice([1, 2, 3] if n_tokens <= 16 else [1, 2]),
                gqa_ratio=choose.choice([1, 3, 4, 8]),
                dk=dk,
                dv=dv,
                n_sequences=choose.choice([1, 1, 1, 2, 3] if n_tokens <= 16 else [1, 1, 2]),
                n_threads=choose.choice([1, 2, 3]),
                kv_type=choose.choice([_F16, _F16, _F32]),
                masking=masking,
                has_sinks=choose.random() < 0.3,
                softcap=choose.choice([0.0, 0.0, 5.0]),
                max_bias=choose.choice([4.0, 8.0]) if masking is _alibi else 0.0,
            )
        )
    return cases


@pytest.mark.parametrize("case", _pick_cases(160), ids=str)
def test_rows_of_any_shape_are_those_of_float64(
    case: Case, context_memory: ctypes.Array[ctypes.c_char]
) -> None:
    _assert_right(case, context_memory)


_EDGES = {
    "one token, cells shared by three threads unevenly": Case(1, 1000, n_threads=3),
    "one token, more threads than tiles": Case(1, 513, n_threads=12),
    "one token, first thread's cells all masked": Case(1, 1024, masking=_window, n_threads=3),
    "one token, first thread's cells masked, with sinks": Case(
        1, 1024, masking=_window, has_sinks=True, n_threads=3
    ),
    "one token that sees no cell": Case(1, 640, masking=_padding, n_threads=3),
    "one token that sees no cell, with sinks": Case(
        1, 640, masking=_padding, has_sinks=True, n_threads=3
    ),
    "one token, more rows than a tile": Case(1, 600, n_kv_heads=1, gqa_ratio=72),
    "one token and one head": Case(1, 600, n_kv_heads=1, gqa_ratio=1),
    "fewer rows than threads": Case(1, 100, n_kv_heads=1, gqa_ratio=2, n_threads=3),
    "a tile from the end of one K head": Case(3, 100, n_kv_heads=3, gqa_ratio=3, n_threads=3),
    "heads larger than a tile": Case(2, 600, n_kv_heads=1, dk=576, dv=512, n_threads=3),
    "V much shorter than K": Case(3, 600, dk=128, dv=4, kv_type=_F32, masking=_causal),
    "V much longer than K": Case(3, 600, dk=4, dv=128, masking=_causal),
    "odd head sizes": Case(5, 130, dk=37, dv=19, kv_type=_F32),
    "one cell": Case(2, 2, masking=_causal, n_threads=3),
    "padding of a batch": Case(130, 300, masking=_padding, n_threads=3),
    "24 streams of one token": Case(24, 24 * 96, gqa_ratio=3, masking=_streams, n_threads=2),
    "24 streams with sinks": Case(24, 24 * 70, gqa_ratio=3, masking=_streams, has_sinks=True),
    "one stream of 5 tokens, 3 others": Case(5, 700, gqa_ratio=1, masking=_streams, softcap=20.0),
    "quantised cells, one token": Case(1, 600, kv_type=_Q8_0, masking=_causal),
    "quantised cells, a batch": Case(70, 600, kv_type=_Q8_0, masking=_causal),
}


@pytest.mark.parametrize("case", _EDGES.values(), ids=_EDGES)
def test_rows_at_the_edges_are_those_of_float64(
    case: Case, context_memory: ctypes.Array[ctypes.c_char]
) -> None:
    _assert_right(case, context_memory)


@pytest.mark.parametrize("n_tokens", [1, 2, 16, 65])
def test_values_of_masked_cells_change_no_bit(
    n_tokens: int, context_memory: ctypes.Array[ctypes.c_char]
) -> None:
    case = Case(n_tokens, 900, masking=_holes, n_threads=3)
    inputs = _make_inputs(case)
    assert inputs.mask is not None
    is_masked = np.isinf(inputs.mask).all(axis=(1, 2))
    assert is_masked.any()
    k, v = inputs.k.copy(), inputs.v.copy()
    k[is_masked] = 60_000.0
    v[is_masked] = -60_000.0
    rows = _attend(case, inputs, context_memory)
    assert np.array_equal(rows, _attend(case, replace(inputs, k=k, v=v), context_memory))


@pytest.mark.parametrize("n_tokens", [2, 5, 63, 130])
def test_the_number_of_threads_changes_no_bit_of_several_tokens(
    n_tokens: int, context_memory: ctypes.Array[ctypes.c_char]
) -> None:
    case = Case(n_tokens, 700, gqa_ratio=3, n_sequences=2, masking=_causal)
    inputs = _make_inputs(case)
    rows = [_attend(replace(case, n_threads=n), inputs, context_memory) for n in (1, 2, 3, 5)]
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


_BATCHES_IN_TILES = [
    (n_tokens, gqa_ratio)
    for n_tokens in (1, 2, 5, 16, 63)
    for gqa_ratio in (1, 3, 4, 8)
    if n_tokens * gqa_ratio >= _fewest_rows_in_tiles()
]


@pytest.mark.parametrize(("n_tokens", "gqa_ratio"), _BATCHES_IN_TILES)
def test_few_tokens_get_the_bits_that_they_get_in_a_batch(
    n_tokens: int, gqa_ratio: int, context_memory: ctypes.Array[ctypes.c_char]
) -> None:
    # One thread: several ones add up the cells of one token in parts.
    batch = Case(70, 700, gqa_ratio=gqa_ratio, dk=80, dv=80, masking=_causal, n_threads=1)
    inputs = _make_inputs(batch)
    assert inputs.mask is not None
    few = replace(inputs, q=inputs.q[:, -n_tokens:], mask=inputs.mask[:, :, -n_tokens:])
    rows = _attend(replace(batch, n_tokens=n_tokens), few, context_memory)
    assert np.array_equal(rows, _attend(batch, inputs, context_memory)[:, -n_tokens:])
