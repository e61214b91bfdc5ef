"""`rekindle launch` with a program on the PATH that only says what it got."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.cli.launch import show_line
from rekindle.cli.plain import SafeConsole
from tests.support.server_process import ServerProcess, free_port, serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

WAIT_SECONDS = 60
KEY = "the-key"
N_CTX = 2048
AGENT = f"""#!{sys.executable}
import json, os, signal, sys, time, urllib.request
seen = {{"pid": os.getpid(), "arguments": sys.argv[1:]}}
seen |= {{"environment": dict(os.environ), "files": {{}}}}
for word in (*sys.argv, *os.environ.values()):
    if word.startswith(os.environ["TMPDIR"]) and os.path.isfile(word):
        seen["files"][word] = open(word).read()
url = os.environ.get("ANTHROPIC_BASE_URL")
if url and "--ask" in sys.argv:
    seen["health"] = urllib.request.urlopen(url + "/health", timeout=10).status
behaviour = os.environ["BEHAVIOUR"]
if behaviour == "remember":
    os.chdir(os.path.join(os.environ["GEMINI_CLI_HOME"], ".gemini"))
    for name in ("GEMINI.md", "oauth_creds.json"):
        with open("part", "w") as file:
            file.write("new")
        os.rename("part", name)
    behaviour = "7"
if behaviour == "catch":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))
elif behaviour == "die":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
with open(os.environ["SEEN"] + ".part", "w") as file:
    json.dump(seen, file)
os.rename(os.environ["SEEN"] + ".part", os.environ["SEEN"])
if behaviour.isdigit():
    sys.exit(int(behaviour))
time.sleep({WAIT_SECONDS})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launch") / "tiny.gguf"
    return write_tiny_model(path, TinyArchitecture.LLAMA, context_length=N_CTX)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serve(str(model), "--api-key", KEY, "-c", str(N_CTX)) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Shell:
    """A user with a home, a PATH with the fake agents, and nothing else of ours."""

    folder: Path

    def variables(self, **more: str) -> dict[str, str]:
        clean = {
            name: value
            for name, value in os.environ.items()
            if "REKINDLE_" not in name and "PROXY" not in name.upper()
        }
        return {
            **clean,
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "tmp"),
            "SEEN": str(self.folder / "seen.json"),
            "BEHAVIOUR": "0",
            "REKINDLE_CACHE_DIR": str(self.folder / "cache"),
            "REKINDLE_PORT": str(free_port()),  # no server is there
            **more,
        }

    def launch(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rekindle", "launch", *arguments],
            env=self.variables(**variables),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )

    @contextmanager
    def running(self, *arguments: str, **variables: str) -> "Iterator[subprocess.Popen[bytes]]":
        """Yield the command once the agent runs. As a shell does, give it a group of its own."""
        process = subprocess.Popen(
            [sys.executable, "-m", "rekindle", "launch", *arguments],
            env=self.variables(**variables),
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while not (self.folder / "seen.json").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def seen(self) -> Any:
        return json.loads((self.folder / "seen.json").read_text())

    def left_over(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").glob("rekindle-launch-*")]

    def home(self) -> Mapping[str, str]:
        home = self.folder / "home"
        return {str(path): path.read_text() for path in home.rglob("*") if path.is_file()}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    for name in ("bin", "home/.claude", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home/.claude/settings.json").write_text('{"mine": true}')
    for name in ("claude", "gemini", "qwen", "llm"):
        program = tmp_path / "bin" / name
        program.write_text(AGENT)
        program.chmod(0o755)
    return Shell(tmp_path)


def test_an_agent_gets_its_settings_and_nothing_stays_behind(
    server: ServerProcess, shell: Shell
) -> None:
    before = shell.home()
    done = shell.launch(
        "qwen",
        *("--url", server.url, "--", "--yolo", "two words"),
        REKINDLE_API_KEY=f"{KEY},other",
        BEHAVIOUR="7",
    )
    assert done.returncode == 7, done.stderr
    assert shell.seen["arguments"] == ["--auth-type", "openai", "--yolo", "two words"]
    variables = shell.seen["environment"]
    assert variables["OPENAI_BASE_URL"] == f"{server.url}/v1"
    assert variables["OPENAI_API_KEY"] == KEY
    assert variables["OPENAI_MODEL"] == "tiny"
    [text] = shell.seen["files"].values()
    assert json.loads(text)["model"]["generationConfig"]["contextWindowSize"] == N_CTX
    assert shell.home() == before
    assert shell.left_over() == []
    assert "sends about 20000 tokens" in done.stderr


def test_what_an_agent_writes_into_its_folder_stays_the_users(
    server: ServerProcess, shell: Shell
) -> None:
    theirs = shell.folder / "home/.gemini"
    theirs.mkdir()
    (theirs / "oauth_creds.json").write_text("old")
    (theirs / "settings.json").write_text('{"theme": "mine"}')
    given = ("gemini", "--url", server.url, "--api-key", KEY)
    done = shell.launch(*given, BEHAVIOUR="remember")
    assert done.returncode == 7, done.stderr
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {
        "GEMINI.md": "new",
        "oauth_creds.json": "new",
        "settings.json": '{"theme": "mine"}',
    }
    assert shell.left_over() == []


def test_printed_lines_do_the_same_in_a_shell(server: ServerProcess, shell: Shell) -> None:
    given = ("llm", "--url", server.url, "--api-key", KEY)
    printed = shell.launch(*given, "--print", "--", "it's")
    assert printed.returncode == 0, printed.stderr
    assert not (shell.folder / "seen.json").exists()
    assert KEY not in printed.stdout
    runtime = shell.folder / "of this user"
    variables = shell.variables(XDG_RUNTIME_DIR=str(runtime), PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run(["sh", "-c", printed.stdout], env=variables, check=True)
    by_hand = shell.seen
    assert shell.launch(*given, "--", "it's").returncode == 0
    launched = shell.seen
    assert by_hand["arguments"] == launched["arguments"] == ["it's"]
    names = ("LLM_MODEL", "ANTHROPIC_BASE_URL")
    for name in names:
        assert by_hand["environment"].get(name) == launched["environment"].get(name)
    by_hand_folder = runtime / "rekindle-launch"
    assert by_hand["environment"]["PYTHONPATH"].startswith(f"{by_hand_folder}:")
    written = {path.name for path in by_hand_folder.rglob("*") if path.is_file()}
    assert written == {"rekindle_launch.py", "METADATA", "entry_points.txt"}


@pytest.mark.parametrize(("behaviour", "code"), [("catch", 9), ("die", -signal.SIGINT)])
def test_ctrl_c_is_the_agents_and_launch_ends_as_the_agent_does(
    server: ServerProcess, shell: Shell, behaviour: str, code: int
) -> None:
    given = ("claude", "--url", server.url, "--api-key", KEY)
    with shell.running(*given, BEHAVIOUR=behaviour) as process:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(WAIT_SECONDS) == code
    assert shell.left_over() == []


def test_a_signal_that_only_launch_receives_is_passed_on(
    server: ServerProcess, shell: Shell
) -> None:
    given = ("claude", "--url", server.url, "--api-key", KEY)
    with shell.running(*given, BEHAVIOUR="catch") as process:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 8
    assert shell.left_over() == []


def test_a_killed_agent_is_told_as_killed(server: ServerProcess, shell: Shell) -> None:
    given = ("claude", "--url", server.url, "--api-key", KEY)
    with shell.running(*given, BEHAVIOUR="catch") as process:
        os.kill(shell.seen["pid"], signal.SIGKILL)
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert shell.left_over() == []


def test_a_server_is_started_for_the_agent_and_ends_with_it(model: Path, shell: Shell) -> None:
    words = f"{shlex.quote(str(model))} --alias mine -c 1024 --threads 1"
    done = shell.launch("claude", "--serve", words, "--", "--ask", REKINDLE_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    variables = shell.seen["environment"]
    assert shell.seen["health"] == 200
    assert variables["ANTHROPIC_MODEL"] == "mine"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "256"
    with pytest.raises(httpx.ConnectError):
        httpx.get(variables["ANTHROPIC_BASE_URL"], trust_env=False)
    assert shell.left_over() == []


def test_a_line_of_the_servers_log_is_shown_as_it_is() -> None:
    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True, width=100)
    with console.status("") as status:
        show_line(status, "loading [/models/x.gguf] [bold]")
    assert "Starting a server: loading [/models/x.gguf] [bold]" in screen.getvalue()


def test_a_running_local_server_is_used(server: ServerProcess, shell: Shell) -> None:
    port = server.url.rpartition(":")[2]
    done = shell.launch("claude", REKINDLE_PORT=port, REKINDLE_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert shell.seen["environment"]["ANTHROPIC_BASE_URL"] == server.url


class OtherProgram(BaseHTTPRequestHandler):
    """Answers everything with a page, as servers of web applications do."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_another_program_at_the_local_port_is_not_taken_for_the_server(shell: Shell) -> None:
    with HTTPServer(("127.0.0.1", 0), OtherProgram) as other:
        threading.Thread(target=other.serve_forever).start()
        port = str(other.server_address[1])
        local = shell.launch("claude", "--print", "--model", "a model.gguf", REKINDLE_PORT=port)
        named = shell.launch("claude", "--print", "--url", f"http://127.0.0.1:{port}")
        other.shutdown()
    assert local.stdout.startswith("# starts a server: rekindle serve 'a model.gguf'\n")
    assert named.returncode == 2
    assert "does not answer like a Rekindle server" in named.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["codex", "--url", "{url}"], "npm install -g @openai/codex"),
        (["claude", "--url", "{url}"], "API key"),
        (["claude", "--url", "{url}", "--api-key", KEY, "--model", "no"], "Its models: tiny."),
        (["claude", "--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["claude", "--url", "{url}", "--serve", ""], "cannot be used with --url"),
        (["claude", "--serve", "--port 1"], "--serve takes no --host"),
        (["claude", "--serve", "no.gguf"], "no.gguf"),
    ],
)
def test_what_cannot_be_launched_is_one_message_and_exit_code_2(
    server: ServerProcess, shell: Shell, arguments: list[str], message: str
) -> None:
    path = f"{shell.folder / 'bin'}:/usr/bin:/bin"
    given = [each.format(url=server.url) for each in arguments]
    done = shell.launch(*given, PATH=path)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (shell.folder / "seen.json").exists()
    assert shell.left_over() == []


def test_without_an_agent_all_are_listed(shell: Shell) -> None:
    done = shell.launch()
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert str(shell.folder / "bin/claude") in rows["claude"]
    assert {"claude", "codex", "opencode", "goose", "llm"} <= set(rows)
