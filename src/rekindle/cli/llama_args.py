"""Arguments of llama-server on the command line of `rekindle serve`.

Click knows the flags that are only other names of ours. This module takes all others: flags with
values that mean something else here, flags without effect, and flags that are refused.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperOption

from rekindle.cli.plain import printable
from rekindle.config.llama_server.flag import FlagFate, LlamaFlag, hub_model
from rekindle.config.llama_server.table import LLAMA_FLAGS
from rekindle.config.settings import Setting, all_settings
from rekindle.errors import StartupError

_BY_NAME = {name: flag for flag in LLAMA_FLAGS for name in flag.all_names}
_HF_REPO, _HF_FILE = _BY_NAME["--hf-repo"], _BY_NAME["--hf-file"]


class Translated(NamedTuple):
    arguments: list[str]  # for Click
    unused: dict[str, str]  # by flag: why it has no effect


class ServeCommand(TyperCommand):
    """`rekindle serve`, which takes a command line of llama-server."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Typer hides its type
        if not ctx.resilient_parsing:  # as for shell completion
            takes_value = {
                name: isinstance(each, TyperOption) and not each.is_flag
                for each in self.params
                for name in (*each.opts, *each.secondary_opts)
            }
            args, unused = translate(args, takes_value)
            tell_unused(unused)
        return super().parse_args(ctx, args)


def tell_unused(unused: Mapping[str, str]) -> None:
    """Print one line about flags and variables without effect."""
    if unused:
        shown = ", ".join(f"{name} ({because})" for name, because in unused.items())
        sys.stderr.write(f"rekindle: no effect here: {printable(shown)}.\n")


def translate(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> Translated:
    """Return the arguments in our words. Raises StartupError for a flag that is refused.

    `takes_value` has every option that Click knows.
    """
    return _Translation(takes_value).of(arguments)


class _Translation:
    def __init__(self, takes_value: Mapping[str, bool]) -> None:
        self._takes_value = takes_value
        self._settings = {setting.name: setting for setting in all_settings()}
        self._out: list[str] = []
        self._unused: dict[str, str] = {}
        self._models: list[str] = []
        self._hub: dict[str, str] = {}  # --hf-repo and --hf-file

    def of(self, arguments: Sequence[str]) -> Translated:
        waiting = _Remaining(arguments)
        for argument in waiting:
            if argument == "--":
                self._models += waiting
            elif argument.startswith("-") and argument != "-":
                self._take(argument, waiting)
            else:
                self._models.append(argument)
        if model := hub_model(self._hub.get("repo"), self._hub.get("file")):
            self._models.append(model)
        if len(self._models) > 1:
            raise StartupError(
                f"The model is given more than once: {' and '.join(self._models)}."
                " Give others with --models."
            )
        return Translated(
            [*self._out, *(["--", *self._models] if self._models else [])], self._unused
        )

    def _take(self, argument: str, waiting: "_Remaining") -> None:
        name, equals, value = argument, "", ""
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            if name not in self._takes_value:
                name = name.replace("_", "-")  # as llama.cpp reads it
        if equals:
            waiting.put_back(value)
        flag = _BY_NAME.get(name)
        if flag is None or (name in self._takes_value and flag.is_renamed):
            self._out.append(name)
            if equals or self._takes_value.get(name):
                self._out += waiting.take(1)
        elif flag.fate is FlagFate.NO_EFFECT:
            waiting.take(flag.n_values)
            self._unused[name] = flag.note
        elif flag.fate is FlagFate.REFUSED:
            if not (flag.accepted and waiting.take_if(flag.accepted)):
                raise StartupError(f"{name} cannot be used here. {flag.note}")
        elif flag.setting == "model":
            self._take_model(flag, name, waiting)
        else:
            self._set(self._settings[flag.setting], flag, waiting)

    def _take_model(self, flag: LlamaFlag, name: str, waiting: "_Remaining") -> None:
        [value] = waiting.take(1) or [""]
        if not value:
            raise StartupError(f"{name} needs a value.")
        if flag is _HF_REPO:
            self._hub["repo"] = value
        elif flag is _HF_FILE:
            self._hub["file"] = value
        else:
            self._models.append(value)

    def _set(self, setting: Setting, flag: LlamaFlag, waiting: "_Remaining") -> None:
        """Set a value that the flag has itself, or that may follow it."""
        value = flag.fixed
        if value is None:
            value = waiting.take_if(_texts_of(setting)) or flag.bare
        assert value is not None
        self._out += [setting.flag, value]


class _Remaining:
    """The arguments that are not read yet."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._left = list(reversed(arguments))

    def __iter__(self) -> Iterator[str]:
        while self._left:
            yield self._left.pop()

    def put_back(self, argument: str) -> None:
        self._left.append(argument)

    def take(self, count: int) -> list[str]:
        return [self._left.pop() for _ in range(min(count, len(self._left)))]

    def take_if(self, texts: Sequence[str]) -> str | None:
        """Return the next argument if it is one of `texts`."""
        if self._left and self._left[-1].lower() in texts:
            return self._left.pop()
        return None


def _texts_of(setting: Setting) -> list[str]:
    """Return every text that a setting with a few values may have."""
    assert issubclass(setting.type, Enum)
    return [*(member.value for member in setting.type), *setting.about.words]
