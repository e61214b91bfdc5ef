"""llama.cpp's own tests of its server, run against `rekindle serve`.

`docs/conformance.md` says of every test what becomes of it. Those that it lists as passing run
here. The tests come with the source package of llama-cpp-python, by the version that is installed.
"""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conformance.launcher import translated
from tests.support.server_process import free_port
from tests.support.tiny_models import TinyArchitecture, write_tiny_model, write_tiny_reranker

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "conformance.md").read_text("utf-8")
ROW = re.compile(r"^\| `(unit/test_\w+\.py::[^`]+)` \| (\w+) \|", re.MULTILINE)
FOLDERS = ("vendor/llama.cpp/tools/server/tests/", "vendor/llama.cpp/models/templates/")
# Every test of the sources, without its parameters.
NAMES = (Path(__file__).parent / "llama_server_tests.txt").read_text("utf-8").split()
DEFINITION = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
DOWNLOAD_SECONDS = 300


def fates() -> dict[str, str]:
    """Return the fate of each test. Parameters may contain `|`, which a table has escaped."""
    return {name.replace(r"\|", "|"): fate for name, fate in ROW.findall(DOCUMENT)}


def downloaded(folder: Path) -> Path:
    """Return the folder of llama.cpp's tests, or skip where no package index answers."""
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    command = [sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python"]
    command += ["--no-deps", "--dest", str(folder), package]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"pip cannot download the sources of {package}")
    [archive] = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as sources:
        members = [
            each for each in sources.getmembers() if any(part in each.name for part in FOLDERS)
        ]
        sources.extractall(folder, members, filter="data")
    [tests] = folder.glob(f"*/{FOLDERS[0]}")
    return tests


@pytest.mark.long
@pytest.mark.timeout(1800)  # every test starts a server
def test_the_tests_that_the_document_lists_as_passing_pass(tmp_path: Path) -> None:
    passing = [name for name, fate in fates().items() if fate == "passes"]
    assert passing
    tests = downloaded(tmp_path)
    found = [
        f"unit/{file.name}::{name}"
        for file in sorted(tests.glob("unit/*.py"))
        for name in DEFINITION.findall(file.read_text("utf-8"))
    ]
    assert found == NAMES
    models = tmp_path / "models"
    models.mkdir()
    write_tiny_model(models / "plain.gguf", TinyArchitecture.LLAMA)
    write_tiny_model(models / "infill.gguf", TinyArchitecture.LLAMA, infill=True)
    write_tiny_reranker(models / "reranker.gguf")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {
        **own,  # options of this run, such as --may-skip, are unknown there
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "CONFORMANCE_MODELS": str(models),
        "PORT": str(free_port()),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "tests.conformance.plugin", *passing]
    run = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


def test_the_document_gives_every_test_of_the_sources_one_fate() -> None:
    names = [name for name, _ in ROW.findall(DOCUMENT)]
    assert len(names) == len(set(names))
    assert [*dict.fromkeys(name.partition("[")[0] for name in names)] == NAMES
    assert set(fates().values()) == {"passes", "cannot", "differs"}


def test_the_launcher_replaces_the_model_and_keeps_known_flags() -> None:
    model = "ggml-org/test-model-stories260K-infill"
    arguments = ["--port", "8080", "--offline", "--hf-repo", model, "--batch-size", "32"]
    command = translated(arguments, Path("/models"))
    assert command[:2] == ["serve", "/models/infill.gguf"]
    assert command[2:4] == ["--port", "8080"]
    assert command[-2:] == ["--batch-size", "32"]
    assert "--hf-repo" not in command
