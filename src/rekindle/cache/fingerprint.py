"""The identity of a setup and its fingerprint: only equal setups can use each other's bytes.

The fingerprint is the parent of every first block, so a key from another model, KV type or
llama.cpp never matches. Digests of unchanged weight files are kept in a file: reading the weights
again would take longer than loading them.
"""

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b, sha256
from pathlib import Path

import platformdirs

from rekindle.cache.entry import FORMAT_VERSION, KEY_BYTES, Key
from rekindle.errors import StartupError

_log = logging.getLogger(__name__)

DIGESTS_NAME = "weights.json"
MAX_DIGESTS = 64
_MAX_FILE_BYTES = 2**20  # of the file of digests: a cut one is no JSON
_CHUNK_BYTES = 4 * 2**20
# A change this soon after another may leave the same time stamp: FAT counts in 2 seconds.
_STAMP_SECONDS = 2.0


def cache_directory(setting: Path | None) -> Path:
    return setting or default_cache_dir()


def default_cache_dir() -> Path:
    return platformdirs.user_cache_path("rekindle") / "prefixes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """All that changes the meaning of stored bytes. None: llama.cpp's or the model's default."""

    weights: str  # see `weights_digest`
    model_class: str
    type_k: str
    type_v: str
    flash_attn: str
    swa_full: bool  # the sliding window's layers are rows, not part of a checkpoint
    rope_n_ctx: int | None  # models with long and short RoPE factors choose by context size
    # LLAMA_ATTN_ROT_DISABLE: llama.cpp rotates quantised rows unless its environment forbids it.
    attn_rot_disable: str | None
    state_version: str
    rope_scaling: str | None = None
    rope_freq_base: float | None = None
    rope_freq_scale: float | None = None
    yarn: Mapping[str, float] | None = None  # the operator's own values, by name
    adapters: tuple[tuple[str, float], ...] = ()  # digest and scale of each


# Part of every fingerprint. A change here or to Identity's names makes stored entries unusable.
_CONSTANTS: dict[str, object] = {
    "v_transposed": None,
    "namespace": "",
    "format_version": FORMAT_VERSION,
}
_ONLY_IF_SET = "yarn"  # entries from before this field existed stay valid


def fingerprint(identity: Identity) -> Key:
    # JSON with sorted names: strings are quoted and floats exact, so no two identities share it.
    values = {**asdict(identity), **_CONSTANTS}
    if not identity.yarn:
        del values[_ONLY_IF_SET]
    text = json.dumps(values, sort_keys=True)
    return blake2b(text.encode("ascii"), digest_size=KEY_BYTES).digest()


def turn_fingerprint(weights: str) -> Key:
    """Return the fingerprint of remembered turns: tokens do not depend on how rows are stored."""
    return blake2b(f"turns of {weights}".encode("ascii"), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's metadata. Equal states are taken for equal content."""

    path: str
    size: int
    mtime_ns: int
    # Catches changes that keep the mtime: `cp -p`, images whose files all have one time.
    ctime_ns: int
    inode: int
    device: int


class DigestFile:
    """SHA-256 digests by file state, as JSON. An unreadable file counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[FileState, str]:
        """Return the digests, least recently used first."""
        try:
            rows = json.loads(_read_small(self._path))
            return {FileState(**row["file"]): _checked(row["sha256"]) for row in rows}
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return {}

    def save(self, digests: Mapping[FileState, str]) -> None:
        kept = list(digests.items())[-MAX_DIGESTS:]
        rows = [{"file": asdict(state), "sha256": digest} for state, digest in kept]
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._path, json.dumps(rows, indent=1).encode("ascii"))
        except OSError as error:
            _log.warning("cache: writing %s failed: %s", self._path, error.strerror)


def weights_digest(
    paths: Sequence[Path],
    *,
    known: DigestFile,
    on_progress: Callable[[int, int], None] | None,
) -> str:
    """Return one digest over the files' contents, in order. Raises StartupError.

    `on_progress` receives the bytes done and the total.
    """
    digests = known.load()
    order = list(digests)
    states = [_state(path) for path in paths]
    n_total = sum(state.size for state in states)
    n_done = 0

    def report(n_bytes: int) -> None:
        nonlocal n_done
        n_done += n_bytes
        if on_progress:
            on_progress(n_done, n_total)

    whole = sha256()
    for path, state in zip(paths, states, strict=True):
        digest = digests.pop(state, None)
        if digest is None:
            digest = _read_digest(path, state, report)
        else:
            report(state.size)
        if _is_settled(state):
            digests[state] = digest
        whole.update(bytes.fromhex(digest))
    if list(digests) != order:
        known.save(digests)
    return whole.hexdigest()


def _state(path: Path) -> FileState:
    try:
        real = path.resolve()
        stat = real.stat()
    except OSError as error:
        raise StartupError(f"The file {path} cannot be read: {error.strerror}.") from error
    return FileState(
        path=str(real),
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
        inode=stat.st_ino,
        device=stat.st_dev,
    )


def _read_digest(path: Path, state: FileState, report: Callable[[int], None]) -> str:
    digest = sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while n_read := file.readinto(buffer):
                digest.update(view[:n_read])
                report(n_read)
    except OSError as error:
        raise StartupError(f"The file {path} cannot be read: {error.strerror}.") from error
    if _state(path) != state:
        raise StartupError(f"The file {path} was changed while it was read; start again.")
    return digest.hexdigest()


def _is_settled(state: FileState) -> bool:
    """Return whether any later change to the file would change its state."""
    return time.time() - state.mtime_ns / 1e9 > _STAMP_SECONDS


def _read_small(path: Path) -> bytes:
    """Read a file of the cache directory, following no link and waiting for no pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_FILE_BYTES)


def _checked(digest: object) -> str:
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(digest)
    return digest


def _replace(path: Path, content: bytes) -> None:
    """Replace a file at once: readers see the old content or the new one. Only the owner reads."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
