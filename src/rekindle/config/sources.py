"""Values of the settings, and the source of each: flags, the environment, a TOML file.

A flag wins over the environment, and the environment over the file. llama-server's variables are
read where nothing else is given. `[models."name"]` of the file wins over all of them, for that
model. `resolve` is pure; only `read_file` and `api_keys` read files.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from rekindle.config.choices import FlashAttn
from rekindle.config.declare import GIB, KIB, MIB, TIB, Bytes
from rekindle.config.llama_server.variables import read_variables
from rekindle.config.placement import check_placement
from rekindle.config.server import ServerSettings
from rekindle.config.settings import SECTIONS, Setting, Settings, all_settings
from rekindle.errors import StartupError

MODELS = "models"  # `[models."name"]` in the file


@dataclass(frozen=True, slots=True)
class Resolved:
    settings: Settings
    sources: Mapping[str, str]  # by setting: its flag, its variable, its key, or "default"
    by_model: Mapping[str, Mapping[str, str]]  # by model: sources of the settings of its own
    unused: Mapping[str, str]  # by variable of llama-server: why it has no effect


def resolve(
    flags: Mapping[str, object], environment: Mapping[str, str], file: Mapping[str, object]
) -> Resolved:
    """Return the settings. `flags` holds given flags by field name; `file` is parsed TOML."""
    settings = {setting.name: setting for setting in all_settings()}
    from_file = _flatten(file, tuple(settings.values()))
    llama = read_variables(environment)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting in settings.values():
        value, source = setting.default, "default"
        if setting.name in flags:
            source = setting.flag
            value = _convert(setting, source, flags[setting.name], is_text=True)
        elif setting.variable in environment:
            source = setting.variable
            value = _convert(setting, source, environment[source], is_text=True)
        elif setting.name in from_file:
            source = f"{setting.section}.{setting.name} in the configuration file"
            value = _convert(setting, source, from_file[setting.name], is_text=False)
        elif given := llama.given.get(setting.name):
            source = given.source
            value = _convert(setting, source, given.text, is_text=True)
        values[setting.name], sources[setting.name] = value, source
    general = _made(values)
    _check_together(general, sources)
    by_model: dict[str, Settings] = {}
    model_sources: dict[str, dict[str, str]] = {}
    for name, keys in _model_tables(file, settings).items():
        own = {key: f'{MODELS}."{name}".{key} in the configuration file' for key in keys}
        replaced = {
            key: _convert(settings[key], own[key], keys[key], is_text=False) for key in keys
        }
        by_model[name], model_sources[name] = _made({**values, **replaced}), own
        _check_together(by_model[name], {**sources, **own})
    return Resolved(replace(general, by_model=by_model), sources, model_sources, llama.unused)


def _made(values: Mapping[str, Any]) -> Settings:
    return Settings(
        **{
            section: kind(**{each.name: values[each.name] for each in fields(kind)})
            for section, kind in SECTIONS.items()
        }
    )


def _model_tables(
    file: Mapping[str, object], settings: Mapping[str, Setting]
) -> dict[str, Mapping[str, object]]:
    """Return the keys of each `[models."name"]`. Raises StartupError for keys it cannot have."""
    tables = file.get(MODELS, {})
    if not isinstance(tables, Mapping) or not all(isinstance(t, Mapping) for t in tables.values()):
        raise StartupError(
            f'{MODELS} in the configuration file must be sections, written [{MODELS}."name"].'
        )
    known = tuple(setting.name for setting in settings.values() if setting.is_per_model)
    for name, keys in tables.items():
        for key in keys:
            if key in known:
                continue
            shown = f'{MODELS}."{name}".{key}'
            if key in settings:
                raise StartupError(
                    f"{shown} in the configuration file cannot be set for one model: write it"
                    f" under [{settings[key].section}]."
                )
            raise _unknown(shown, key, "key", known)
    return dict(tables)


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
    """Return the given keys and those of the key file. Empty: clients need no key."""
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
        # Without a key the server would be open, although the operator asked for keys.
        raise StartupError(f"The API key file {server.api_key_file} holds no key.")
    return (*server.api_key, *keys)


def _flatten(file: Mapping[str, object], settings: tuple[Setting, ...]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for section, content in file.items():
        if section == MODELS:
            continue
        if section not in SECTIONS:
            raise _unknown(f"[{section}]", section, "section", (*SECTIONS, MODELS))
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


def _convert(setting: Setting, source: str, raw: object, *, is_text: bool) -> object:
    """Return the value in the field's own type. `is_text`: a text may spell another type."""
    about = setting.about
    if isinstance(raw, str | int) and (word := str(raw).strip().lower()) in about.words:
        return about.words[word]
    if about.splits and is_text and isinstance(raw, list | tuple):
        raw = [part.strip() for text in raw for part in text.split(",")]
    spells = is_text and isinstance(raw, str)
    value = _typed(setting.type, _from_text(setting.type, str(raw)) if spells else raw)
    if setting.type is Bytes and value is not None and re.fullmatch(r"\d+", str(raw).strip()):
        value = Bytes(int(str(raw)) * about.unit)
    if value is None or not _within_limits(setting, value):
        found = "is not" if setting.about.secret else f"is {raw!r}"
        raise StartupError(f"{setting.name} must be {setting.allowed}, but {source} {found}.")
    return value


def _from_text(kind: Any, text: str) -> object:
    """Return the value that TOML would have; the text itself if it spells none."""
    word = text.strip().lower()
    if kind is bool:
        words = dict.fromkeys(("true", "1", "on", "yes", "enabled"), True)
        words |= dict.fromkeys(("false", "0", "off", "no", "disabled"), False)
        return words.get(word, text)
    if kind is int and re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if kind is float and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word):
        return float(word)
    if kind == tuple[str, ...]:
        return [part.strip() for part in text.split(",")]
    return text


def _typed(kind: Any, value: object) -> object | None:
    """Return `value` as a `kind`, or None if it has another type."""
    if kind is Bytes:
        return parse_size(value)
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


def parse_size(value: object) -> Bytes | None:
    """Return the bytes of a number, or of a text such as 4MB or 1GiB; None: not a size."""
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
        return all(each if setting.about.may_be_blank else each.strip() for each in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return setting.about.minimum <= value <= setting.about.maximum
    return value != ""


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    engine = settings.engine
    sizes = {name: getattr(settings.cache, name) for name in ("cache_ram", "cache_disk")}
    sizes["fit_target"] = settings.placement.fit_target
    for name, n_bytes in sizes.items():
        if n_bytes and n_bytes < MIB:
            # A plain number of `cache_disk` counts bytes: 8192 would silently become 8 KiB.
            raise StartupError(
                f"{name} must be 0 or at least 1MiB, but {sources[name]} is {n_bytes} bytes."
                " Write a size with its unit, such as 512MiB or 8GiB."
            )

    def told(name: str) -> str:
        return f"{getattr(engine, name)} ({sources[name]})"

    for name in ("ubatch_size", "parallel"):
        if getattr(engine, name) > engine.batch_size:
            raise StartupError(
                f"{name} must not exceed batch_size, but it is {told(name)}"
                f" and batch_size is {told('batch_size')}."
            )
    if engine.cache_type_v.quantised and engine.flash_attn is FlashAttn.OFF:
        raise StartupError(
            f"cache_type_v {engine.cache_type_v.value} ({sources['cache_type_v']}) needs flash"
            f" attention, but flash_attn is off ({sources['flash_attn']})."
        )
    if settings.model.alias is not None and "," in settings.model.alias:
        raise StartupError(
            f"alias must be one name, but {sources['alias']} is {settings.model.alias!r}. A server"
            " of one model answers to every name."
        )
    kwargs = settings.chat.chat_template_kwargs
    if kwargs is not None and not _is_object(kwargs):
        raise StartupError(
            f"chat_template_kwargs must be a JSON object, but {sources['chat_template_kwargs']} is"
            f" {kwargs!r}."
        )
    check_placement(settings.placement)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
