"""Layers are a test: each file imports only what its home may import."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "rekindle"
LEAVES = {
    "errors",
    "config",
    "config_sources",
    "generation",
    "model_state",
    "request_record",
    "stored_responses",
    "stored_turns",
    "string_pattern",
    "telemetry",
}
MAY_IMPORT = {
    "errors": set(),
    "generation": set(),
    "model_state": set(),
    "stored_responses": set(),
    "stored_turns": set(),
    "string_pattern": set(),
    "request_record": {"generation"},
    "telemetry": {"generation", "request_record"},
    "trace": {"errors", "generation", "request_record"},
    "otel": {"errors", "request_record", "trace"},
    "config": set(),
    "config_sources": {"config", "errors"},
    "llama": LEAVES,
    "chat": LEAVES,
    "cache": LEAVES,
    "engine": LEAVES | {"cache"},
    "vllm": {"errors", "config", "generation", "model_state"},
    "api": LEAVES | {"chat"},
    "model_source": LEAVES | {"llama"},
    "model_stores": LEAVES | {"cache", "model_source"},
    "chat_setup": LEAVES | {"chat"},
    "loaded_model": LEAVES
    | {"llama", "cache", "chat", "chat_setup", "engine", "api", "model_source", "model_stores"},
    "upstream_model": LEAVES | {"chat", "chat_setup", "api", "vllm", "model_stores"},
    "model_pool": LEAVES | {"api"},
    "prime_files": LEAVES,
    "prime_stream": LEAVES | {"prime_files"},
    "warm_list": LEAVES | {"prime_files", "prime_stream"},
    "replay": LEAVES | {"api", "chat", "prime_files", "prime_stream"},
    "bench": LEAVES | {"prime_files", "replay"},
    "explain": LEAVES | {"replay"},
    "server": LEAVES
    | {
        "trace",
        "otel",
        "cache",
        "chat",
        "api",
        "model_source",
        "model_stores",
        "loaded_model",
        "upstream_model",
        "model_pool",
        "warm_list",
    },
    "cli": LEAVES
    | {
        "cache",
        "loaded_model",
        "upstream_model",
        "model_source",
        "server",
        "prime_files",
        "prime_stream",
        "replay",
        "explain",
        "bench",
    },
    "__main__": {"cli"},
}


def unit_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


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
    units = {names[1] for names in parts if names[0] == "rekindle"}
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
