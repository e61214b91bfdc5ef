"""One loaded GGUF file: the handle of its weights, and the facts in its metadata."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rekindle.errors import StartupError
from rekindle.generation.request import Sampling
from rekindle.llama.library import first_error, lib, recent_errors
from rekindle.llama.tokenizer.pre_tokenizer import PreTokenizer
from rekindle.llama.tokenizer.vocabulary import Vocabulary

_UNKNOWN_ARCHITECTURE = "unknown model architecture: "


class Pooling(IntEnum):
    """How the vectors of tokens become one, with llama.cpp's numbers."""

    NONE = 0  # the file does not say
    MEAN = 1
    FIRST = 2
    LAST = 3
    RANK = 4  # a score instead of a vector


@dataclass(frozen=True, slots=True)
class ModelFacts:
    architecture: str
    quantization: str
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_swa: int
    is_recurrent: bool
    is_hybrid: bool
    rope_depends_on_n_ctx: bool  # separate factors for short and for long contexts
    pooling: Pooling
    chat_template: str | None
    default_sampling: Sampling


class GgufModel:
    """A loaded model. Immutable, and shared by all of its contexts."""

    def __init__(
        self, path: Path, *, gpu_layers: int, on_progress: Callable[[float], bool] | None = None
    ) -> None:
        """Load the file. `on_progress` gets the loaded fraction; return False to cancel."""
        self.path = path
        params = lib.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        # The callback must live until the load ends.
        callback = lib.llama_progress_callback(
            lambda fraction, _user_data: on_progress is None or on_progress(fraction)
        )
        params.progress_callback = callback
        recent_errors.clear()
        self.handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise StartupError(_load_failure(path))
        if lib.llama_model_has_encoder(self.handle) or not lib.llama_model_has_decoder(self.handle):
            self.close()
            raise StartupError(f"The model {path} is not a decoder-only model.")
        pre_tokenizer = PreTokenizer.of(
            tokenizer=_metadata(self.handle, "tokenizer.ggml.model") or "",
            pre=_metadata(self.handle, "tokenizer.ggml.pre") or "",
        )
        self.vocabulary = Vocabulary(lib.llama_model_get_vocab(self.handle), pre_tokenizer)
        self.facts = _read_facts(self.handle)

    def close(self) -> None:
        if self.handle:
            lib.llama_model_free(self.handle)
            self.handle = None


def _load_failure(path: Path) -> str:
    for line in recent_errors:
        if _UNKNOWN_ARCHITECTURE in line:
            name = line.split(_UNKNOWN_ARCHITECTURE, 1)[1].strip().strip("'")
            return f"The model {path} has the architecture '{name}', which llama.cpp cannot run."
    return f"llama.cpp could not load the model {path}: {first_error()}"


def _read_facts(handle: Any) -> ModelFacts:
    template = lib.llama_model_chat_template(handle, None)
    architecture = _metadata(handle, "general.architecture") or "unknown"
    return ModelFacts(
        architecture=architecture,
        quantization=_quantization(handle),
        n_params=lib.llama_model_n_params(handle),
        size_bytes=lib.llama_model_size(handle),
        n_ctx_train=lib.llama_model_n_ctx_train(handle),
        n_swa=lib.llama_model_n_swa(handle),
        is_recurrent=lib.llama_model_is_recurrent(handle),
        is_hybrid=lib.llama_model_is_hybrid(handle),
        rope_depends_on_n_ctx=_metadata(
            handle, f"{architecture}.rope.scaling.original_context_length"
        )
        is not None,
        pooling=_pooling(handle, architecture),
        chat_template=template.decode("utf-8", "replace") if template else None,
        default_sampling=_default_sampling(handle),
    )


def _pooling(handle: Any, architecture: str) -> Pooling:
    value = _metadata(handle, f"{architecture}.pooling_type")
    return next((each for each in Pooling if str(each.value) == value), Pooling.NONE)


def _quantization(handle: Any) -> str:
    """Return the quantisation, such as `Q4_K - Medium`, from llama.cpp's description."""
    text = _text(lambda buffer, size: lib.llama_model_desc(handle, buffer, size)) or ""
    return text.split(" ", 2)[-1]


def _default_sampling(handle: Any) -> Sampling:
    """Return llama.cpp's defaults, overridden by the model file's own values."""
    base = Sampling()

    def number(key: str, fallback: float) -> float:
        value = _metadata(handle, f"general.sampling.{key}")
        return fallback if value is None else float(value)

    return Sampling(
        temperature=number("temp", base.temperature),
        top_k=int(number("top_k", base.top_k)),
        top_p=number("top_p", base.top_p),
        min_p=number("min_p", base.min_p),
        repeat_penalty=number("penalty_repeat", base.repeat_penalty),
        repeat_last_n=int(number("penalty_last_n", base.repeat_last_n)),
    )


def _metadata(handle: Any, key: str) -> str | None:
    return _text(
        lambda buffer, size: lib.llama_model_meta_val_str(handle, key.encode(), buffer, size)
    )


def _text(call: Callable[[Any, int], int]) -> str | None:
    buffer = ctypes.create_string_buffer(256)
    length = call(buffer, len(buffer))
    if length < 0:
        return None
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        call(buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")
