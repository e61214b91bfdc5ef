"""Settings of the cache."""

# ruff: noqa: FBT003, RUF009 - `setting` declares a dataclass field, and a default may be a bool.

from dataclasses import dataclass
from pathlib import Path

from rekindle.config.choices import NamespaceBy, WritePolicy
from rekindle.config.declare import GIB, MIB, TIB, Bytes, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    cache_prompt: bool = setting(True, "Reuse and store prefixes; a request can override it.")
    cache_ram: Bytes | None = setting(
        None,
        "Memory for stored prefixes; a plain number counts MiB. Default: a quarter of the"
        " machine's.",
        maximum=TIB,
        unit=MIB,
    )
    cache_disk: Bytes = setting(
        Bytes(20 * GIB),
        "Disk space for stored prefixes; 0: none.",
        maximum=1024 * TIB,
        off_flag="--no-cache-disk",
    )
    cache_dir: Path | None = setting(
        None, "Folder for stored prefixes. Default: in the user's cache directory."
    )
    strict: bool = setting(
        False, "Refuse to start if other users can write to the cache directory."
    )
    cache_write_budget: Bytes = setting(
        Bytes(20 * GIB), "Maximum bytes written to disk per hour; 0: no limit.", maximum=1024 * TIB
    )
    cache_write_policy: WritePolicy = setting(
        WritePolicy.ALL, "Prefixes to write to disk: all, or only those that were reused once."
    )
    cache_min_tokens: int = setting(
        64, "Minimum length of prefixes that are written to disk, in tokens."
    )
    cache_recompute: bool = setting(
        True, "Recompute a stored prefix when that is measured to be faster than loading it."
    )
    cache_shared: str | None = setting(
        None,
        "URL of a store that several servers share: redis://, rediss://, redis+sentinel://,"
        " redis+cluster:// or s3://.",
        secret=True,
    )
    cache_shared_key: str | None = setting(
        None,
        "Key that encrypts the shared store: 32 bytes in hex or base64. Default: no encryption.",
        secret=True,
    )
    cache_shared_encrypt: bool = setting(
        True,
        "Encrypt the shared store with its key. Off: the key only shows that nobody changed it.",
    )
    namespace_by: NamespaceBy = setting(
        NamespaceBy.AUTO,
        "Who shares cached prefixes. none: all clients; api-key: clients with the same key; auto:"
        " api-key if there are several keys.",
    )
