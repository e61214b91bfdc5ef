"""LoRA adapters of a model: loaded with it, and applied to each of its contexts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.config.placement import AdapterFile
from rekindle.errors import EngineError, StartupError
from rekindle.llama.library import first_error, lib, recent_errors


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    path: Path
    scale: float
    task_name: str
    prompt_prefix: str


class LoraAdapters:
    """The adapters of one model. llama.cpp frees them with the model."""

    def __init__(self, model: Any, files: Sequence[AdapterFile]) -> None:
        """Load the files. Raises StartupError."""
        handles = [_load(model, file.path) for file in files]
        self.facts = tuple(map(_facts, handles, files))
        self._handles = (lib.llama_adapter_lora_p_ctypes * len(handles))(*handles)
        self._scales = (ctypes.c_float * len(files))(*(file.scale for file in files))

    def apply(self, context: Any) -> None:
        if not self.facts:
            return
        status = lib.llama_set_adapters_lora(context, self._handles, len(self.facts), self._scales)
        if status != 0:
            raise EngineError(f"llama.cpp could not apply the adapters (code {status}).")


def _load(model: Any, path: Path) -> Any:
    if not path.is_file():
        raise StartupError(f"There is no LoRA adapter at {path}.")
    recent_errors.clear()
    handle = lib.llama_adapter_lora_init(model, str(path).encode())
    if not handle:
        reason = first_error().rpartition("failed to apply lora adapter: ")[2]
        raise StartupError(f"llama.cpp could not load the LoRA adapter {path}: {reason}")
    if lib.llama_adapter_get_alora_n_invocation_tokens(handle):
        raise StartupError(
            f"The adapter {path} is an activated LoRA (aLoRA), which applies to parts of a prompt."
            " This server applies adapters to whole prompts only."
        )
    return handle


def _facts(handle: Any, file: AdapterFile) -> AdapterFacts:
    return AdapterFacts(
        file.path,
        file.scale,
        task_name=_metadata(handle, "adapter.lora.task_name"),
        prompt_prefix=_metadata(handle, "adapter.lora.prompt_prefix"),
    )


def _metadata(handle: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(4096)
    length = lib.llama_adapter_meta_val_str(handle, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""
