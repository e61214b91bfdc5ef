"""The READMEs of both benchmarks name every module and every command."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEVELOPERS = ROOT / "bench"
SHIPPED = ROOT / "src" / "rekindle" / "bench"


def modules(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return {str(path) for path in paths if path.name != "__init__.py"}


def test_the_readme_of_rekindle_bench_names_every_module() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \|", (SHIPPED / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(modules(SHIPPED))


def test_the_readme_of_the_developers_bench_names_every_command() -> None:
    named = re.findall(r"`python -m ([\w.]+)", (DEVELOPERS / "README.md").read_text())
    commands = [
        ".".join(["bench", *Path(name).with_suffix("").parts]).removesuffix(".__main__")
        for name in modules(DEVELOPERS)
        if "__main__" in (DEVELOPERS / name).read_text()
    ]
    assert sorted(named) == sorted(commands)
