"""Published chat templates, which are not in the repository: llama.cpp's `models/templates`.

    python -m tests.support.published_templates

Brings the source package of llama-cpp-python, in the version of constraints.txt, and keeps its
templates in the user's cache directory. REKINDLE_TEST_TEMPLATES names folders of templates to use
instead, separated by colons.
"""
# ruff: noqa: T201

import os
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import platformdirs
import pytest

PACKAGE = "llama_cpp_python"
INSIDE = "vendor/llama.cpp/models/templates"
FOLDERS_VARIABLE = "REKINDLE_TEST_TEMPLATES"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
MISSING = "published templates are missing: python -m tests.support.published_templates"


def main() -> int:
    folder = cached_folder()
    if FOLDERS_VARIABLE in os.environ or folder.exists():
        return 0
    print("rekindle: downloading the published templates, once (about 30 s)", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        if problem := download(Path(temporary)):
            print(f"rekindle: no published templates, their tests are skipped: {problem}")
            return 0
        extract(next(Path(temporary).glob("*.tar.gz")), folder)
    print(f"rekindle: {len(list(folder.glob('*.jinja')))} published templates in {folder}")
    return 0


def cached_folder() -> Path:
    version = _pinned().split("==")[1]
    return platformdirs.user_cache_path("rekindle") / "templates" / f"{PACKAGE}-{version}"


def download(folder: Path) -> str:
    """Bring the source package into the folder. Return what failed, in one line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "1"]
    command += ["download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
    done = subprocess.run([*command, _pinned()], capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
    return "" if done.returncode == 0 else lines[-1]


def extract(archive: Path, folder: Path) -> None:
    """Write the templates of a source package into the folder: all of them or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as temporary,
        tarfile.open(archive) as package,
    ):
        partial = Path(temporary) / folder.name
        partial.mkdir()
        for member in package:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parent.as_posix().endswith(INSIDE):
                file = package.extractfile(member)
                assert file is not None
                (partial / path.name).write_bytes(file.read())
        partial.rename(folder)


@cache
def published() -> dict[str, str]:
    """Return the sources by name."""
    named = os.environ.get(FOLDERS_VARIABLE)
    folders = [Path(each) for each in named.split(os.pathsep)] if named else [cached_folder()]
    return read_templates(*folders)


def read_templates(*folders: Path) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted(folder.glob("*.jinja"))]
    return {path.stem: path.read_text("utf-8") for path in paths}


def each_published() -> pytest.MarkDecorator:
    """Run a test with the name of every template; skip it if there is none."""
    names = [pytest.param(name, id=name) for name in published()]
    absent = [pytest.param("", id="none", marks=pytest.mark.skip(reason=MISSING))]
    return pytest.mark.parametrize("name", names or absent)


def _pinned() -> str:
    lines = CONSTRAINTS.read_text("utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{PACKAGE}=="))


if __name__ == "__main__":
    sys.exit(main())
