"""How a flag of llama-server is declared: a setting of ours, no effect, or refused."""

from dataclasses import dataclass
from enum import Enum, auto

from rekindle.errors import StartupError


class FlagFate(Enum):
    SETTING = auto()
    NO_EFFECT = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFlag:
    """One line of llama-server's help."""

    fate: FlagFate
    names: tuple[str, ...]
    off_names: tuple[str, ...] = ()  # of a switch: they turn it off
    variable: str | None = None
    setting: str = ""  # name of ours
    fixed: str | None = None  # value of the setting; the flag takes none
    bare: str | None = None  # value of the setting if the flag is given without one
    note: str = ""  # why there is no effect, or what to use instead
    n_values: int = 0  # that follow the flag; of a flag without effect
    accepted: tuple[str, ...] = ()  # values of a refused flag that ask for what is done anyway

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names + self.off_names

    @property
    def off_variable(self) -> str | None:
        """llama.cpp's variable that turns a switch off, with any value."""
        if self.variable is None or not self.off_names:
            return None
        return self.variable.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")

    @property
    def is_renamed(self) -> bool:
        """Whether the flag is just another name of a setting's own flag."""
        is_setting = self.fate is FlagFate.SETTING
        return is_setting and self.setting != "model" and self.fixed is self.bare is None


def ours(
    setting: str,
    names: str,
    variable: str | None = None,
    *,
    fixed: str | None = None,
    bare: str | None = None,
) -> LlamaFlag:
    """Declare other names of a setting. After a `/` come those that turn it off."""
    on, _, off = names.partition(" / ")
    return LlamaFlag(
        fate=FlagFate.SETTING,
        names=tuple(on.split()),
        off_names=tuple(off.split()),
        variable=variable,
        setting=setting,
        fixed=fixed,
        bare=bare,
    )


def no_effect(names: str, n_values: int, because: str, variable: str | None = None) -> LlamaFlag:
    """Declare flags that are accepted. `because` completes "It has no effect: ..."."""
    on, _, off = names.partition(" / ")
    return LlamaFlag(
        fate=FlagFate.NO_EFFECT,
        names=tuple(on.split()),
        off_names=tuple(off.split()),
        variable=variable,
        note=because,
        n_values=n_values,
    )


def refused(
    names: str, instead: str, variable: str | None = None, *, accepted: str = ""
) -> LlamaFlag:
    """Declare flags that end the start. `instead`: sentences that say what to do."""
    return LlamaFlag(
        fate=FlagFate.REFUSED,
        names=tuple(names.split()),
        variable=variable,
        note=instead,
        accepted=tuple(accepted.split()),
    )


def hub_model(repository: str | None, file: str | None) -> str | None:
    """Return MODEL for `--hf-repo owner/repo[:quant]` and `--hf-file`; None: neither is given."""
    if repository is None:
        if file is not None:
            raise StartupError("--hf-file requires --hf-repo.")
        return None
    if file is None:
        return f"hf:{repository}"
    return f"hf:{repository.partition(':')[0]}/{file}"
