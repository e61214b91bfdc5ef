"""Values from llama-server's environment variables, for settings without any other source."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.config.llama_server.flag import FlagFate, LlamaFlag, hub_model
from rekindle.config.llama_server.table import LLAMA_FLAGS
from rekindle.errors import StartupError

_OFF = frozenset({"0", "off", "false", "disabled"})  # as llama.cpp reads a switch


@dataclass(frozen=True, slots=True)
class Given:
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class LlamaVariables:
    given: dict[str, Given] = field(default_factory=dict)  # by setting
    unused: dict[str, str] = field(default_factory=dict)  # by variable: why it has no effect


def read_variables(environment: Mapping[str, str]) -> LlamaVariables:
    """Return what LLAMA_ARG_ variables say. Raises StartupError for what cannot be done."""
    read = LlamaVariables()
    for flag in LLAMA_FLAGS:
        if flag.off_variable and flag.off_variable in environment:
            _take(read, flag, Given(flag.off_variable, "0"))
        elif flag.variable and flag.variable in environment:
            _take(read, flag, Given(flag.variable, environment[flag.variable]))
    if found := hub_model(
        environment.get("LLAMA_ARG_HF_REPO"), environment.get("LLAMA_ARG_HF_FILE")
    ):
        source = "LLAMA_ARG_HF_REPO"
        if "LLAMA_ARG_MODEL" in environment:
            raise StartupError(f"LLAMA_ARG_MODEL and {source} contradict each other.")
        read.given["model"] = Given(source, found)
    return read


def _take(read: LlamaVariables, flag: LlamaFlag, given: Given) -> None:
    if flag.fate is FlagFate.NO_EFFECT:
        read.unused[given.source] = flag.note
    elif flag.fate is FlagFate.REFUSED:
        if given.text.lower() not in _OFF.union(flag.accepted):
            raise StartupError(f"{given.source} cannot be used here. {flag.note}".strip())
    else:
        read.given[flag.setting] = given
