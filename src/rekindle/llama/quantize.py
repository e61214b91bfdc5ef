"""Requantises a GGUF file to Q8_0, which has fast kernels on every CPU."""

import re
from collections.abc import Callable
from pathlib import Path

from rekindle.errors import StartupError
from rekindle.llama.library import lib, listen_to_log

_TENSOR_LINE = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")


def quantize(source: Path, target: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write `target`, not atomically. `on_progress` gets the tensors done and their total."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True

    # llama.cpp reports progress only in its log.
    def read_line(line: str) -> None:
        if match := _TENSOR_LINE.match(line):
            on_progress(int(match[1]), int(match[2]))

    with listen_to_log(read_line):
        status = lib.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status != 0:
        raise StartupError(f"llama.cpp could not requantise {source} (code {status}).")
