"""Every setting, once: its default, its limits and its help.

Each field is one flag (`--ctx-size`), one environment variable (`REKINDLE_CTX_SIZE`) and one
key of the TOML file (`ctx_size` under `[engine]`). `config_sources` reads their values.
"""

# ruff: noqa: FBT003, RUF009 - `_setting` declares a dataclass field, and a default may be a bool.

import types
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Bytes = NewType("Bytes", int)
T = TypeVar("T")

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
INT32_MAX = 2**31 - 1
CONFIG_VARIABLE = "REKINDLE_CONFIG"


class FlashAttn(Enum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Speculate(Enum):
    AUTO = "auto"  # where it makes replies faster
    OFF = "off"


class KvType(Enum):
    F16 = "f16"
    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"

    @property
    def quantised(self) -> bool:
        return self not in (KvType.F16, KvType.F32, KvType.BF16)


_KV_TYPES = ", ".join(kind.value for kind in KvType)


class WritePolicy(Enum):
    ALL = "all"
    REUSED = "reused"


class EngineKind(Enum):
    LLAMA = "llama"
    VLLM = "vllm"


class NamespaceBy(Enum):
    AUTO = "auto"
    NONE = "none"
    API_KEY = "api-key"


class ReasoningHistory(Enum):
    AUTO = "auto"
    KEEP = "keep"
    TEMPLATE = "template"


class Overflow(Enum):
    ERROR = "error"
    TRIM = "trim"


class MediaPolicy(Enum):
    TEXT = "text"
    ERROR = "error"


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Metadata of a settings field: its help and its limits."""

    help: str
    minimum: float = 0
    maximum: float = INT32_MAX
    more_flags: tuple[str, ...] = ()
    secret: bool = False
    off_flag: str | None = None  # a switch that sets the value to 0


def _setting(default: T, help: str, **limits: Any) -> T:
    """Declare one setting. The result has the type of the default, which mypy checks."""
    made: Any = field(default=default, metadata={"about": About(help=help, **limits)})
    return cast(T, made)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    model: str | None = _setting(
        None,
        "GGUF file or hf:owner/repo/file.gguf; with --engine vllm, the model's folder. Default:"
        " the embedded SmolLM2.",
    )
    alias: str | None = _setting(
        None, "Model name in the APIs. Default: taken from the file name.", more_flags=("-a",)
    )
    chat_template: str | None = _setting(
        None, "Jinja file, Jinja text or 'chatml' to use instead of the model's own template."
    )
    models: tuple[str, ...] = _setting(
        (), "Another model, given like MODEL and loaded on first use; may be repeated."
    )
    models_dir: Path | None = _setting(
        None, "Folder of GGUF files to serve as well, each named after its file."
    )
    models_memory: Bytes | None = _setting(
        None,
        "Memory for loaded models; beyond it, the least recently used is unloaded. Default: half"
        " of the machine's.",
        maximum=1024 * TIB,
    )
    keep_alive: float = _setting(0.0, "Seconds until an idle model is unloaded; 0: never.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    reasoning_history: ReasoningHistory = _setting(
        ReasoningHistory.AUTO,
        "Where memory restores reasoning that a client dropped. template: nowhere; auto: within"
        " the current tool loop; keep: everywhere, so that the prompt depends on memory.",
    )
    overflow: Overflow = _setting(
        Overflow.ERROR,
        "For a conversation longer than the context. error: refuse it; trim: leave out the oldest"
        " turns.",
    )
    media: MediaPolicy = _setting(
        MediaPolicy.TEXT,
        "Images, audio, video and files in requests. text: the model reads a line about each, or"
        " the text of a text file; error: refuse the request.",
    )
    reasoning_budget: int = _setting(
        -1,
        "Most reasoning tokens of a reply; requests may ask for fewer. 0: no reasoning, -1: no"
        " limit.",
        minimum=-1,
    )
    stream_calls: bool = _setting(
        True,
        "Send tool calls while they are written, and end by force those that reach max_tokens. If"
        " off, send only whole calls.",
    )
    tool_dialect: str | None = _setting(
        None, "How the model writes tool calls. Default: derived from the template."
    )
    rewarm: bool = _setting(
        True,
        "While idle, prefill the next turn's prompt if the template will render it differently.",
    )
    volatile: tuple[str, ...] = _setting(
        (),
        "Text in system prompts and tools to replace by a constant: the name of a built-in rule,"
        " or a regular expression; may be repeated.",
    )
    warm: tuple[str, ...] = _setting(
        (), "File, folder or glob to prime at start and after each change; may be repeated."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    engine: EngineKind = _setting(
        EngineKind.LLAMA,
        "Engine: llama.cpp in a process of its own, or vLLM servers given with --upstream.",
    )
    upstream: tuple[str, ...] = _setting((), "Base URL of a vLLM server; may be repeated.")
    ctx_size: int = _setting(
        0,
        "Tokens of context, shared by all running requests; 0: as the model was trained.",
        more_flags=("-c",),
    )
    parallel: int = _setting(4, "Requests that run at the same time.", minimum=1, maximum=64)
    threads: int | None = _setting(
        None, "CPU threads. Default: the number of physical cores.", minimum=1, more_flags=("-t",)
    )
    gpu_layers: int = _setting(
        -1, "Number of layers on the GPU; -1: all.", minimum=-1, more_flags=("--n-gpu-layers",)
    )
    batch_size: int = _setting(
        2048, "Maximum tokens in one call of llama.cpp.", minimum=1, more_flags=("-b",)
    )
    ubatch_size: int = _setting(512, "Maximum tokens that llama.cpp computes at once.", minimum=1)
    flash_attn: FlashAttn = _setting(FlashAttn.AUTO, "Flash attention.")
    cache_type_k: KvType = _setting(KvType.F16, f"Type of the K rows of the KV cache: {_KV_TYPES}.")
    cache_type_v: KvType = _setting(KvType.F16, f"Type of the V rows of the KV cache: {_KV_TYPES}.")
    swa_full: bool = _setting(
        False, "Keep all rows of sliding-window layers, not only those in the window."
    )
    speculate: Speculate = _setting(
        Speculate.AUTO, "Speculative decoding: draft tokens from all text that was seen before."
    )
    queue_size: int = _setting(64, "Requests that may wait for a slot; further ones get a 429.")
    engine_hang: float = _setting(
        120.0,
        "Seconds without progress after which an engine process is restarted; 0: never.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    cache_prompt: bool = _setting(True, "Reuse and store prefixes; a request can override it.")
    cache_ram: Bytes | None = _setting(
        None, "Memory for stored prefixes. Default: a quarter of the machine's.", maximum=TIB
    )
    cache_disk: Bytes = _setting(
        Bytes(20 * GIB),
        "Disk space for stored prefixes; 0: none.",
        maximum=1024 * TIB,
        off_flag="--no-cache-disk",
    )
    cache_dir: Path | None = _setting(
        None, "Folder for stored prefixes. Default: in the user's cache directory."
    )
    strict: bool = _setting(
        False, "Refuse to start if other users can write to the cache directory."
    )
    cache_write_budget: Bytes = _setting(
        Bytes(20 * GIB), "Maximum bytes written to disk per hour; 0: no limit.", maximum=1024 * TIB
    )
    cache_write_policy: WritePolicy = _setting(
        WritePolicy.ALL, "Prefixes to write to disk: all, or only those that were reused once."
    )
    cache_min_tokens: int = _setting(
        64, "Minimum length of prefixes that are written to disk, in tokens."
    )
    cache_recompute: bool = _setting(
        True, "Recompute a stored prefix when that is measured to be faster than loading it."
    )
    cache_shared: str | None = _setting(
        None,
        "URL of a store that several servers share: redis://, rediss://, redis+sentinel://,"
        " redis+cluster:// or s3://.",
        secret=True,
    )
    cache_shared_key: str | None = _setting(
        None,
        "Key that encrypts the shared store: 32 bytes in hex or base64. Default: no encryption.",
        secret=True,
    )
    cache_shared_encrypt: bool = _setting(
        True,
        "Encrypt the shared store with its key. Off: the key only shows that nobody changed it.",
    )
    namespace_by: NamespaceBy = _setting(
        NamespaceBy.AUTO,
        "Who shares cached prefixes. none: all clients; api-key: clients with the same key; auto:"
        " api-key if there are several keys.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8080, "Port to listen on.", minimum=1, maximum=65535)
    api_key: tuple[str, ...] = _setting(
        (), "API key that clients must send; may be repeated.", secret=True
    )
    api_key_file: Path | None = _setting(
        None, "File with one key per line; lines that start with # are comments."
    )
    admin_key: str | None = _setting(
        None,
        "Key for unloading models, deleting everything and pinning stored prompts. Default: every"
        " client may.",
        secret=True,
    )
    admin_metrics: bool = _setting(False, "Only --admin-key may read /metrics.")
    cors: tuple[str, ...] = _setting(
        (), "Origin of web pages that may call this server; may be repeated."
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (), "Name of this server in URLs, beside localhost and addresses; may be repeated."
    )
    body_limit: Bytes = _setting(Bytes(32 * MIB), "Largest request body.", minimum=KIB, maximum=TIB)
    max_connections: int = _setting(
        1024, "Connections with a running request; further ones get a 503.", minimum=1
    )
    receive_timeout: float = _setting(
        20.0,
        "Seconds for the headers of a request to arrive, and for each pause in its body.",
        minimum=0.1,
        maximum=86400,
    )
    explain: bool = _setting(
        False, "Report in every reply why a part of its prompt missed the cache."
    )
    shutdown_grace: float = _setting(
        10.0, "Seconds that running requests get to finish at shutdown.", maximum=86400
    )
    ping_interval: float = _setting(
        10.0, "Seconds between keep-alive comments in a stream.", minimum=0.1, maximum=86400
    )
    log_level: LogLevel = _setting(LogLevel.INFO, "Lowest severity to log.")
    trace: Path | None = _setting(
        None, "File that gets one line per reply, with up to 80 characters of its prompt."
    )
    trace_prompts: bool = _setting(
        False, "Write whole prompts and requests to the trace: everything that clients send."
    )
    trace_size: Bytes = _setting(
        Bytes(100 * MIB),
        "Maximum size of the trace. After that a new file begins, and one old file is kept.",
        minimum=MIB,
        maximum=1024 * TIB,
    )
    otel: bool = _setting(
        False, "Send spans to OpenTelemetry. Also on when OTEL_EXPORTER_OTLP_ENDPOINT is set."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: ModelSettings = ModelSettings()
    chat: ChatSettings = ChatSettings()
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    server: ServerSettings = ServerSettings()


SECTIONS: dict[str, type[Any]] = {each.name: type(each.default) for each in fields(Settings)}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one section, for the flags, `--print-config` and the docs."""

    section: str
    name: str
    type: Any  # without the `| None`
    default: object
    about: About

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "REKINDLE_" + self.name.upper()

    @property
    def allowed(self) -> str:
        low, high = f"{self.about.minimum:.16g}", f"{self.about.maximum:.16g}"
        if self.type is Bytes:
            return f"a size such as 1048576, 4MB or 1GiB, from {low} to {high} bytes"
        if self.type is int:
            return f"a whole number from {low} to {high}"
        if self.type is float:
            return f"a number from {low} to {high}"
        if self.type is bool:
            return "true or false"
        if self.type == tuple[str, ...]:
            return "a list of strings, none of them empty"
        if issubclass(self.type, Enum):
            return "one of " + ", ".join(member.value for member in self.type)
        return "a string that is not empty"


def all_settings() -> tuple[Setting, ...]:
    return tuple(
        Setting(
            section=section,
            name=each.name,
            type=_without_none(hints[each.name]),
            default=each.default,
            about=each.metadata["about"],
        )
        for section, settings_class in SECTIONS.items()
        for hints in [get_type_hints(settings_class)]
        for each in fields(settings_class)
    )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    return hint
