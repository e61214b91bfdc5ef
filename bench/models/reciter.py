"""Write a Llama of any shape that recites: its next token is a known function of the last one.

    python -m bench.models.reciter FILE [tiny|8b] [f16|q8_0]

The reply to any prompt is known, at the full cost of the shape. Each token has an embedding of
random signs, so two embeddings are nearly orthogonal. The output row of a token is the embedding
of the token before it. The weights of the layers are random, and too small to change the winner.
Tensors are written in pieces, so an 8B shape needs little memory. Needs the `gguf` package.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray

from bench.models.big import LLAMA_8B, DenseShape, dense_writer, filler_text, fillers_of

TINY = DenseShape(
    n_vocab=4096, n_embd=256, n_ff=512, n_layers=2, n_head=4, n_head_kv=2, head_dim=64
)
SHAPES = {"tiny": TINY, "8b": LLAMA_8B}
TYPES = {"f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0}
SEED = 1
PIECE_ROWS = 1024  # of the embeddings; picked: 16 MB at 8B
N_RANDOM = 2**22  # values of the layers, drawn once; every tensor starts at another one of them
# Picked: 32 layers change the stream by less than a tenth, where the winner leads by nine tenths.
LAYER_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Recital:
    """The cycle that a model recites: its tokens without text of ours, in the order of their ids.

    A place counts on over the end of the cycle.
    """

    tokens: range

    def token_at(self, place: int) -> int:
        return self.tokens[place % len(self.tokens)]

    def stretch(self, start: int, n_tokens: int) -> list[int]:
        return [self.token_at(place) for place in range(start, start + n_tokens)]

    def after(self, token: int) -> int:
        return self.token_at(self.tokens.index(token) + 1)

    def before(self, token: int) -> int:
        return self.token_at(self.tokens.index(token) - 1)

    def text(self, start: int, n_tokens: int) -> str:
        """Return the text of a stretch, as a server detokenises it."""
        places = range(start, start + n_tokens)
        return "".join(filler_text(place % len(self.tokens)) for place in places)


def recital_of(n_vocab: int) -> Recital:
    """Return the cycle of every model with a vocabulary of this size."""
    return Recital(fillers_of(n_vocab))


def write_reciter(path: Path, shape: DenseShape, kind: GGMLQuantizationType) -> Path:
    """Write the model. Equal arguments give equal bytes."""
    writer = dense_writer(path, "reciter", shape)
    tensors = _Tensors(shape, kind)
    names = list(tensors.names())
    for name, shape_of in names:
        is_norm = len(shape_of) == 1
        tensor_kind = GGMLQuantizationType.F32 if is_norm else kind
        n_bytes = _n_bytes(shape_of, tensor_kind)
        writer.add_tensor_info(name, shape_of, np.dtype(np.float32), n_bytes, tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape_of in names:
        _write_pieces(writer, tensors.pieces(name, shape_of))
    writer.close()
    return path


class _Tensors:
    """Names, shapes and bytes of the tensors, in the order of the file."""

    def __init__(self, shape: DenseShape, kind: GGMLQuantizationType) -> None:
        self._shape = shape
        self._kind = kind
        self._recital = recital_of(shape.n_vocab)
        self._random = np.random.default_rng(SEED)
        gain = LAYER_GAIN / np.sqrt(shape.n_embd)
        values = self._random.standard_normal(N_RANDOM, dtype=np.float32) * np.float32(gain)
        self._layer_bytes = _encoded(values, kind).reshape(-1).view(np.uint8)

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names with their shapes in numpy's order: rows first."""
        shape = self._shape
        n_embd, n_kv = shape.n_embd, shape.n_head_kv * shape.head_dim
        n_query = shape.n_head * shape.head_dim
        yield "token_embd.weight", (shape.n_vocab, n_embd)
        for layer in range(shape.n_layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (n_embd,)
            yield f"{block}.attn_q.weight", (n_query, n_embd)
            yield f"{block}.attn_k.weight", (n_kv, n_embd)
            yield f"{block}.attn_v.weight", (n_kv, n_embd)
            yield f"{block}.attn_output.weight", (n_embd, n_query)
            yield f"{block}.ffn_norm.weight", (n_embd,)
            yield f"{block}.ffn_gate.weight", (shape.n_ff, n_embd)
            yield f"{block}.ffn_up.weight", (shape.n_ff, n_embd)
            yield f"{block}.ffn_down.weight", (n_embd, shape.n_ff)
        yield "output_norm.weight", (n_embd,)
        yield "output.weight", (shape.n_vocab, n_embd)

    def pieces(self, name: str, shape_of: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        if len(shape_of) == 1:
            yield np.ones(shape_of, dtype=np.float32).view(np.uint8)
        elif name == "token_embd.weight":
            yield from self._rows(range(self._shape.n_vocab))
        elif name == "output.weight":
            recital = self._recital
            tokens = range(self._shape.n_vocab)
            # A token that is not recited gets a row that is no token's embedding.
            sources = [
                recital.before(t) if t in recital.tokens else t + len(tokens) for t in tokens
            ]
            yield from self._rows(sources)
        else:
            yield from self._layer_pieces(_n_bytes(shape_of, self._kind))

    def _rows(self, tokens: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        for start in range(0, len(tokens), PIECE_ROWS):
            piece = tokens[start : start + PIECE_ROWS]
            signs = np.stack([_signs(token, self._shape.n_embd) for token in piece])
            yield _encoded(signs, self._kind).reshape(-1).view(np.uint8)

    def _layer_pieces(self, n_bytes: int) -> Iterator[NDArray[np.uint8]]:
        """Yield random values from another start than the tensor before, in whole blocks."""
        _, block_bytes = GGML_QUANT_SIZES[self._kind]
        n_blocks = len(self._layer_bytes) // block_bytes
        start = int(self._random.integers(n_blocks)) * block_bytes
        while n_bytes:
            piece = self._layer_bytes[start : start + n_bytes]
            yield piece
            n_bytes -= len(piece)
            start = 0


def _signs(token: int, n_embd: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng((SEED, token)).bytes(n_embd // 8)
    bits = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8))
    return bits.astype(np.float32) * 2 - 1


def _encoded(values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    encoded: NDArray[np.uint8] = np.ascontiguousarray(quantize(values, kind))
    return encoded


def _n_bytes(shape_of: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    n_bytes: int = prod(shape_of) // block_values * block_bytes
    return n_bytes


def _write_pieces(writer: GGUFWriter, pieces: Iterator[NDArray[np.uint8]]) -> None:
    """Write one tensor as `GGUFWriter.write_tensor_data` does, without having it in memory."""
    assert writer.fout is not None
    [file] = writer.fout
    writer.write_padding(file, file.tell())
    n_bytes = 0
    for piece in pieces:
        piece.tofile(file)
        n_bytes += len(piece)
    writer.write_padding(file, n_bytes)


def main(path: Path, shape: str = "8b", kind: str = "q8_0") -> None:
    write_reciter(path, SHAPES[shape], TYPES[kind])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
