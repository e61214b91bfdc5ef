"""The metadata and the sizes of the tensors of a GGUF file, read by ggml without the weights.

Check the file first: ggml trusts more of a header than `models.files.gguf_check` does.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import StartupError
from rekindle.llama.library import first_error, ggml, lib, recent_errors

Value = int | float | bool | str | list[int]

MAX_LIST = 4096  # of numbers; longer ones describe the vocabulary
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS; llama.cpp ends the process beyond it
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_STRING, _ARRAY = 8, 9
# GGUF value type -> its name in ggml's functions, and in C.
_SCALARS: dict[int, tuple[str, Any]] = {
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    6: ("f32", ctypes.c_float),
    7: ("bool", ctypes.c_bool),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
    12: ("f64", ctypes.c_double),
}


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    values: dict[str, Value]
    lengths: dict[str, int]  # of lists that were not read
    tensors: dict[str, int]  # bytes by name, of all shards

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or "unknown"

    @property
    def quantization(self) -> str:
        """Return llama.cpp's name for the type of most weights; empty: the file does not say."""
        kind = self.values.get("general.file_type")
        return quantization_name(kind) if isinstance(kind, int) else ""

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str, fallback: float = 0) -> float:
        """Return a value of the architecture: a number, or the largest of a list."""
        value = self.values.get(f"{self.architecture}.{key}", fallback)
        if isinstance(value, list):
            return max(value, default=fallback)
        return fallback if isinstance(value, str) else value

    def count(self, key: str, fallback: int = 0) -> int:
        return int(self.number(key, fallback))

    def per_layer(self, key: str, n_layers: int) -> list[int] | None:
        """Return a value of the architecture for each layer; None: the file has none."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            return (value + [0] * n_layers)[:n_layers]
        return None if value is None or isinstance(value, str) else [int(value)] * n_layers

    def has_list(self, key: str) -> bool:
        return isinstance(self.values.get(f"{self.architecture}.{key}"), list)


def quantization_name(file_type: int) -> str:
    """Return llama.cpp's name for a `general.file_type`."""
    name: bytes | None = lib.llama_ftype_name(file_type)
    return (name or b"").decode("utf-8", "replace")


def shards(path: Path) -> list[Path]:
    """Return the paths of all shards of a split model, given any one; else `path` alone."""
    if not (match := SHARD.search(path.name)):
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [
        path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a checked file and of its other shards. Raises StartupError."""
    first, *others = (_read(shard) for shard in shards(path))
    for other in others:
        first.tensors.update(other.tensors)
    return first


def _read(path: Path) -> GgufHeader:
    recent_errors.clear()
    init = _function("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParams)
    handle = init(str(path).encode(), _InitParams(no_alloc=True, ctx=None))
    if not handle:
        raise StartupError(f"The header of {path} cannot be read: {first_error()}")
    try:
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for number in range(_of("gguf_get_n_kv", ctypes.c_int64)(handle)):
            key = _at("gguf_get_key", ctypes.c_char_p)(handle, number).decode("utf-8", "replace")
            value = _value(handle, number)
            if value is not None:
                values[key] = value
            else:
                lengths[key] = _at("gguf_get_arr_n", ctypes.c_size_t)(handle, number)
        name_of = _at("gguf_get_tensor_name", ctypes.c_char_p)
        size_of = _at("gguf_get_tensor_size", ctypes.c_size_t)
        n_tensors = _of("gguf_get_n_tensors", ctypes.c_int64)(handle)
        tensors = {
            name_of(handle, number).decode("utf-8", "replace"): size_of(handle, number)
            for number in range(n_tensors)
        }
        return GgufHeader(values, lengths, tensors)
    finally:
        _of("gguf_free", None)(handle)


def _value(handle: int, number: int) -> Value | None:
    """Return the value of a pair; None: a list that is long, or not of whole numbers."""
    kind = _at("gguf_get_kv_type", ctypes.c_int)(handle, number)
    if kind == _STRING:
        text: bytes = _at("gguf_get_val_str", ctypes.c_char_p)(handle, number)
        return text.decode("utf-8", "replace")
    if kind != _ARRAY:
        name, c_type = _SCALARS[kind]
        scalar: int | float | bool = _at(f"gguf_get_val_{name}", c_type)(handle, number)
        return scalar
    element = _at("gguf_get_arr_type", ctypes.c_int)(handle, number)
    length: int = _at("gguf_get_arr_n", ctypes.c_size_t)(handle, number)
    if element not in _SCALARS or length > MAX_LIST:
        return None
    address = _at("gguf_get_arr_data", ctypes.c_void_p)(handle, number)
    if not length:
        return []
    return [int(each) for each in (_SCALARS[element][1] * length).from_address(address)]


def _of(name: str, result: Any) -> Any:
    return _function(name, result, ctypes.c_void_p)


def _at(name: str, result: Any) -> Any:
    return _function(name, result, ctypes.c_void_p, ctypes.c_int64)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ggml, name)
    function.restype, function.argtypes = result, arguments
    return function
