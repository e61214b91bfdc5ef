"""The table of llama-server's flags names every one of them, and says what the docs say."""

import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from rekindle.config.llama_server.flag import FlagFate, LlamaFlag
from rekindle.config.llama_server.table import LLAMA_FLAGS
from rekindle.config.settings import all_settings
from rekindle.config.sources import resolve
from rekindle.errors import StartupError
from tests.support.llama_cpp_flags import flags_in, kept_flags

BY_NAME = {name: flag for flag in LLAMA_FLAGS for name in flag.all_names}
SETTINGS = {setting.name: setting for setting in all_settings()}
PAGE = Path(__file__).parents[2] / "docs" / "from-llama-server.md"
HELP = {"-h", "--help"}  # every command has them
OTHERS_VARIABLES = {"HF_TOKEN", "MTMD_BACKEND_DEVICE"}  # not llama-server's own
OLDER = {"--mmap", "--no-mmap", "--mlock"}  # names that llama.cpp had before --load-mode


def test_every_flag_of_llama_server_is_in_the_table_once() -> None:
    names = [name for flag in LLAMA_FLAGS for name in flag.all_names]
    assert len(names) == len(set(names))
    theirs = {name for line in kept_flags() for name in (*line.names, *line.off_names)}
    assert theirs - HELP == set(names) - OLDER


def test_flags_without_effect_take_as_many_values_as_in_llama_server() -> None:
    wrong = [
        name
        for line in kept_flags()
        for name in (*line.names, *line.off_names)
        if (flag := BY_NAME.get(name))
        and flag.fate is FlagFate.NO_EFFECT
        and flag.n_values != line.n_values
    ]
    assert not wrong


def test_the_opposites_of_switches_are_those_of_llama_server() -> None:
    wrong = [
        name
        for line in kept_flags()
        for name in line.off_names
        if (flag := BY_NAME[name]).fate is FlagFate.SETTING and name not in flag.off_names
    ]
    assert not wrong


def test_every_variable_of_llama_server_is_in_the_table() -> None:
    theirs = {line.names[0]: line.variable for line in kept_flags() if line.variable}
    ours = {name: BY_NAME[name].variable for name in theirs}
    assert ours == {
        name: None if variable in OTHERS_VARIABLES else variable
        for name, variable in theirs.items()
    }


def test_every_flag_that_is_a_setting_names_one() -> None:
    named = {flag.setting for flag in LLAMA_FLAGS if flag.fate is FlagFate.SETTING}
    assert named <= set(SETTINGS)


def shown(flag: LlamaFlag) -> str:
    """The row of the docs."""
    names = ", ".join(f"`{name}`" for name in flag.all_names)
    if flag.fate is FlagFate.SETTING:
        value = f", `{flag.fixed}`" if flag.fixed else ""
        fate = f"`{flag.setting}`{value}"
    elif flag.fate is FlagFate.NO_EFFECT:
        fate = f"no effect: {flag.note}"
    else:
        accepted = " or ".join(f"`{each}`" for each in flag.accepted)
        fate = f"refused{f', except {accepted}' if accepted else ''}. {flag.note}"
    return f"| {names} | {f'`{flag.variable}`' if flag.variable else ''} | {fate} |"


def test_the_docs_have_the_same_table() -> None:
    documented = re.findall(r"^\| `-.*\|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert documented == [shown(flag) for flag in LLAMA_FLAGS]


def test_variables_of_llama_server_are_the_last_source() -> None:
    environment = {
        "LLAMA_ARG_CTX_SIZE": "1",
        "LLAMA_ARG_BATCH": "2000",
        "LLAMA_ARG_UBATCH": "3",
        "LLAMA_ARG_N_PARALLEL": "5",
        "LLAMA_ARG_CACHE_RAM": "512",
        "LLAMA_ARG_NO_CACHE_PROMPT": "1",
        "LLAMA_ARG_HF_REPO": "owner/repo:q8_0",
        "REKINDLE_BATCH_SIZE": "300",
    }
    resolved = resolve({"ctx_size": "9"}, environment, {"engine": {"ubatch_size": 8}})
    engine, cache = resolved.settings.engine, resolved.settings.cache
    assert (engine.ctx_size, engine.batch_size, engine.ubatch_size, engine.parallel) == (
        9,
        300,
        8,
        5,
    )
    assert resolved.sources["parallel"] == "LLAMA_ARG_N_PARALLEL"
    assert (cache.cache_ram, cache.cache_prompt) == (512 * 2**20, False)
    assert resolved.settings.model.model == "hf:owner/repo:q8_0"


def test_a_variable_without_effect_is_told_and_one_that_cannot_be_is_refused() -> None:
    assert list(resolve({}, {"LLAMA_ARG_JINJA": "1"}, {}).unused) == ["LLAMA_ARG_JINJA"]
    assert not resolve({}, {"LLAMA_ARG_OFFLINE": "0"}, {}).unused
    with pytest.raises(StartupError) as caught:
        resolve({}, {"LLAMA_ARG_OFFLINE": "1"}, {})
    assert caught.value.message == (
        "LLAMA_ARG_OFFLINE cannot be used here. Set the variable HF_HUB_OFFLINE=1."
    )


@pytest.mark.long
def test_the_list_of_flags_is_that_of_the_llama_cpp_in_use(tmp_path: Path) -> None:
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    fetched = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"),
            *("-d", str(tmp_path), package),
        ],
        capture_output=True,
        text=True,
    )
    archives = list(tmp_path.glob("*.tar.gz"))
    if fetched.returncode and not archives:
        pytest.skip(f"pip cannot fetch the source of {package}")
    with tarfile.open(archives[0]) as archive:
        [member] = [
            each for each in archive.getmembers() if each.name.endswith("llama.cpp/common/arg.cpp")
        ]
        source = archive.extractfile(member)
        assert source is not None
        found = flags_in(source.read().decode())
    assert [line.text for line in found] == [line.text for line in kept_flags()]
