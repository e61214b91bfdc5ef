"""`rekindle launch` starts published agents, which work in two rounds of tools, twice.

    unshare --net --map-root-user sh -c \
        'ip link set lo up && python -m tests.campaigns.launch FOLDER [AGENT ...]'

FOLDER has the agents, one npm prefix or Python environment each, under the names of
`rekindle launch`: `npm install --prefix FOLDER/pi @earendil-works/pi-coding-agent`,
`python -m venv FOLDER/llm && FOLDER/llm/bin/pip install llm`; and node24 (node@24), which runs
the ones of npm.

Agents that `rekindle launch` does not start have the first block of their section in
docs/guides/agents.md run instead, with the address, the model and the prompt of this campaign.
The names in BY_HAND are those of their folders: `python -m venv FOLDER/smolagents`.

Each agent talks to a server of its own, whose model follows a script: two rounds of calls, each
of which writes a file, then a sentence. Agents without tools get two messages, and write a file
after each. Then the same command runs again in the same folder: the first request of this run
must find at least nine tenths of its prompt in the cache. The settings of the user lead
elsewhere, and must stay as they are; no temporary folder may stay.

Exits with 1 if an agent did anything else. `--keep` keeps the output of the agents.
"""
# ruff: noqa: T201

import argparse
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.launch.table import AGENTS
from tests.campaigns.agents import (
    LAST_WORDS,
    RESULT,
    SHELLS,
    TEMPLATES,
    THOUGHT,
    WRITERS,
    Script,
    call_as_json,
    smallest_model,
    tools_of,
)
from tests.support.replayed_client import serve_backend
from tests.support.scripted_model import Said, ScriptedModel

MODEL = "tiny"
N_CELLS = 131072
N_SLOTS = 4
RUN_SECONDS = 180
MIN_CACHED = 0.9
# Copilot has the id of its session in the system prompt.
OWN_MIN_CACHED = {"copilot": 0.3}
PROMPT = "Write the two notes into their files, as agreed."
FILES = {"one.txt": "The first note.\n", "two.txt": "The second note.\n"}
# Of Cline and goose.
OWN_WRITERS = ("run_commands", "shell")
# Of smolagents and gptme: a call ends the work there, and text alone does not.
FINISHERS = ("final_answer", "complete")

LLM_TOOL = """
def write_file(path: str, content: str) -> str:
    "Write a file."
    from pathlib import Path
    Path(path).write_text(content)
    return "written"
"""
ARGUMENTS: dict[str, list[str]] = {
    "claude": ["-p", PROMPT, "--permission-mode", "acceptEdits", "--allowedTools", "Write,Bash"],
    "codex": [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        PROMPT,
    ],
    "opencode": ["run", PROMPT],
    "qwen": ["--yolo", PROMPT],
    "pi": ["-p", "-a", PROMPT],
    "gemini": ["--yolo", "--skip-trust", "--prompt", PROMPT],
    "aider": ["--yes-always", "--no-git", "--no-show-release-notes", "--edit-format", "diff"],
    "goose": ["run", "--no-session", "--with-builtin", "developer", "--text", PROMPT],
    "cline": [PROMPT],
    "copilot": ["-p", PROMPT, "--allow-all-tools"],
    "llm": ["--functions", LLM_TOOL, PROMPT],
    "continue": ["-p", "--auto", PROMPT],
    "gptme": ["--non-interactive", PROMPT],
}
# Headings in the guide, by the names of folders.
BY_HAND = {
    "hermes": "Hermes",
    "openclaw": "OpenClaw",
    "openai-agents": "openai-agents",
    "pydantic-ai": "pydantic-ai",
    "smolagents": "smolagents",
}
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/agents.md"
BLOCK = re.compile(r"^```(sh|python)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN_URL = "http://127.0.0.1:8080"
SHOWN_MODEL = "my-model"
CLOUD = '{"env": {"CLAUDE_CODE_USE_BEDROCK": "1", "ANTHROPIC_API_KEY": "x"}}'
ACCOUNT = '{"security": {"auth": {"selectedType": "oauth-personal"}}}'
# Settings of the user that lead elsewhere.
HOME_FILES = {
    "claude": {".claude/settings.json": CLOUD},
    "gemini": {".gemini/settings.json": ACCOUNT},
}
# Beginnings of files that the agent makes in its own folder.
MADE_FILES = {"gemini": ".gemini/tmp/work/chats/session-"}
AIDER_INPUT = f"{PROMPT}\nGo on with the second note.\n/exit\n"
AIDER_BLOCK = """\
{path}
```
<<<<<<< SEARCH
=======
{text}>>>>>>> REPLACE
```
"""


@dataclass(slots=True)
class TwoRounds:
    """The model's part in both runs of an agent."""

    folder: Path  # of the agent
    offered: list[str] = field(default_factory=list)  # tools of the last request
    mains: list[Said] = field(default_factory=list)
    asides: list[Said] = field(default_factory=list)

    def reply_to(self, prompt: str) -> Said:
        text = self._reply_of_aider(prompt) if "SEARCH/REPLACE" in prompt else self._reply(prompt)
        said = Said("Notes" if text is None else text)
        (self.asides if text is None else self.mains).append(said)
        return said

    def _reply(self, prompt: str) -> str | None:
        tools = tools_of(prompt)
        if not tools:
            return None
        self.offered = list(tools)
        name = next((each for each in (*OWN_WRITERS, *WRITERS, *SHELLS) if each in tools), None)
        if name is None:
            return None
        # smolagents wants a call in every reply, and returns results as text.
        is_called_for = "final_answer" in tools
        n_results = prompt.count("Observation:\nwritten" if is_called_for else RESULT)
        if n_results >= len(FILES):
            end = next((each for each in FINISHERS if each in tools), None)
            return self._end(tools[end]) if end else LAST_WORDS
        path, text = list(FILES.items())[n_results]
        call = self._call(tools[name], path, text)
        return call if is_called_for else f"{THOUGHT}Now {path}.\n{call}"

    def _end(self, tool: Any) -> str:
        arguments = dict.fromkeys(tool["parameters"].get("required", ()), LAST_WORDS)
        return call_as_json(tool["name"], arguments)

    def _call(self, tool: Any, path: str, text: str) -> str:
        if "commands" in tool["parameters"]["properties"]:  # Cline
            command = f"printf '%s\\n' '{text.rstrip()}' > '{self.folder / path}'"
            return call_as_json(tool["name"], {"commands": [command]})
        return Script("write", "json", self.folder).call(tool, path, text)

    def _reply_of_aider(self, prompt: str) -> str:
        n_written = prompt.count("It is written.")
        path, text = list(FILES.items())[min(n_written, 1)]
        return f"It is written.\n\n{AIDER_BLOCK.format(path=path, text=text)}"


class ReplyLog(logging.Handler):
    """What the server logs about each reply: the tokens of its prompt, and the cached ones."""

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[tuple[int, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"prompt=(\d+) cached=(\d+)", record.getMessage())
        if found:
            self.replies.append((int(found[1]), int(found[2])))


@dataclass(slots=True)
class Result:
    name: str  # of the agent
    code: int | None
    output: str
    files: dict[str, str | None]
    n_main: int
    first: tuple[int, int] | None  # prompt and cached tokens of the first main request
    home: dict[str, str]  # files by their names
    left_over: list[str]

    def problems(self, script: TwoRounds, least: float) -> list[str]:
        problems = []
        if self.code != 0:
            problems.append(f"ended with {self.code}: {self.output[-600:]}")
        problems += [
            f"{name} has {self.files[name]!r}" for name in FILES if self.files[name] != FILES[name]
        ]
        if self.n_main < len(FILES):
            problems.append(f"{self.n_main} requests with tools; offered: {script.offered}")
        if self.first is None or self.first[1] < least * self.first[0]:
            problems.append(f"the first request found {self.first}")
        problems += [
            f"{name} of the user is {self.home.get(name)!r}"
            for name, text in HOME_FILES.get(self.name, {}).items()
            if self.home.get(name) != text
        ]
        wanted = MADE_FILES.get(self.name, "")
        if wanted and not any(name.startswith(wanted) for name in self.home):
            problems.append(f"there is no {wanted} in the home folder: {sorted(self.home)}")
        if self.left_over:
            problems.append(f"stays behind: {self.left_over}")
        return problems


@dataclass(frozen=True, slots=True)
class Runner:
    agents: Path
    name: str
    url: str
    folder: Path
    script: TwoRounds
    log: ReplyLog

    def run(self) -> Result:
        home, work, temporary = (self.folder / each for each in ("home", "work", "tmp"))
        for each in (home, work, temporary):
            each.mkdir(exist_ok=True)
        for name, text in HOME_FILES.get(self.name, {}).items():
            (home / name).parent.mkdir(exist_ok=True)
            (home / name).write_text(text)
        for file in FILES:
            (work / file).unlink(missing_ok=True)
        n_main, n_logged = len(self.script.mains), len(self.log.replies)
        program = next(self.agents.glob(f"{self.name}*/node_modules/.bin"), None)
        node = (self.agents / "node24/node_modules/node/bin").resolve()
        places = [str(each) for each in (program, self.agents / self.name / "bin", node) if each]
        process = subprocess.Popen(
            self._command(),
            cwd=work,
            env={
                "HOME": str(home),
                "PATH": os.pathsep.join([*places, os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT / "src"),
                "TMPDIR": str(temporary),
                "TERM": "dumb",
                "NO_COLOR": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        timer = threading.Timer(RUN_SECONDS, process.terminate)
        timer.start()
        output, _ = process.communicate(AIDER_INPUT if self.name == "aider" else "")
        is_late = not timer.is_alive()
        timer.cancel()
        mains = self.script.mains[n_main:]
        return Result(
            name=self.name,
            code=None if is_late else process.returncode,
            output=output,
            files={name: _read(work / name) for name in FILES},
            n_main=len(mains),
            first=self._logged(mains[0].n_prompt, n_logged) if mains else None,
            home={
                str(path.relative_to(home)): path.read_text("utf-8", "replace")
                for path in home.rglob("*")
                if path.is_file()
            },
            left_over=[path.name for path in temporary.glob("rekindle-launch-*")],
        )

    def _command(self) -> list[str]:
        if self.name in BY_HAND:
            language, code = block_of_guide(BY_HAND[self.name], self.url)
            program = self.folder / "block"  # a file: smolagents reads the source of its tools
            program.write_text(code)
            return [*(["python"] if language == "python" else ["bash", "-eu"]), str(program)]
        launch = [sys.executable, "-m", "rekindle", "launch", self.name, "--url", self.url]
        return [*launch, "--", *ARGUMENTS[self.name]]

    def _logged(self, n_prompt: int, start: int) -> tuple[int, int] | None:
        return next((each for each in self.log.replies[start:] if each[0] == n_prompt), None)


def block_of_guide(heading: str, url: str) -> tuple[str, str]:
    """Return the language and the code of the first block of a section."""
    section = GUIDE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = BLOCK.search(section)
    assert found, f"the guide has no block for {heading}"
    language, code = found.groups()
    for shown, used in ((SHOWN_URL, url), (SHOWN_MODEL, MODEL), ("PROMPT", PROMPT)):
        code = code.replace(shown, used)
    return language, code


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def play(agents: Path, name: str, model: Path, folder: Path) -> list[str]:
    """Run an agent twice, and print a line for each run. Return what should not have been."""
    script = TwoRounds(folder / "work")
    log = ReplyLog()
    logger = logging.getLogger("rekindle.request")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    problems = []
    with serve_backend(
        model,
        folder / "cache",
        lambda vocabulary, settings: ScriptedModel(
            vocabulary, settings, script.reply_to, token_seconds=0.0005
        ),
        template=TEMPLATES["json"],
        n_cells=N_CELLS,
        n_slots=N_SLOTS,
        name=MODEL,
    ) as (url, _):
        runner = Runner(agents, name, url, folder, script, log)
        for number in (1, 2):
            result = runner.run()
            (folder / f"output {number}.txt").write_text(result.output)
            print(
                f"{name:<14}run {number}: exit {result.code}, {result.n_main} requests with tools,"
                f" {len(script.asides)} others; first prompt and cached tokens {result.first}",
                flush=True,
            )
            least = OWN_MIN_CACHED.get(name, MIN_CACHED) if number == 2 else 0.0
            problems += result.problems(script, least)
    logger.removeHandler(log)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("agents", nargs="*", help="names; without any: all that are installed")
    parser.add_argument("--keep", type=Path, help="a folder for what the agents print and write")
    options = parser.parse_args(arguments)
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        parser.error("agents must reach nothing but the server: run this as the docstring says")
    agents = options.folder.absolute()
    known = [*(each.name for each in AGENTS), *BY_HAND]
    names = options.agents or known
    chosen = [name for name in known if name in names and (agents / name).exists()]
    if not chosen:
        parser.error(f"no such agents in {options.folder}")
    n_problems = 0
    with tempfile.TemporaryDirectory() as temporary:
        kept = (options.keep or Path(temporary)).absolute()
        model = smallest_model(Path(temporary) / "model.gguf")
        for name in chosen:
            folder = kept / name
            folder.mkdir(parents=True)
            for problem in play(agents, name, model, folder):
                print(f"    PROBLEM {problem}", flush=True)
                n_problems += 1
    return 1 if n_problems else 0


if __name__ == "__main__":
    sys.exit(main())
