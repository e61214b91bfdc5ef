"""A GGUF file, loaded with its weights or for its vocabulary alone, and the facts in it."""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rekindle.config.file_sampling import recommended
from rekindle.config.placement import PlacementSettings, adapter_files
from rekindle.errors import StartupError
from rekindle.generation.request import Sampling
from rekindle.llama.library import first_error, lib, listen_to_log, recent_errors
from rekindle.llama.placement.adapters import LoraAdapters
from rekindle.llama.placement.model_params import ModelParams
from rekindle.llama.placement.rope import TrainedRope
from rekindle.llama.tokenizer.pre_tokenizer import PreTokenizer
from rekindle.llama.tokenizer.vocabulary import Vocabulary

_log = logging.getLogger("rekindle.llama")
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}
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
    n_embd: int
    n_swa: int
    is_recurrent: bool
    is_hybrid: bool
    rope_depends_on_n_ctx: bool  # separate factors for short and for long contexts
    trained_rope: TrainedRope
    pooling: Pooling
    default_sampling: Sampling


class GgufModel:
    """A loaded model. Immutable, and shared by all of its contexts."""

    def __init__(
        self,
        path: Path,
        *,
        gpu_layers: int,
        placement: PlacementSettings = PlacementSettings(),  # noqa: B008 - frozen
        on_progress: Callable[[float], bool] | None = None,
    ) -> None:
        """Load the file and its adapters. Raises StartupError.

        `on_progress` gets the loaded fraction; return False to cancel.
        """
        self.path = path
        self._params = ModelParams(placement, gpu_layers)
        self.has_gpu = self._params.has_gpu  # even without layers: it computes long prompts
        # The callback must live until the load ends.
        callback = lib.llama_progress_callback(
            lambda fraction, _user_data: on_progress is None or on_progress(fraction)
        )
        self._params.native.progress_callback = callback
        recent_errors.clear()
        with listen_to_log(_warn_of_unlocked):
            self.handle = lib.llama_model_load_from_file(str(path).encode(), self._params.native)
        if not self.handle:
            raise StartupError(_load_failure(path))
        try:
            if not _is_decoder(self.handle):
                raise StartupError(f"The model {path} is not a decoder-only model.")
            # Before any context: llama.cpp counts their nodes when it makes one.
            self.adapters = LoraAdapters(self.handle, adapter_files(placement))
        except StartupError:
            lib.llama_model_free(self.handle)
            raise
        self.vocabulary = _vocabulary(self.handle)
        self.facts = _read_facts(self.handle)

    def close(self) -> None:
        if self.handle:
            self.vocabulary.close()
            lib.llama_model_free(self.handle)  # frees the adapters too
            self.handle = None


class VocabularyFile:
    """The vocabulary and the metadata of a GGUF file, without weights or a device.

    llama.cpp leaves the model's dimensions at 0 in this mode: `GgufModel.facts` has them.
    """

    def __init__(self, path: Path) -> None:
        params = lib.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        # An empty list: otherwise llama.cpp asks each GPU for its memory, which takes half a
        # gigabyte of it, and half a second.
        no_devices = (ctypes.c_void_p * 1)()
        params.devices = ctypes.addressof(no_devices)
        recent_errors.clear()
        self._handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._handle:
            raise StartupError(_load_failure(path))
        self.vocabulary = _vocabulary(self._handle)
        self.architecture = _metadata(self._handle, "general.architecture") or "unknown"
        self.is_decoder = _is_decoder(self._handle)
        self.chat_template = _chat_template(self._handle)
        self.rerank_template = _chat_template(self._handle, b"rerank")

    def close(self) -> None:
        """Free the vocabulary. No thread may be tokenising with it."""
        if self._handle:
            self.vocabulary.close()
            lib.llama_model_free(self._handle)
            self._handle = None


def _is_decoder(handle: Any) -> bool:
    has_encoder: bool = lib.llama_model_has_encoder(handle)
    return not has_encoder and lib.llama_model_has_decoder(handle)


def _warn_of_unlocked(line: str) -> None:
    if "failed to mlock" in line and line.endswith("\n"):
        _log.warning("memory: the weights are not locked: %s", line.strip())


def _vocabulary(handle: Any) -> Vocabulary:
    pre_tokenizer = PreTokenizer.of(
        tokenizer=_metadata(handle, "tokenizer.ggml.model") or "",
        pre=_metadata(handle, "tokenizer.ggml.pre") or "",
    )
    return Vocabulary(lib.llama_model_get_vocab(handle), pre_tokenizer)


def _load_failure(path: Path) -> str:
    for line in recent_errors:
        if _UNKNOWN_ARCHITECTURE in line:
            name = line.split(_UNKNOWN_ARCHITECTURE, 1)[1].strip().strip("'")
            return f"The model {path} has the architecture '{name}', which llama.cpp cannot run."
    return f"llama.cpp could not load the model {path}: {first_error()}"


def _read_facts(handle: Any) -> ModelFacts:
    architecture = _metadata(handle, "general.architecture") or "unknown"
    return ModelFacts(
        architecture=architecture,
        quantization=_quantization(handle),
        n_params=lib.llama_model_n_params(handle),
        size_bytes=lib.llama_model_size(handle),
        n_ctx_train=lib.llama_model_n_ctx_train(handle),
        n_embd=lib.llama_model_n_embd(handle),
        n_swa=lib.llama_model_n_swa(handle),
        is_recurrent=lib.llama_model_is_recurrent(handle),
        is_hybrid=lib.llama_model_is_hybrid(handle),
        rope_depends_on_n_ctx=_metadata(
            handle, f"{architecture}.rope.scaling.original_context_length"
        )
        is not None,
        trained_rope=_trained_rope(handle, architecture),
        pooling=_pooling(handle, architecture),
        default_sampling=_default_sampling(handle),
    )


def _trained_rope(handle: Any, architecture: str) -> TrainedRope:
    def read(key: str) -> str | None:
        return _metadata(handle, f"{architecture}.rope.{key}")

    base = TrainedRope()
    n_ctx_train: int = lib.llama_model_n_ctx_train(handle)
    return TrainedRope(
        scaling=read("scaling.type") or base.scaling,
        freq_base=float(read("freq_base") or base.freq_base),
        freq_scale=lib.llama_model_rope_freq_scale_train(handle),
        orig_ctx=int(read("scaling.original_context_length") or n_ctx_train),
    )


def _chat_template(handle: Any, name: bytes | None = None) -> str | None:
    template: bytes | None = lib.llama_model_chat_template(handle, name)
    return template.decode("utf-8", "replace") if template else None


def _pooling(handle: Any, architecture: str) -> Pooling:
    value = _metadata(handle, f"{architecture}.pooling_type")
    return next((each for each in Pooling if str(each.value) == value), Pooling.NONE)


def _quantization(handle: Any) -> str:
    """Return the quantisation, such as `Q4_K - Medium`, from llama.cpp's description."""
    text = _text(lambda buffer, size: lib.llama_model_desc(handle, buffer, size)) or ""
    return text.split(" ", 2)[-1]


def _default_sampling(handle: Any) -> Sampling:
    values = {key: _metadata(handle, key) for key in _SAMPLING_KEYS.values()}
    return Sampling(**recommended(_SAMPLING_KEYS, values))


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
