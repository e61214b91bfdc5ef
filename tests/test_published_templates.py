"""Where tests get published templates from."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.support.published_templates import INSIDE, download, extract, read_templates


def write_package(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as package:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            package.addfile(member, io.BytesIO(text.encode()))
    return path


def test_only_the_templates_of_a_source_package_are_kept(tmp_path: Path) -> None:
    files = {
        f"package-1/{INSIDE}/one.jinja": "{{ 1 }}",
        f"package-1/{INSIDE}/README.md": "about",
        f"package-1/{INSIDE}/../../../escape.jinja": "{{ 2 }}",
        "package-1/docs/two.jinja": "{{ 3 }}",
    }
    folder = tmp_path / "cache" / "templates"
    extract(write_package(tmp_path / "package.tar.gz", files), folder)
    assert read_templates(folder) == {"one": "{{ 1 }}"}
    assert [path.name for path in folder.parent.iterdir()] == ["templates"]


def test_a_package_that_is_damaged_leaves_nothing(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package.tar.gz", {f"p/{INSIDE}/one.jinja": "x" * 9999})
    package.write_bytes(package.read_bytes()[:-40])
    folder = tmp_path / "cache" / "templates"
    with pytest.raises((tarfile.TarError, EOFError)):
        extract(package, folder)
    assert not list(folder.parent.iterdir())


def test_a_download_without_an_index_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert "llama_cpp_python" in download(tmp_path)
    assert not list(tmp_path.iterdir())
