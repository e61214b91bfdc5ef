"""Choice of a GGUF file in a repository of the Hugging Face Hub, by its quantisation."""

import re
from collections.abc import Sequence
from pathlib import Path

from rekindle.errors import StartupError
from rekindle.models.files.download import hub_errors

USUAL = ("Q4_K_M", "Q8_0")  # llama.cpp's order, if no quantisation is named
_LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_NO_MODEL = re.compile(r"(^|/)mmproj|imatrix", re.IGNORECASE)


def find_file(repository: str, quant: str | None, model: str) -> str:
    """Return the file of that quantisation; None: the usual one, or the first.

    `model` is the operator's text. Raises StartupError.
    """
    files = _models_in(_files_of(repository, model))
    for wanted in USUAL if quant is None else (quant,):
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        if found := next(filter(pattern.search, files), None):
            return found
    if quant is None and files:
        return files[0]
    there = f"it has {', '.join(files)}." if files else "it has no GGUF file."
    wanted = "for a model" if quant is None else quant
    raise StartupError(f"The repository {repository} has no file {wanted}: {there}")


def _models_in(files: Sequence[str]) -> list[str]:
    return [
        file
        for file in sorted(files)
        if file.endswith(".gguf") and not _LATER_SHARD.search(file) and not _NO_MODEL.search(file)
    ]


def _files_of(repository: str, model: str) -> list[str]:
    """List the files at the Hub; if it cannot be reached, those on this machine."""
    import httpx2
    from huggingface_hub import HfApi, errors

    with hub_errors(repository, "its list of files", model):
        try:
            return HfApi().list_repo_files(repository)
        except (errors.OfflineModeIsEnabled, httpx2.TransportError):
            if files := _kept_files(repository):
                return files
            raise


def _kept_files(repository: str) -> list[str]:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text("ascii").strip()
    except OSError:
        return []
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
