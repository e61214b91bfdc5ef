"""Command lines of llama-server, in the words of `rekindle serve`."""

from pathlib import Path

import pytest
import typer
from typer.core import TyperOption

from rekindle.cli import app
from rekindle.cli.llama_args import Translated, translate
from rekindle.config.llama_server.table import LLAMA_FLAGS
from rekindle.errors import StartupError
from tests.cli.test_cli import rekindle
from tests.support.llama_cpp_flags import kept_flags

SERVE = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
TAKES_VALUE = {
    name: isinstance(each, TyperOption) and not each.is_flag
    for each in SERVE.params
    for name in (*each.opts, *each.secondary_opts)
}


def translated(*arguments: str) -> Translated:
    return translate(arguments, TAKES_VALUE)


def refusal(*arguments: str) -> str:
    with pytest.raises(StartupError) as caught:
        translated(*arguments)
    return caught.value.message


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("-m a.gguf -c 4", "-c 4 -- a.gguf"),
        ("--model=a.gguf", "-- a.gguf"),
        ("a.gguf -c 4", "-c 4 -- a.gguf"),
        ("-hf owner/repo:Q8_0", "-- hf:owner/repo:Q8_0"),
        ("--hf-file x.gguf --hf-repo owner/repo:Q8_0", "-- hf:owner/repo/x.gguf"),
        ("-fa", "--flash-attn on"),
        ("-fa -c 4", "--flash-attn on -c 4"),
        ("-fa off", "--flash-attn off"),
        ("-fa 1", "--flash-attn 1"),
        ("--flash-attn=auto", "--flash-attn auto"),
        ("-fa a.gguf", "--flash-attn on -- a.gguf"),
        ("-v", "--log-level debug"),
        ("--log-disable", "--log-level error"),
        ("--ctx_size 4", "--ctx-size 4"),
        ("--ctx-size=4", "--ctx-size 4"),
        ("--cont-batching -to 600 --spec-type none", ""),
        ("--control-vector-layer-range", None),
        ("--reasoning-format deepseek --reasoning auto", "--reasoning auto"),
        ("--volatile -m -c 4", "--volatile -m -c 4"),
        ("-ngl 99 -ctk q8_0", "-ngl 99 -ctk q8_0"),
    ],
)
def test_flags_of_llama_server_become_ours(given: str, ours: str | None) -> None:
    if ours is None:
        assert refusal(*given.split()).startswith(given)
    else:
        assert " ".join(translated(*given.split()).arguments) == ours


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "--context-shift",
            "--context-shift cannot be used here. Use --overflow trim, which drops",
        ),
        ("--models-preset x.ini", '--models-preset cannot be used here. Write [models."NAME"]'),
        ("-mu http://x", "-mu cannot be used here. Download the file"),
        ("--reasoning-format none", "--reasoning-format cannot be used here. Reasoning is always"),
        ("--ssl-key-file k", "--ssl-key-file cannot be used here. Use a reverse proxy"),
        ("-m a b", "The model is given more than once: a and b."),
        ("-m a -hf o/r", "The model is given more than once: a and hf:o/r."),
        ("--hf-file x", "--hf-file requires --hf-repo."),
        ("-m", "-m needs a value."),
    ],
)
def test_what_cannot_be_done_names_the_flag_and_what_to_do(given: str, sentence: str) -> None:
    assert refusal(*given.split()).startswith(sentence)


def test_every_flag_is_understood_or_refused_by_its_name() -> None:
    """Whatever is left for Click are options that it has, with their values."""
    known = {name for flag in LLAMA_FLAGS for name in flag.all_names} - {"-hff", "--hf-file"}
    for line in kept_flags():
        for name in known.intersection((*line.names, *line.off_names)):
            values = ["7"] * line.n_values
            try:
                arguments, unused = translated(name, *values)
            except StartupError as error:
                arguments, unused = [], {}
                refused = error.message
            else:
                refused = ""
            if refused:
                assert refused.startswith(f"{name} ")
            elif "--" in arguments:
                assert arguments[-1].endswith("7")
            elif not unused:
                assert arguments[0] in TAKES_VALUE
                assert len(arguments) == 1 + TAKES_VALUE[arguments[0]]
            else:
                assert (list(unused), arguments) == ([name], [])


def test_flags_without_effect_are_told_in_one_line() -> None:
    done = rekindle("serve", "--jinja", "-cb", "-to", "600", "--print-config")
    assert done.returncode == 0
    assert done.stderr == (
        "rekindle: no effect here: --jinja (templates are always Jinja), -cb (requests are always"
        " batched), -to (replies have no time limit; --receive-timeout is for slow requests).\n"
    )


def test_a_refused_flag_is_one_line_and_exit_code_2() -> None:
    done = rekindle("serve", "--offline")
    assert (done.returncode, done.stderr) == (
        2,
        "rekindle: --offline cannot be used here. Set the variable HF_HUB_OFFLINE=1.\n",
    )


def test_print_config_shows_the_settings_of_one_model(tmp_path: Path) -> None:
    file = tmp_path / "rekindle.toml"
    file.write_text('[models."a.b"]\nctx_size = 99\nflash_attn = "on"\n')
    done = rekindle("serve", "-c", "7", "--config", str(file), "--print-config")
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in done.stdout.splitlines()]
    assert ["engine.ctx_size", "7", "--ctx-size"] in rows
    source = "in the configuration file"
    assert ['models."a.b".ctx_size', "99", f'models."a.b".ctx_size {source}'] in rows
    assert ['models."a.b".flash_attn', "on", f'models."a.b".flash_attn {source}'] in rows


def test_print_config_shows_where_values_of_llama_server_come_from() -> None:
    done = rekindle(
        *("serve", "-m", "x.gguf", "-c", "2048", "-np", "2", "-ngl", "all", "-fa", "on"),
        *("-ctk", "q8_0", "-cram", "512", "-n", "64", "--temp", "0.2", "-lv", "4"),
        *("--api-key", "a,b", "-tb", "3", "--print-config"),
        LLAMA_ARG_UBATCH="77",
        LLAMA_ARG_PORT="1234",
    )
    rows = {
        cells[1].strip(): (cells[2].strip(), cells[3].strip())
        for line in done.stdout.splitlines()
        if len(cells := line.split("|")) == 5
    }
    assert rows["model.model"] == ("x.gguf", "MODEL")
    assert rows["engine.ctx_size"] == ("2048", "--ctx-size")
    assert rows["engine.parallel"] == ("2", "--parallel")
    assert rows["engine.gpu_layers"] == ("-1", "--gpu-layers")
    assert rows["engine.flash_attn"] == ("on", "--flash-attn")
    assert rows["engine.cache_type_k"] == ("q8_0", "--cache-type-k")
    assert rows["engine.threads_batch"] == ("3", "--threads-batch")
    assert rows["cache.cache_ram"] == (str(512 * 2**20), "--cache-ram")
    assert rows["sampling.n_predict"] == ("64", "--n-predict")
    assert rows["sampling.temperature"] == ("0.2", "--temperature")
    assert rows["server.log_level"] == ("debug", "--log-level")
    assert rows["server.api_key"] == ("****, ****", "--api-key")
    assert rows["engine.ubatch_size"] == ("77", "LLAMA_ARG_UBATCH")
    assert rows["server.port"] == ("1234", "LLAMA_ARG_PORT")
