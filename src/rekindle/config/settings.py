"""All settings together.

Each field is one flag (`--ctx-size`), one environment variable (`REKINDLE_CTX_SIZE`) and one
key of the TOML file (`ctx_size` under `[engine]`). `config/sources.py` reads their values.
"""

# ruff: noqa: RUF009 - the defaults are frozen.

import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from rekindle.config.cache import CacheSettings
from rekindle.config.declare import About, Bytes
from rekindle.config.engine import EngineSettings
from rekindle.config.llama_server.table import LLAMA_FLAGS
from rekindle.config.model import ChatSettings, ModelSettings
from rekindle.config.placement import PlacementSettings
from rekindle.config.sampling import SamplingSettings
from rekindle.config.server import ServerSettings

CONFIG_VARIABLE = "REKINDLE_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: ModelSettings = ModelSettings()
    chat: ChatSettings = ChatSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    placement: PlacementSettings = PlacementSettings()
    cache: CacheSettings = CacheSettings()
    server: ServerSettings = ServerSettings()
    by_model: Mapping[str, "Settings"] = field(default_factory=dict)  # of models with their own

    def of(self, model: str) -> "Settings":
        """Return the settings of one model, by its name in the APIs."""
        return self.by_model.get(model, self)


SECTIONS: dict[str, type[Any]] = {
    each.name: type(each.default) for each in fields(Settings) if each.name != "by_model"
}
COMMON_SECTIONS = ("cache", "server")  # all models share them


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
    def flags(self) -> tuple[str, ...]:
        """Its flag, and llama-server's names of it. The opposites of a switch are not included."""
        llama = (
            name
            for each in LLAMA_FLAGS
            if each.is_renamed and each.setting == self.name
            for name in each.names
        )
        return tuple(dict.fromkeys((self.flag, *llama)))

    @property
    def off_flags(self) -> tuple[str, ...]:
        """The flags that turn a switch off."""
        llama = (
            name for each in LLAMA_FLAGS if each.setting == self.name for name in each.off_names
        )
        return tuple(dict.fromkeys((self.flag.replace("--", "--no-", 1), *llama)))

    @property
    def is_per_model(self) -> bool:
        """Whether `[models."name"]` may replace it."""
        return self.section not in COMMON_SECTIONS and self.about.per_model

    @property
    def variable(self) -> str:
        return "REKINDLE_" + self.name.upper()

    @property
    def allowed(self) -> str:
        low, high = f"{self.about.minimum:.16g}", f"{self.about.maximum:.16g}"
        if self.type is Bytes:
            plain = "1048576" if self.about.unit == 1 else "512 (MiB)"
            return f"a size such as {plain}, 4MB or 1GiB, from {low} to {high} bytes"
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
