"""Check that a GGUF file is whole, before llama.cpp reads it.

Only the header is read, and a few facts of it are returned. llama.cpp decides later whether it
knows the model.
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rekindle.errors import StartupError
from rekindle.llama.placement.gguf_header import MAX_LAYERS

# Weights in a block -> {ggml type number: bytes of a block}, from ggml.c. A missing number is a
# type newer than this table: only the offset of such a tensor is checked.
_BLOCK_BYTES = {
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98, 19: 50}
    | {21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66},
}
GGML_BLOCKS = {
    kind: (n_weights, n_bytes)
    for n_weights, kinds in _BLOCK_BYTES.items()
    for kind, n_bytes in kinds.items()
}

# GGUF value type -> bytes. Strings and arrays have no fixed size.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NUMBER, _STRING, _ARRAY = 4, 8, 9
_TOKENS = b"tokenizer.ggml.tokens"
_FACTS = (b"general.architecture", b"general.file_type", b"tokenizer.chat_template")
_CONTEXT_LENGTH = b".context_length"  # behind the name of the architecture
MAX_TEXT_BYTES = 2**20  # of a fact; a template may have a quarter of it
MAX_KEY_BYTES = 65535  # of a key, of a tensor's name, and of a token in the comparison
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(slots=True)
class GgufFacts:
    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    n_weights: int = 0
    weight_bytes: int = 0


def check_gguf(path: Path) -> GgufFacts:
    """Raise StartupError unless `path` is a GGUF file with all the bytes its header describes."""
    if not path.is_file():
        raise StartupError(
            f"{path} is not a file." if path.exists() else f"There is no file at {path}."
        )
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise StartupError(f"The file {path} is not a GGUF file.")
            if len(start) < 8:
                _fail_truncated(path, size, 24)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _check_content(path, content)
    except OSError as error:
        raise StartupError(f"The file {path} cannot be read: {error.strerror}.") from error


def _check_content(path: Path, content: mmap.mmap) -> GgufFacts:
    (version,) = struct.unpack_from("<I", content, 4)
    if version not in (2, 3):
        big_endian = version and not version & 0xFFFF
        found = "big-endian" if big_endian else f"GGUF version {version}"
        raise StartupError(
            f"The file {path} is {found}; llama.cpp reads little-endian GGUF versions 2 and 3."
        )
    reader = _HeaderReader(content)
    try:
        n_bytes = reader.described_bytes()
    except (struct.error, OverflowError):
        # The failed read needed at least one byte more than the file has.
        n_bytes = max(reader.position, len(content)) + 1
    except ValueError as error:
        raise StartupError(f"The file {path} is damaged: {error}.") from error
    if n_bytes > len(content):
        _fail_truncated(path, len(content), n_bytes)
    return reader.facts


def _fail_truncated(path: Path, size: int, n_bytes: int) -> NoReturn:
    raise StartupError(
        f"The file {path} is truncated: it has {size} bytes,"
        f" its header describes at least {n_bytes}."
    )


class _HeaderReader:
    """Reader of a GGUF header; `position` is where the next value starts.

    The layout of a file:
    magic, version u32, n_tensors u64, n_pairs u64, pairs, tensor infos, padding, data
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 8
        self.facts = GgufFacts()

    def described_bytes(self) -> int:
        n_tensors, n_pairs = self._u64(), self._u64()
        alignment = 32
        for _ in range(n_pairs):
            key = self._name(MAX_KEY_BYTES)
            kind = self._u32()
            if key == b"general.alignment" and kind == 4:
                alignment = self._u32()
            elif key == _TOKENS and kind == _ARRAY:
                self._check_tokens()
            elif key.endswith(b".block_count"):
                if kind != 4:
                    raise ValueError("its number of layers is not a 32-bit number")
                self._check_layers()
            elif key in _FACTS or key.endswith(_CONTEXT_LENGTH):
                self._note(key.decode("utf-8", "replace"), kind)
            else:
                self._skip_value(kind)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment}, which is not a power of 2")
        end_in_data = 0
        for _ in range(n_tensors):
            end_in_data = max(end_in_data, self._tensor_end())
        data_start = -(-self.position // alignment) * alignment
        return data_start + end_in_data if n_tensors else self.position

    def _tensor_end(self) -> int:
        self._name(MAX_KEY_BYTES)
        n_dims = self._u32()
        if n_dims > 4:
            raise ValueError(f"a tensor has {n_dims} dimensions")
        n_weights = math.prod(self._u64() for _ in range(n_dims))
        kind, offset = self._u32(), self._u64()
        if kind not in GGML_BLOCKS:
            return offset
        block_weights, block_bytes = GGML_BLOCKS[kind]
        n_bytes = n_weights // block_weights * block_bytes
        self.facts.n_weights += n_weights
        self.facts.weight_bytes += n_bytes
        return offset + n_bytes

    def _note(self, key: str, kind: int) -> None:
        """Take a text, or a number of 32 bits. Skip any other value."""
        if kind == _NUMBER:
            self.facts.numbers[key] = self._u32()
            return
        start = self.position + 8
        self._skip_value(kind)
        if kind == _STRING:
            text = self._content[start : min(self.position, start + MAX_TEXT_BYTES)]
            self.facts.texts[key] = text.decode("utf-8", "replace")

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            length = self._u64()
            self.position += length
        elif kind == _ARRAY:
            element, count = self._u32(), self._u64()
            if element == _STRING:
                self._skip_strings(count)
            else:
                self.position += self._scalar_bytes(element) * count
        else:
            self.position += self._scalar_bytes(kind)

    def _skip_strings(self, count: int) -> None:
        """Skip a list of texts. A vocabulary has 100,000, so the loop makes one call for each."""
        content, position, length_of = self._content, self.position, _U64.unpack_from
        for _ in range(count):
            position += 8 + length_of(content, position)[0]
        self.position = position

    def _check_layers(self) -> None:
        n_layers = self._u32()
        if n_layers > MAX_LAYERS:
            raise ValueError(f"it has {n_layers} layers; llama.cpp reads at most {MAX_LAYERS}")

    def _check_tokens(self) -> None:
        """Check the vocabulary. llama.cpp ends the process if two tokens are the same text."""
        element, count = self._u32(), self._u64()
        if element != _STRING:
            raise ValueError("its vocabulary is not a list of texts")
        content, position, length_of = self._content, self.position, _U64.unpack_from
        tokens: list[bytes] = []
        add = tokens.append
        for _ in range(count):
            start = position + 8
            position = start + length_of(content, position)[0]
            if position - start > MAX_KEY_BYTES:
                break
            add(content[start:position])
        self.position = position
        if position > len(content):
            return  # the file is truncated
        if len(tokens) < count:
            raise ValueError(f"a token in its vocabulary is longer than {MAX_KEY_BYTES} bytes")
        n_empty = tokens.count(b"")  # llama.cpp gives each a name of its own
        if len(set(tokens)) + max(n_empty - 1, 0) != count:
            raise ValueError("its vocabulary has the same token twice")

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"its header has a value of unknown type {kind}")
        return _SCALAR_BYTES[kind]

    def _name(self, max_bytes: int) -> bytes:
        length = self._u64()
        start = self.position
        self.position += length
        if length > max_bytes and self.position <= len(self._content):
            raise ValueError(f"a name in its header has {length} bytes")
        return self._content[start : min(self.position, start + max_bytes)]

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._content, self.position)[0]
        self.position += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._content, self.position)[0]
        self.position += 8
        return value
