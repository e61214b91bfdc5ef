"""scripts/install.py: what it shows, what it says when something is missing, whose flags win."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts.install import Environment, InstallError, cmake_args, read_progress, remedy

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.py"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  [36/83] /usr/bin/c++ -DGGML_SHARED -o x.o -c x.cpp", "compiled 36 of 83"),
        ("  [ 45%] Building CXX object src/llama.cpp.o", "compiled 45 %"),
        (
            "  Downloading https://host/files/numpy-2.4.6-cp311.whl (15 MB)",
            "downloading numpy-2.4.6-cp311.whl",
        ),
        ("Downloading numpy-2.4.6-cp311.whl (15 MB)", "downloading numpy-2.4.6-cp311.whl"),
        ("Collecting fastapi>=0.162", "resolving fastapi>=0.162"),
        (
            "  Building wheel for llama_cpp_python (pyproject.toml): started",
            "building llama_cpp_python",
        ),
        ("Installing collected packages: a, b", "unpacking"),
        ("  *** Configuring CMake...", None),
    ],
)
def test_a_line_of_pip_tells_how_far_it_is(line: str, shown: str | None) -> None:
    assert read_progress(line) == shown


@pytest.mark.parametrize(
    ("log", "package"),
    [
        ("-- Could not find nvcc, please set CUDAToolkit_ROOT.", "nvidia-cuda-toolkit"),
        ("  Could NOT find Vulkan (missing: Vulkan_LIBRARY)", "libvulkan-dev glslc"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "build-essential"),
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "PARALLEL_LEVEL=1"),
        ("OSError: [Errno 28] No space left on device", "2 GB"),
        ("NameResolutionError: Failed to resolve 'host'", "PIP_INDEX_URL"),
        ("-- Found CUDAToolkit\n[1/9] nvcc -c a.cu\nerror: Killed", "PARALLEL_LEVEL=1"),
        ("ConnectTimeoutError\nERROR: No matching distribution found for pip", "PIP_INDEX_URL"),
        ("ERROR: No matching distribution found for numpy>=2.4", "no numpy>=2.4 for this"),
    ],
)
def test_a_known_failure_is_a_sentence_with_what_to_do(log: str, package: str) -> None:
    sentence = remedy(f"Collecting a\n{log}\nerror: subprocess-exited-with-error\n")
    assert sentence is not None
    assert package in sentence
    assert "\n" not in sentence


def test_flags_of_the_user_come_behind_ours_and_win() -> None:
    ours = shlex.split(cmake_args(""))
    assert shlex.split(cmake_args("-DGGML_CUDA=on -DLLAVA_BUILD=ON")) == [
        *ours,
        "-DGGML_CUDA=on",
        "-DLLAVA_BUILD=ON",
    ]
    [include] = [flag for flag in ours if "INCLUDE=" in flag]
    assert Path(include.partition("=")[2]).is_file()


@pytest.mark.parametrize(
    ("programs", "package"), [((), "build-essential"), (("cc", "c++"), "patch")]
)
def test_without_a_build_tool_it_names_the_package_at_once(
    tmp_path: Path, programs: tuple[str, ...], package: str
) -> None:
    for name in programs:
        (tmp_path / name).symlink_to(sys.executable)
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "venv")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 1
    assert f"apt-get install {package}" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not (tmp_path / "venv").exists()


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails_at: str = "") -> list[str]:
    """An environment whose pip only notes what it is asked for. Returns the notes."""
    asked: list[str] = []

    def pip(_: Environment, title: str, *arguments: str, env: object = None) -> None:
        asked.append(" ".join((title, *arguments)))
        if title == fails_at:
            raise InstallError("no network")

    def make(_: Environment) -> None:
        (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "venv" / "bin" / "python").touch()

    monkeypatch.setattr(Environment, "_pip", pip)
    monkeypatch.setattr(Environment, "_make", make)
    monkeypatch.setattr(Environment, "_runs", lambda *_: True)
    monkeypatch.setattr(Environment, "_pip_cache", lambda *_: "")
    monkeypatch.setattr("scripts.install.InstallProgress", Mock)
    monkeypatch.setattr(Environment, "_has", lambda *_: "llama.cpp" in str(asked))
    return asked


def titles(asked: list[str]) -> list[str]:
    found = [line.split(" --")[0].split(" llama_cpp")[0] for line in asked]
    asked.clear()
    return found


def test_a_changed_patch_builds_llama_cpp_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made(tmp_path, monkeypatch)
    Environment(tmp_path / "venv").install("", with_tools=False)
    monkeypatch.setattr(Environment, "_has", lambda *_: True)
    titles(asked)
    changed = tmp_path / "attention.patch"
    changed.write_text("another")
    monkeypatch.setattr("scripts.install.BUILD_FILES", [changed])
    Environment(tmp_path / "venv").install("", with_tools=False)
    assert "llama.cpp" in titles(asked)


def test_an_environment_is_made_once_and_remembers_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made(tmp_path, monkeypatch)
    venv = tmp_path / "venv"

    def install(user_args: str | None, *, with_tools: bool = False) -> list[str]:
        Environment(venv).install(user_args, with_tools=with_tools)
        return titles(asked)

    assert "llama.cpp" in install("-DGGML_CUDA=on")
    monkeypatch.setattr(Environment, "_has", lambda *_: True)
    assert install(None) == install("-DGGML_CUDA=on") == []
    assert "llama.cpp" not in install(None, with_tools=True)
    assert install(None) == []
    assert "llama.cpp" in install("-DGGML_VULKAN=on")
    assert "llama.cpp" in install("")
    assert install(None) == []


def test_an_install_that_failed_goes_on_with_the_flags_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, monkeypatch, fails_at="packages")
    with pytest.raises(InstallError):
        Environment(tmp_path / "venv").install("-DGGML_CUDA=on", with_tools=False)
    asked = made(tmp_path, monkeypatch)
    monkeypatch.setattr(Environment, "_has", lambda *_: True)
    Environment(tmp_path / "venv").install(None, with_tools=False)
    assert "llama.cpp" not in titles(asked)
    record = json.loads((tmp_path / "venv" / ".installed").read_text())
    assert record["cmake_args"] == "-DGGML_CUDA=on"
