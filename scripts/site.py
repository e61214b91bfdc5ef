"""Build the documents of the repository as a static site with search, in site/.

    make docs     installs MkDocs into .venv-docs, and runs this

The pages are the Markdown files of the repository, at their own paths, so that the links that
work on GitHub work here. A link that leads nowhere, or to no heading, fails the build.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = {"site", "dist", "rekindle-bench"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)]*\)")
# GitHub reads the first word as the language. MkDocs takes such a line for text.
INFO = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the Markdown files of the repository."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(page for page in found if not _is_output(page))


def stage(folder: Path) -> None:
    """Copy the pages, and the files they link to, into a folder."""
    for page in pages():
        text = (ROOT / page).read_text("utf-8")
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(INFO.sub(r"\1", text), "utf-8")
        for file in _linked_files(page, text):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, folder / file)


def _linked_files(page: Path, text: str) -> Iterator[Path]:
    for target in LINK.findall(text):
        path = (ROOT / page).parent / target
        if path.suffix != ".md" and path.is_file():
            yield path.resolve().relative_to(ROOT)


def _is_output(page: Path) -> bool:
    return page.parts[0] in OUTPUTS or any(part.startswith(".") for part in page.parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
        stage(folder / "pages")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
        command += ["--config-file", str(folder / "mkdocs.yml"), "--site-dir", str(ROOT / "site")]
        status = subprocess.run(command, check=False).returncode
    if status == 0:
        print("site/index.html: python3 -m http.server --directory site")  # noqa: T201
    sys.exit(status)


if __name__ == "__main__":
    main()
