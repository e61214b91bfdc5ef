"""The models that the operator named, as GGUF files on this machine.

A path is checked, `hf:owner/repo/file.gguf` or `hf:owner/repo:quant` is downloaded, and without
MODEL the embedded SmolLM2 is used. Every model has a name.
"""

import difflib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.config.model import ModelSettings
from rekindle.config.settings import Settings
from rekindle.errors import StartupError
from rekindle.llama.placement.gguf_header import SHARD, shards
from rekindle.models.files.download import FORMS, download
from rekindle.models.files.embedded import EMBEDDED_NAME, embedded_model
from rekindle.models.files.gguf_check import check_gguf
from rekindle.models.files.hub_files import find_file

_log = logging.getLogger(__name__)

HUB = "hf:"  # in front of a model of the Hugging Face Hub
_QUANT_SUFFIX = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|fp16|fp32|mxfp4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFile:
    path: Path  # the first shard of a split model; llama.cpp finds the others beside it
    name: str

    @property
    def files(self) -> list[Path]:
        return shards(self.path)

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str
    source: str  # for `resolve_model`


def first_model(settings: ModelSettings) -> ModelFile | None:
    """Return MODEL, or the embedded one. None: only --models or --models-dir is given."""
    if settings.model is None and (settings.models or settings.models_dir):
        return None
    return resolve_model(settings.model)


def named_models(settings: ModelSettings, first: NamedModel | None) -> dict[str, str]:
    """Return the source of each model by its name: `first`, then --models and --models-dir.

    Files are checked when they are loaded. Raises StartupError if two have the same name.
    """
    found = [_named(source) for source in settings.models]
    if settings.models_dir is not None:
        found += _in_folder(settings.models_dir)
    sources: dict[str, str] = {}
    if first is not None:
        sources[first.name] = first.source
        found = [model for model in found if not _is_same(model.source, first.source)]
    for model in found:
        known = sources.setdefault(model.name, model.source)
        if not _is_same(known, model.source):
            raise StartupError(
                f"Two models have the name {model.name}: {known} and {model.source}."
            )
    return sources


def check_model_names(settings: Settings, names: Sequence[str]) -> None:
    """Raise StartupError if the file has settings of a model that is not served.

    With --models-dir, only warn: a file may be added to the folder before the next start.
    """
    for name in settings.by_model:
        if name in names:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
        said = f'The configuration file has [models."{name}"], but no model has this name; {hint}'
        if settings.model.models_dir is None:
            raise StartupError(said)
        _log.warning("models: %s", said)


def _is_same(source: str, other: str) -> bool:
    """Return True for the same file, or the same file to download."""
    return source == other or Path(source).resolve() == Path(other).resolve()


def _in_folder(folder: Path) -> list[NamedModel]:
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".gguf")
    except OSError as error:
        raise StartupError(
            f"The models folder {folder} cannot be read: {error.strerror}."
        ) from error
    if not paths:
        raise StartupError(f"The models folder {folder} has no GGUF file.")
    first_shards = dict.fromkeys(shards(path)[0] for path in paths)
    return [NamedModel(_stem(path.name), str(path)) for path in first_shards]


def _named(source: str) -> NamedModel:
    if source.startswith(HUB):
        return NamedModel(_stem(source.rpartition("/")[2]), source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise StartupError(f"There is no file at {path}.")
    return NamedModel(_stem(path.name), str(shards(path)[0]))


def resolve_model(model: str | None) -> ModelFile:
    """Return the checked file of MODEL, after a download if needed. Raises StartupError."""
    if model is None:
        return ModelFile(embedded_model(), EMBEDDED_NAME)
    paths = _downloaded(model) if model.startswith(HUB) else shards(Path(model).expanduser())
    for path in paths:
        check_gguf(path)
    stem = _stem(paths[0].name)
    return ModelFile(paths[0], _QUANT_SUFFIX.sub("", stem) or stem)


def _stem(file_name: str) -> str:
    return SHARD.sub("", file_name).removesuffix(".gguf")


def _downloaded(model: str) -> list[Path]:
    parts = model.removeprefix(HUB).split("/")
    if len(parts) == 2 and all(parts):
        repository, colon, quant = "/".join(parts).partition(":")
        if bool(colon) == bool(quant):
            parts = [*repository.split("/"), find_file(repository, quant or None, model)]
    if len(parts) < 3 or not all(parts) or not parts[-1].endswith(".gguf"):
        raise StartupError(f"{model} must be written as {FORMS}.")
    repository, files = "/".join(parts[:2]), shards(Path(*parts[2:]))
    return [download(repository, file.as_posix(), model) for file in files]
