"""The flags of llama-server: read from llama.cpp's source, and the list kept in this repository."""

import re
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).parents[1] / "config" / "llama_server_flags.txt"
NO_ENVIRONMENT = "-"


@dataclass(frozen=True)
class HelpLine:
    """One option of llama-server's help."""

    names: tuple[str, ...]
    off_names: tuple[str, ...]
    n_values: int
    variable: str | None

    @property
    def text(self) -> str:
        names = " ".join(self.names) + (" / " + " ".join(self.off_names) if self.off_names else "")
        return f"{names} | {self.n_values} | {self.variable or NO_ENVIRONMENT}"


def kept_flags() -> list[HelpLine]:
    lines = LIST.read_text("utf-8").splitlines()
    return [_line_of(line) for line in lines if not line.startswith("#")]


def flags_in(source: str) -> list[HelpLine]:
    """Read `common/arg.cpp`: the options that its server has."""
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    groups: dict[str, str] = dict(re.findall(r"(\w+_examples)\s*=\s*\{([^}]*)\}", source))
    found: dict[str, HelpLine] = {}
    for option in re.split(r"\badd_opt\(common_arg\(", source)[1:]:
        examples = re.search(r"set_examples\(([^)]*)\)", option)
        where = str(examples[1]).strip() if examples else "COMMON"
        where = groups.get(where, where)
        if "COMMON" not in where and "SERVER" not in where:
            continue
        names, off_names = _names(option)
        variable = re.search(r'set_env\("([^"]+)"\)', option)
        line = HelpLine(names, off_names, _n_values(option), variable[1] if variable else None)
        found[line.text] = line  # one option is declared twice, for different programs
    return list(found.values())


def _names(option: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    head = re.match(r"\s*\{([^}]*)\}(?:\s*,\s*\{([^}]*)\})?", option)
    assert head is not None, option[:80]
    on, off = (tuple(re.findall(r'"([^"]+)"', part or "")) for part in head.groups())
    return on, off


def _n_values(option: str) -> int:
    """Count the arguments of the option's function beside the parameters that it fills in."""
    function = re.search(r"\[[^\]]*\]\(common_params\s*&[^,)]*((?:,[^)]*)?)\)", option)
    assert function is not None, option[:80]
    arguments = [part for part in function[1].split(",") if part.strip()]
    return 0 if any("bool" in part for part in arguments) else len(arguments)


def _line_of(text: str) -> HelpLine:
    names, n_values, variable = text.split(" | ")
    on, _, off = names.partition(" / ")
    return HelpLine(
        tuple(on.split()),
        tuple(off.split()),
        int(n_values),
        None if variable == NO_ENVIRONMENT else variable,
    )
