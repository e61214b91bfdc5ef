"""Every setting, once: its default, its limits and its help.

Each field is one flag (`--ctx-size`), one environment variable (`REKINDLE_CTX_SIZE`) and one
key of the TOML file (`ctx_size` under `[engine]`). Flags win, then the environment, then the
file. `resolve` is pure; only `read_file` and `api_keys` touch the disk.
"""

import difflib
import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from rekindle.errors import StartupError

Bytes = NewType("Bytes", int)

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
INT32_MAX = 2**31 - 1
CONFIG_VARIABLE = "REKINDLE_CONFIG"


class FlashAttn(Enum):
    AUTO = "auto"
    ON = "on"
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


class ReasoningHistory(Enum):
    AUTO = "auto"
    KEEP = "keep"
    TEMPLATE = "template"


class Overflow(Enum):
    ERROR = "error"
    TRIM = "trim"


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a field's metadata holds: all that is said of it beyond its type and default."""

    help: str
    minimum: float = 0
    maximum: float = INT32_MAX
    more_flags: tuple[str, ...] = ()
    secret: bool = False
    off_flag: str | None = None  # a switch that means 0


def _about(help: str, **limits: Any) -> dict[str, About]:
    return {"about": About(help=help, **limits)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    model: str | None = field(
        default=None,
        metadata=_about("GGUF file, or hf:owner/repo/file.gguf. Without it: the embedded SmolLM2."),
    )
    alias: str | None = field(
        default=None,
        metadata=_about("Model name in the APIs. Without it: from the file.", more_flags=("-a",)),
    )
    chat_template: str | None = field(
        default=None,
        metadata=_about("Jinja file, Jinja text or 'chatml', instead of the model's own template."),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    reasoning_history: ReasoningHistory = field(
        default=ReasoningHistory.AUTO,
        metadata=_about(
            "What becomes of earlier reasoning: keep it, do as the template says, or auto: keep"
            " it within a tool loop and where the template has a switch for it."
        ),
    )
    overflow: Overflow = field(
        default=Overflow.ERROR,
        metadata=_about(
            "A conversation that does not fit: error, or trim: the oldest turns are left out."
        ),
    )
    tool_dialect: str | None = field(
        default=None,
        metadata=_about("How the model writes tool calls. Without it: found in the template."),
    )
    rewarm: bool = field(
        default=True,
        metadata=_about("Compute the next turn's prompt while idle, where it will be another."),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    ctx_size: int = field(
        default=0,
        metadata=_about(
            "Tokens of context, shared by all sequences; 0: what the model was trained with.",
            more_flags=("-c",),
        ),
    )
    parallel: int = field(
        default=4, metadata=_about("Requests that run at the same time.", minimum=1, maximum=64)
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            "CPU threads. Without it: the physical cores.", minimum=1, more_flags=("-t",)
        ),
    )
    gpu_layers: int = field(
        default=-1,
        metadata=_about(
            "Layers to keep on the GPU; -1: all.", minimum=-1, more_flags=("--n-gpu-layers",)
        ),
    )
    batch_size: int = field(
        default=2048,
        metadata=_about("Most tokens in one call of llama.cpp.", minimum=1, more_flags=("-b",)),
    )
    ubatch_size: int = field(
        default=512, metadata=_about("Most tokens computed in one go.", minimum=1)
    )
    flash_attn: FlashAttn = field(default=FlashAttn.AUTO, metadata=_about("Flash attention."))
    cache_type_k: KvType = field(
        default=KvType.F16,
        metadata=_about(f"Type of the K rows of the KV cache: {_KV_TYPES}."),
    )
    cache_type_v: KvType = field(
        default=KvType.F16,
        metadata=_about(f"Type of the V rows of the KV cache: {_KV_TYPES}."),
    )
    swa_full: bool = field(
        default=False,
        metadata=_about("Keep all rows of sliding-window layers, not only the window."),
    )
    queue_size: int = field(
        default=64, metadata=_about("Requests that may wait for a slot; more get a 429.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    cache_prompt: bool = field(
        default=True,
        metadata=_about("Reuse and keep prefixes; a request may say otherwise."),
    )
    cache_ram: Bytes | None = field(
        default=None,
        metadata=_about(
            "Memory for stored prefixes. Without it: a quarter of the machine's.", maximum=TIB
        ),
    )
    cache_disk: Bytes = field(
        default=Bytes(20 * GIB),
        metadata=_about(
            "Disk space for stored prefixes; 0: none.",
            maximum=1024 * TIB,
            off_flag="--no-cache-disk",
        ),
    )
    cache_dir: Path | None = field(
        default=None,
        metadata=_about("Where they are stored. Without it: in the user's cache directory."),
    )
    cache_write_budget: Bytes = field(
        default=Bytes(20 * GIB),
        metadata=_about("Most bytes written to disk in an hour; 0: no limit.", maximum=1024 * TIB),
    )
    cache_write_policy: WritePolicy = field(
        default=WritePolicy.ALL,
        metadata=_about("Which prefixes go to disk: all, or those that were reused once."),
    )
    cache_min_tokens: int = field(
        default=64, metadata=_about("Shorter prefixes are not written to disk.")
    )
    cache_recompute: bool = field(
        default=True,
        metadata=_about("Compute again where measured speeds say that loading takes longer."),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = field(default="127.0.0.1", metadata=_about("Address to listen on."))
    port: int = field(default=8080, metadata=_about("Port to listen on.", minimum=1, maximum=65535))
    api_key: tuple[str, ...] = field(
        default=(), metadata=_about("Key that clients must send; may be repeated.", secret=True)
    )
    api_key_file: Path | None = field(
        default=None,
        metadata=_about("File with one key per line; lines that start with # are comments."),
    )
    cors: tuple[str, ...] = field(
        default=(), metadata=_about("Origin that browsers may call from; may be repeated.")
    )
    body_limit: Bytes = field(
        default=Bytes(32 * MIB), metadata=_about("Largest request body.", minimum=KIB, maximum=TIB)
    )
    shutdown_grace: float = field(
        default=10.0,
        metadata=_about("Seconds that running requests get at shutdown.", maximum=86400),
    )
    keep_alive: float = field(
        default=10.0,
        metadata=_about(
            "Seconds between keep-alive comments in a stream.", minimum=0.1, maximum=86400
        ),
    )
    log_level: LogLevel = field(
        default=LogLevel.INFO, metadata=_about("Least severe messages to log.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: ModelSettings = ModelSettings()
    chat: ChatSettings = ChatSettings()
    engine: EngineSettings = EngineSettings()
    cache: CacheSettings = CacheSettings()
    server: ServerSettings = ServerSettings()


SECTIONS = {
    "model": ModelSettings,
    "chat": ChatSettings,
    "engine": EngineSettings,
    "cache": CacheSettings,
    "server": ServerSettings,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one section, as the flags, `--print-config` and the docs see it."""

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


class SourceKind(Enum):
    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from; `name` is what the operator would look for there."""

    kind: SourceKind
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Resolved:
    settings: Settings
    sources: Mapping[str, Source]


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


def resolve(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Mapping[str, object]
) -> Resolved:
    """`flags` holds only what was given, by field name; `file` is the parsed TOML."""
    settings = all_settings()
    from_file = _flatten(file, settings)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for setting in settings:
        source = _source(setting, flags, environment, from_file)
        sources[setting.name] = source
        match source.kind:
            case SourceKind.FLAG:
                values[setting.name] = _convert(setting, source, flags[setting.name])
            case SourceKind.ENVIRONMENT:
                values[setting.name] = _convert(setting, source, environment[setting.variable])
            case SourceKind.FILE:
                values[setting.name] = _convert(setting, source, from_file[setting.name])
            case SourceKind.DEFAULT:
                values[setting.name] = setting.default
    made = {
        section: settings_class(**{each.name: values[each.name] for each in fields(settings_class)})
        for section, settings_class in SECTIONS.items()
    }
    resolved = Resolved(Settings(**made), sources)
    _check_together(resolved)
    return resolved


def read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StartupError(
            f"The configuration file {path} cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise StartupError(f"The configuration file {path} is not valid TOML: {error}.") from error


def api_keys(server: ServerSettings) -> tuple[str, ...]:
    """The keys given directly and those in the key file; empty: no key is asked for."""
    if server.api_key_file is None:
        return server.api_key
    try:
        lines = server.api_key_file.read_text("utf-8").splitlines()
    except OSError as error:
        raise StartupError(
            f"The API key file {server.api_key_file} cannot be read: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise StartupError(f"The API key file {server.api_key_file} is not UTF-8 text.") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    if not keys:
        # Going on would serve without any key, which is not what a key file asks for.
        raise StartupError(f"The API key file {server.api_key_file} holds no key.")
    return (*server.api_key, *keys)


def _source(
    setting: Setting,
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    from_file: Mapping[str, object],
) -> Source:
    if setting.name in flags:
        return Source(SourceKind.FLAG, setting.flag)
    if setting.variable in environment:
        return Source(SourceKind.ENVIRONMENT, setting.variable)
    if setting.name in from_file:
        return Source(
            SourceKind.FILE, f"{setting.section}.{setting.name} in the configuration file"
        )
    return Source(SourceKind.DEFAULT, "default")


def _flatten(file: Mapping[str, object], settings: tuple[Setting, ...]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for section, content in file.items():
        if section not in SECTIONS:
            raise _unknown(f"[{section}]", section, "section", tuple(SECTIONS))
        if not isinstance(content, Mapping):
            raise StartupError(
                f"{section} in the configuration file must be a section, written [{section}]."
            )
        known = tuple(setting.name for setting in settings if setting.section == section)
        for key in content:
            if key not in known:
                raise _unknown(f"{section}.{key}", key, "key", known)
        flat.update(content)
    return flat


def _unknown(shown: str, name: str, noun: str, known: tuple[str, ...]) -> StartupError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it can be {', '.join(known)}."
    return StartupError(f"The configuration file has an unknown {noun} {shown}; {hint}")


def _convert(setting: Setting, source: Source, raw: object) -> object:
    """The value in the field's own type; a flag or variable may spell it as text."""
    spelled = raw
    if isinstance(raw, str) and source.kind is not SourceKind.FILE:
        spelled = _from_text(setting.type, raw)
    value = _typed(setting.type, spelled)
    if value is None or not _within_limits(setting, value):
        found = "is not" if setting.about.secret else f"is {raw!r}"
        raise StartupError(f"{setting.name} must be {setting.allowed}, but {source} {found}.")
    return value


def _from_text(kind: Any, text: str) -> object:
    """Text as the value TOML would have; left as it is where it spells none."""
    word = text.strip().lower()
    if kind is bool:
        words = {"true": True, "1": True, "on": True, "yes": True}
        words |= {"false": False, "0": False, "off": False, "no": False}
        return words.get(word, text)
    if kind is int and re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if kind is float and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word):
        return float(word)
    if kind == tuple[str, ...]:
        return [part.strip() for part in text.split(",")]
    return text


def _typed(kind: Any, value: object) -> object | None:
    """`value` as `kind`, or None where it is not one."""
    if kind is Bytes:
        return _size(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool):
        return value if type(value) is kind else None
    if kind == tuple[str, ...]:
        if not isinstance(value, list | tuple):
            return None
        return tuple(value) if all(isinstance(each, str) for each in value) else None
    if not isinstance(value, str):
        return value if isinstance(value, kind) else None
    if issubclass(kind, Enum):
        return next((member for member in kind if member.value == value.lower()), None)
    if kind is Path:
        return Path(value).expanduser() if value else None
    return value


def _size(value: object) -> Bytes | None:
    if type(value) is int:
        return Bytes(value)
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": KIB, "mib": MIB}
    units |= {"gib": GIB, "tb": 10**12, "tib": TIB}
    match = (
        re.fullmatch(r"(\d+)\s*([kmgt]i?b|b|)", value.lower()) if isinstance(value, str) else None
    )
    return Bytes(int(match[1]) * units[match[2]]) if match else None


def _within_limits(setting: Setting, value: object) -> bool:
    if isinstance(value, tuple):
        return all(each.strip() for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return setting.about.minimum <= value <= setting.about.maximum
    return value != ""


def _check_together(resolved: Resolved) -> None:
    engine, sources = resolved.settings.engine, resolved.sources
    for name in ("cache_ram", "cache_disk"):
        n_bytes = getattr(resolved.settings.cache, name)
        if n_bytes and n_bytes < MIB:
            # llama-server counts MiB here: 8192 would quietly become 8 KiB.
            raise StartupError(
                f"{name} must be 0 or at least 1MiB, but {sources[name]} is {n_bytes} bytes;"
                " a size has a unit, such as 512MiB or 8GiB."
            )
    if engine.ubatch_size > engine.batch_size:
        raise StartupError(
            f"ubatch_size must not exceed batch_size, but it is {engine.ubatch_size}"
            f" ({sources['ubatch_size']}) and batch_size is {engine.batch_size}"
            f" ({sources['batch_size']})."
        )
    if engine.parallel > engine.batch_size:
        raise StartupError(
            f"batch_size must not be below parallel, but it is {engine.batch_size}"
            f" ({sources['batch_size']}) and parallel is {engine.parallel}"
            f" ({sources['parallel']})."
        )
    if engine.cache_type_v.quantised and engine.flash_attn is FlashAttn.OFF:
        raise StartupError(
            f"cache_type_v {engine.cache_type_v.value} ({sources['cache_type_v']}) needs flash"
            f" attention, but flash_attn is off ({sources['flash_attn']})."
        )


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not types.NoneType)
    return hint
