import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rekindle.cli import OLLAMA_COMMANDS, app
from rekindle.cli.chat import (
    ChatClient,
    ChatEvent,
    Failed,
    ReasoningPiece,
    ReplyEnd,
    TextPiece,
    draw,
    summary,
    talk,
)
from rekindle.cli.serve import bind
from rekindle.config.server import ServerSettings
from rekindle.config.settings import all_settings
from rekindle.errors import StartupError
from rekindle.priming.stream import PrefillUpdate
from tests.support.server_process import free_port


def rekindle(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "REKINDLE_" not in name}
    return subprocess.run(
        [sys.executable, "-c", "from rekindle.cli import main; main()", *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
    )


def test_a_startup_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = rekindle("serve", "--config", str(tmp_path / "no.toml"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"rekindle: The configuration file {tmp_path / 'no.toml'} cannot be read:"
        " No such file or directory.\n"
    )


def test_with_strict_a_cache_that_others_can_write_ends_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = rekindle("serve", "--strict", "--cache-dir", str(tmp_path), "--port", str(free_port()))
    assert done.returncode == 2
    assert done.stderr.endswith(
        "rekindle: The cache directory is not private: Other users can write to"
        f" {tmp_path} (mode 0777). Run: chmod 700 {tmp_path}\n"
    )


def test_help_imports_neither_the_engine_nor_the_web_framework() -> None:
    script = (
        "import sys, rekindle.cli\n"
        "heavy = {'llama_cpp', 'fastapi', 'uvicorn', 'httpx', 'huggingface_hub', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_print_config_tells_each_value_and_its_source_and_hides_keys(tmp_path: Path) -> None:
    file = tmp_path / "rekindle.toml"
    file.write_text('[engine]\nparallel = 2\nflash_attn = "on"\n[server]\ncors = ["[x]"]\n')
    done = rekindle(
        "serve",
        "model.gguf",
        "-c",
        "4096",
        "--no-swa-full",
        "--print-config",
        REKINDLE_CONFIG=str(file),
        REKINDLE_API_KEY="secret,other",
        REKINDLE_PARALLEL="3",
    )
    assert done.returncode == 0
    assert "secret" not in done.stdout
    rows = {
        cells[1].strip(): (cells[2].strip(), cells[3].strip())
        for line in done.stdout.splitlines()
        if len(cells := line.split("|")) == 5
    }
    assert rows["model.model"] == ("model.gguf", "MODEL")
    assert rows["engine.ctx_size"] == ("4096", "--ctx-size")
    assert rows["engine.swa_full"] == ("false", "--swa-full")
    assert rows["engine.parallel"] == ("3", "REKINDLE_PARALLEL")
    assert rows["engine.flash_attn"] == ("on", "engine.flash_attn in the configuration file")
    assert rows["server.cors"] == ("[x]", "server.cors in the configuration file")
    assert rows["server.api_key"] == ("****, ****", "REKINDLE_API_KEY")
    assert rows["server.port"] == ("8080", "default")
    assert list(rows) == ["key", *(f"{each.section}.{each.name}" for each in all_settings())]


def test_help_names_every_flag_and_its_variable() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    missing = [
        setting.name
        for setting in all_settings()
        if setting.flag not in shown or setting.variable not in shown
    ]
    assert not missing


def test_llama_cpp_spellings_of_flags_are_understood() -> None:
    done = rekindle(
        "serve", "--n-gpu-layers", "3", "-t", "5", "-b", "700", "-a", "me", "--print-config"
    )
    for value in ("3", "5", "700", "me"):
        assert f"| {value} " in done.stdout


@pytest.mark.parametrize("flags", [("--no-cache-disk",), ("--cache-disk", "0")])
def test_both_spellings_turn_the_disk_off(flags: tuple[str, ...]) -> None:
    done = rekindle("serve", *flags, "--print-config", REKINDLE_CACHE_DISK="1TiB")
    assert re.search(r"\| cache\.cache_disk +\| 0 +\| --cache-disk +\|", done.stdout)


def test_a_disk_that_is_both_sized_and_off_is_a_contradiction() -> None:
    done = rekindle("serve", "--cache-disk", "1GiB", "--no-cache-disk", "--print-config")
    assert (done.returncode, done.stderr) == (
        2,
        "rekindle: --cache-disk and --no-cache-disk contradict each other.\n",
    )


def test_a_busy_port_is_found_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = rekindle("serve", "/no/such/model.gguf", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"Cannot listen on 127.0.0.1:{port} (Address already in use" in done.stderr
    assert "--port" in done.stderr


def test_an_unknown_host_is_a_startup_error() -> None:
    with pytest.raises(StartupError, match=r"^Cannot listen on host\.invalid:8080 \("):
        bind(ServerSettings(host="host.invalid"))


def test_a_missing_model_is_reported_by_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = rekindle("serve", "/no/such/model.gguf", "--port", str(port))
    assert (done.returncode, done.stderr) == (
        2,
        "rekindle: There is no file at /no/such/model.gguf.\n",
    )


class FakeServer:
    """Answers every chat with the given chunks and keeps the bodies it was sent."""

    def __init__(self, *chunks: object) -> None:
        self.chunks = chunks
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        self.bodies.append(json.loads(request.content))
        lines = [": keep-alive", *(f"data: {json.dumps(chunk)}" for chunk in self.chunks)]
        return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]", ""]))

    def sent_messages(self, turn: int) -> object:
        return self.bodies[turn]["messages"]


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> ChatClient:
    return ChatClient(httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)))


def delta(**fields: str) -> dict[str, object]:
    return {"choices": [{"delta": fields}]}


TIMINGS = {
    "cache_n": 268,
    "prompt_n": 42,
    "prompt_ms": 125.0,
    "predicted_n": 57,
    "predicted_ms": 647.0,
    "predicted_per_second": 88.1,
}
FINAL = {"choices": [], "usage": {"prompt_tokens": 310}, "timings": TIMINGS}


def test_a_stream_becomes_events_in_order() -> None:
    server = FakeServer(
        {
            **delta(role="assistant"),
            "prompt_progress": {"total": 310, "cache": 268, "processed": 300, "time_ms": 3},
        },
        delta(reasoning_content="hm"),
        delta(content="Hel"),
        delta(content="lo"),
        FINAL,
    )
    assert list(client_of(server).reply([{"role": "user", "content": "hi"}])) == [
        PrefillUpdate(n_done=300, n_tokens=310),
        ReasoningPiece("hm"),
        TextPiece("Hel"),
        TextPiece("lo"),
        ReplyEnd(TIMINGS),
    ]
    assert server.bodies[0]["model"] == "tiny"
    assert server.bodies[0]["return_progress"] is True


def test_an_error_in_the_stream_ends_the_reply_with_its_message() -> None:
    server = FakeServer(delta(content="a"), {"error": {"message": "The engine died."}})
    assert list(client_of(server).reply([])) == [TextPiece("a"), Failed("The engine died.")]


def test_a_refused_request_is_its_message() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        return httpx.Response(400, json={"error": {"message": "Too long."}})

    assert list(client_of(refuse).reply([])) == [Failed("Too long.")]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            httpx.Response(401, json={"error": {"message": "Wrong key."}}),
            r"Wrong key\. The flag --api-key sends one",
        ),
        (httpx.Response(404, text="nothing"), "refused: 404 Not Found"),
        (httpx.Response(200, text="<html>"), "does not answer like an OpenAI server"),
    ],
)
def test_what_is_no_usable_server_is_told_at_the_start(
    response: httpx.Response, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        client_of(lambda _: response)


def test_an_unreachable_url_is_one_line_and_exit_code_2() -> None:
    done = rekindle("chat", "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 2
    assert done.stderr.startswith("rekindle: http://127.0.0.1:9 cannot be reached")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", OLLAMA_COMMANDS)
def test_a_command_of_ollama_is_answered_with_ours(name: str) -> None:
    done = rekindle(name, "llama3")
    assert done.returncode == 2
    assert done.stderr.startswith(f"rekindle: {name} is a command of Ollama. Here: `rekindle ")


def conversation(server: FakeServer, *lines: str, system: str | None = None) -> str:
    waiting = iter(lines)

    def read_line() -> str:
        for line in waiting:
            return line
        raise EOFError

    out = io.StringIO()
    talk(client_of(server), Console(file=out, width=200), read_line, system)
    return out.getvalue()


def test_a_chat_remembers_until_it_is_told_to_forget() -> None:
    server = FakeServer(delta(content="yes [b]"), FINAL)
    shown = conversation(
        server, "one", "two", "/clear", "/system Be brief.", "three", "/exit", "four", system="Hi."
    )
    user, assistant = {"role": "user"}, {"role": "assistant", "content": "yes [b]"}
    assert server.sent_messages(1) == [
        {"role": "system", "content": "Hi."},
        {**user, "content": "one"},
        assistant,
        {**user, "content": "two"},
    ]
    assert server.sent_messages(2) == [
        {"role": "system", "content": "Be brief."},
        {**user, "content": "three"},
    ]
    assert len(server.bodies) == 3
    assert "yes [b]\nprefilled 42 of 310 tokens (268 cached) in 0.12 s" in shown


def test_a_failed_question_is_not_kept() -> None:
    server = FakeServer({"error": {"message": "No room."}})
    shown = conversation(server, "one", "two")
    assert server.sent_messages(1) == [{"role": "user", "content": "two"}]
    assert shown.count("No room.") == 2


def test_commands_are_not_sent_to_the_model() -> None:
    server = FakeServer()
    shown = conversation(server, "/help", "/nonsense", "", "  ")
    assert not server.bodies
    assert "/clear" in shown
    assert "There is no /nonsense" in shown


def test_ctrl_c_stops_the_reply_keeps_its_text_and_closes_the_stream() -> None:
    closed = []

    def interrupted() -> Generator[ChatEvent]:
        try:
            yield TextPiece("half a")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    out = io.StringIO()
    assert draw(interrupted(), Console(file=out)) == "half a"
    assert closed
    assert "stopped" in out.getvalue()


def test_the_summary_line_adds_up() -> None:
    assert summary(TIMINGS) == (
        "prefilled 42 of 310 tokens (268 cached) in 0.12 s - 57 tokens at 88.1 tokens/s"
    )


def test_the_summary_line_has_the_accepted_drafts_where_there_were_drafts() -> None:
    drafted = summary({**TIMINGS, "draft_n": 40, "draft_n_accepted": 31})
    assert drafted == f"{summary(TIMINGS)} - 31 of 40 drafted tokens accepted"
