"""The loaded llama.cpp: one copy of each library, and a state version that names it."""

import ctypes
import re
import sys
from pathlib import Path

import pytest

from rekindle.llama.devices import gpus
from rekindle.llama.library import STATE_VERSION, ggml


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is mapped")
def test_no_library_of_llama_cpp_is_mapped_twice() -> None:
    assert gpus() is not None  # ggml's functions have been used
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    names = [re.sub(r"\.so.*", "", Path(path).name) for path in mapped if "llama_cpp" in path]
    assert {"libllama", "libggml", "libggml-base"} <= set(names)
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", ["llama_version", "ggml_version"])
def test_the_state_version_names_what_the_library_says_of_itself(name: str) -> None:
    function = getattr(ggml, name)
    function.restype = ctypes.c_char_p
    assert f" {function().decode()}" in STATE_VERSION


def test_llama_cpp_is_built_with_our_attention_and_rows_name_it() -> None:
    """Where it is missing, `patch` or the fit of scripts/llama_cpp/attention.patch failed."""
    function = ggml.rekindle_attention
    function.restype = ctypes.c_char_p
    assert f", attention {function().decode()}" in STATE_VERSION
