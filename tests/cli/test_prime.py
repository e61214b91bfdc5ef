"""`rekindle prime` against the app on fakes, behind a real socket."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rekindle.chat.reply.events import FinishReason
from rekindle.cli import app
from rekindle.cli.prime import changes_of
from rekindle.config.settings import all_settings
from rekindle.errors import DecodeFailed, StartupError
from rekindle.priming.stream import PrefillUpdate, Primed, outcome_of
from tests.api.client import serving
from tests.api.fakes import FakeResponder, Script, api_settings, done

PRIMED: Script = (done(0, finish=FinishReason.LENGTH, n_prompt=10, n_cached=4),)


def prime(*arguments: object, **variables: str) -> Result:
    cleared = {name: None for name in os.environ if name.startswith("REKINDLE_")}
    return CliRunner().invoke(
        app, ["prime", *map(str, arguments)], env={**cleared, "COLUMNS": "200", **variables}
    )


def refusal(*arguments: object, **variables: str) -> str:
    error = prime(*arguments, **variables).exception
    assert isinstance(error, StartupError), error
    return error.message


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    file = tmp_path / "agent.json"
    file.write_text(json.dumps({"system": "Be brief.", "tools": [{"name": "find"}]}))
    return file


def test_a_file_is_one_engine_call_with_the_system_prompt_first_and_its_tools(
    agent: Path,
) -> None:
    responder = FakeResponder(PRIMED)
    with serving(responder) as url:
        shown = prime(agent, "--url", f"{url}/v1/")
    assert shown.exit_code == 0, shown.output
    [started], [conversation] = responder.started, responder.conversations
    assert started.options.max_tokens == 0
    assert conversation.messages[0].text == "Be brief."
    assert [tool.name for tool in conversation.tools] == ["find"]


def test_each_file_has_a_line_and_a_row_with_its_account(tmp_path: Path, agent: Path) -> None:
    log = tmp_path / "log[b].jsonl"
    log.write_text('{"prompt": "Once"}\n{"prompt": "Twice"}\n')
    with serving(FakeResponder(PRIMED)) as url:
        shown = prime(agent, log, "--url", url).output
    assert f"{agent}: 10 tokens, 4 cached, 6 computed, " in shown
    assert f"{log}: 20 tokens in 2 requests, 8 cached, 12 computed, " in shown
    rows = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines()]
    assert [row[1:6] for row in rows if len(row) == 9] == [
        ["file", "requests", "tokens", "cached", "computed"],
        [str(agent), "1", "10", "4", "6"],
        [str(log), "2", "20", "8", "12"],
    ]


def test_an_error_names_its_file_and_the_others_are_primed(tmp_path: Path, agent: Path) -> None:
    broken, missing = tmp_path / "broken.json", tmp_path / "missing.md"
    broken.write_text("{")
    refused = tmp_path / "refused.json"
    refused.write_text('{"messages": []}')
    scripts: list[Script] = [(done(0), DecodeFailed("llama.cpp gave up.")), PRIMED]
    responder = FakeResponder(lambda i: scripts[i])
    with serving(responder) as url:
        shown = prime(broken, agent, missing, refused, agent, "--url", url)
    assert shown.exit_code == 1
    assert f"{broken}:1: not valid JSON" in shown.output
    assert f"{agent}: llama.cpp gave up." in shown.output
    assert f"{missing} cannot be read: No such file or directory." in shown.output
    assert f"{refused}: `messages`" in shown.output
    assert f"{agent}: 10 tokens" in shown.output


def test_files_that_cannot_be_read_are_one_error_and_no_table(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.md", tmp_path / "empty.json"
    empty.write_text("{")
    assert refusal(missing) == f"{missing} cannot be read: No such file or directory."
    assert prime(missing).output == ""
    told = refusal(missing, empty, "--url", "http://127.0.0.1:9")
    assert told.startswith(f"{missing} cannot be read")
    assert f"{empty}:1: not valid JSON" in told


def test_a_server_that_is_not_there_is_an_error(agent: Path) -> None:
    shown = prime(agent, "--url", "http://127.0.0.1:9")
    assert shown.exit_code == 1
    assert f"{agent}: http://127.0.0.1:9 cannot be reached" in shown.output


def test_the_key_is_sent(agent: Path) -> None:
    with serving(FakeResponder(PRIMED), api_settings(api_keys=("secret",))) as url:
        assert prime(agent, "--url", url, "--api-key", "secret").exit_code == 0
        assert prime(agent, "--url", url).exit_code == 1


def test_the_model_and_the_wait_for_the_disk_are_the_callers_choice() -> None:
    body: dict[str, object] = {"model": "claude", "persist": True}
    assert body | changes_of(None, persist=True) == body
    assert body | changes_of("mine", persist=False) == {"model": "mine", "persist": False}


def test_progress_is_told_as_it_comes() -> None:
    progress = {"total": 9, "cache": 1, "processed": 5, "time_ms": 3}
    account = {"cached": [{"tier": "live", "tokens": 1}], "prefilled": 8}
    lines = [
        ": keep-alive",
        f"data: {json.dumps({'choices': [], 'prompt_progress': progress})}",
        f"data: {json.dumps({'choices': [], 'rekindle': account})}",
        "data: [DONE]",
    ]
    told: list[PrefillUpdate] = []
    assert outcome_of(lines, told.append) == Primed(n_cached=1, n_computed=8)
    assert told == [PrefillUpdate(n_done=5, n_tokens=9)]


@pytest.mark.parametrize(
    "off",
    [
        lambda file: refusal(file, "--no-cache-disk"),
        lambda file: refusal(file, "--cache-disk", "0"),
        lambda file: refusal(file, REKINDLE_CACHE_DISK="0"),
    ],
)
def test_without_a_url_and_a_disk_there_is_nowhere_to_prime_to(
    agent: Path, off: Callable[[Path], str]
) -> None:
    assert off(agent) == (
        "Without --url, prompts are stored in the disk cache, but cache_disk is 0."
    )


@pytest.mark.parametrize(
    "flags", [("--cache-dir", "/x"), ("--no-rewarm",), ("--no-cache-disk",), ("--config", "/x")]
)
def test_flags_about_a_model_of_our_own_are_refused_with_a_url(
    agent: Path, flags: tuple[str, ...]
) -> None:
    told = refusal(agent, "--url", "http://127.0.0.1:9", *flags)
    assert told.endswith(" cannot be used with --url: that server has its own model.")


def test_not_to_persist_needs_a_url(agent: Path) -> None:
    assert refusal(agent, "--no-persist").startswith("--no-persist requires --url")


def test_what_decides_about_stored_state_can_be_said_as_for_serve() -> None:
    shown = prime("--help").output
    sections = {"model", "chat", "engine", "cache"}
    missing = [
        setting.name
        for setting in all_settings()
        if setting.section in sections and setting.name not in ("model", "warm")
        if setting.flag not in shown or setting.variable not in shown
    ]
    assert not missing
    assert "--port" not in shown
