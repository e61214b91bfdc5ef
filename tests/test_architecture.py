"""The shape of the source: each file imports only what its layer may import, and stays small."""

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "rekindle"
BASE = {
    "errors",
    "bounded_cache",
    "bounded_file",
    "common_prefix",
    "huge_pages",
    "json_size",
    "local_hosts",
    "string_pattern",
    "write_behind",
    "config",
    "generation",
    "observe",
}
MAY_IMPORT = {
    "errors": set(),
    "bounded_cache": set(),
    "bounded_file": {"errors"},
    "common_prefix": set(),
    "huge_pages": set(),
    "json_size": {"errors"},
    "local_hosts": set(),
    "string_pattern": set(),
    "write_behind": {"errors", "bounded_cache"},
    "generation": {"errors"},
    "observe": {"errors", "generation", "write_behind"},
    "config": {"errors"},
    "llama": BASE,
    "chat": BASE,
    "cache": BASE,
    "link": BASE,
    "engine": BASE | {"cache", "link"},
    "engine_process": BASE | {"llama", "cache", "engine", "link"},
    "supervisor": BASE | {"link"},
    "vllm": {"errors", "bounded_cache", "generation", "config"},
    "models.card": set(),
    "api": BASE | {"chat", "models.card"},
    "models": BASE | {"llama", "cache", "chat", "link", "supervisor", "vllm", "models.card"},
    "priming": BASE,
    "replay": BASE | {"api", "chat", "priming"},
    "bench": BASE | {"priming", "replay"},
    "record": BASE | {"replay"},
    "explain": BASE | {"replay"},
    "lint": BASE | {"chat", "replay", "explain"},
    "launch": BASE,
    "server": BASE | {"cache", "chat", "api", "models", "priming"},
    "cli": BASE
    | {"cache", "models", "supervisor", "server", "priming"}
    | {"record", "replay", "explain", "lint", "launch", "bench"},
    "__main__": {"cli"},
}

MAX_SIBLINGS = 14  # files of one folder, README.md and __init__.py included
MAX_LINES = 400
MAX_SHARED_CLASS_NAMES = 10


def unit_of(file: Path) -> str:
    return unit_named(file.relative_to(SOURCE).with_suffix("").parts)


def unit_named(parts: Sequence[str]) -> str:
    """The first name of a module, or the first two where one file has a rule of its own."""
    both = ".".join(parts[:2])
    return both if both in MAY_IMPORT else parts[0]


def imported_modules(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imported_units(file: Path) -> set[str]:
    parts = [module.split(".") for module in imported_modules(file)]
    units = {unit_named(names[1:]) for names in parts if names[0] == "rekindle"}
    return units - {"__version__"}


def test_every_file_has_a_home() -> None:
    homes = {unit_of(file) for file in SOURCE.rglob("*.py")} - {"__init__"}
    assert homes <= set(MAY_IMPORT)


def test_no_file_imports_outside_its_layer() -> None:
    trespasses = [
        f"{file.relative_to(SOURCE)} imports {unit}"
        for file in SOURCE.rglob("*.py")
        if (home := unit_of(file)) != "__init__"
        for unit in imported_units(file)
        if unit != home and unit not in MAY_IMPORT[home]
    ]
    assert not trespasses, "\n".join(trespasses)


def test_only_llama_touches_ctypes_and_llama_cpp() -> None:
    outsiders = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if unit_of(file) != "llama"
        and {module.split(".")[0] for module in imported_modules(file)}
        & {"llama_cpp", "llguidance", "ctypes"}
    ]
    assert not outsiders


def test_no_layer_of_the_server_but_vllm_speaks_to_other_servers() -> None:
    layers = {"api", "chat", "engine", "cache", "llama"}
    outsiders = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if unit_of(file) in layers
        and "httpx" in {module.split(".")[0] for module in imported_modules(file)}
    ]
    assert not outsiders


def test_the_llama_class_of_the_binding_is_never_used() -> None:
    for file in (SOURCE / "llama").rglob("*.py"):
        for module in imported_modules(file):
            assert not module.startswith("llama_cpp") or module == "llama_cpp.llama_cpp", file


def test_no_folder_has_more_files_than_a_reader_can_keep_apart() -> None:
    folders = Counter(
        file.parent.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )
    crowded = {folder: n for folder, n in folders.items() if n > MAX_SIBLINGS}
    assert not crowded


def test_no_module_is_too_long_to_hold_in_mind() -> None:
    lengths = {file: len(file.read_text("utf-8").splitlines()) for file in SOURCE.rglob("*.py")}
    long = {str(file.relative_to(SOURCE)): n for file, n in lengths.items() if n > MAX_LINES}
    assert not long


def test_few_class_names_are_used_twice() -> None:
    homes: dict[str, list[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert len(twice) <= MAX_SHARED_CLASS_NAMES, twice
