"""All settings together.

Each field is one flag (`--ctx-size`), one environment variable (`REKINDLE_CTX_SIZE`) and one
key of the TOML file (`ctx_size` under `[engine]`). `config/sources.py` reads their values.
"""

# ruff: noqa: RUF009 - the defaults are frozen.

import types
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import About, Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.model import ChatSettings, ModelSettings
from rekindle.config.placement import PlacementSettings
from rekindle.config.server import ServerSettings

CONFIG_VARIABLE = "REKINDLE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: ModelSettings = ModelSettings()
    chat: ChatSettings = ChatSettings()
    engine: EngineSettings = EngineSettings()
    placement: PlacementSettings = PlacementSettings()
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
