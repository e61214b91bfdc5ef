"""Published agents write a file through calls that stream.

    unshare --net --map-root-user sh -c \
        'ip link set lo up && python -m tests.campaigns.agents FOLDER [AGENT ...]'

FOLDER has the agents, one npm prefix each: `npm install --prefix FOLDER/opencode opencode-ai`,
likewise pi (@earendil-works/pi-coding-agent), qwen-code (@qwen-code/qwen-code), claude-code
(@anthropic-ai/claude-code), codex (@openai/codex), gemini-cli (@google/gemini-cli), and node24
(node@24), which runs them.

Each agent talks to a server of its own, whose model follows a script:

- `write`: reasoning, a sentence, then one long call; after the result, a sentence. The file must
  equal the content to the byte, and the next request must have the result.
- `two`: the same with two calls in one reply.
- `landed`: the call is too long for the reply, so the engine ends it early, with finish reason
  `length`. The agent may execute what it got, or not: the line says which.
- `shell`: the same with a call of the agent's shell.
- `error`: the reply fails within the call. The agent must not execute it.

Exits with 1 if an agent did anything else. `--keep` keeps the output of the agents.
"""
# ruff: noqa: T201

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support import tiny_models
from tests.support.real_agents import AGENTS, Agent, Order
from tests.support.replayed_client import TEMPLATE, Body, serve_backend
from tests.support.scripted_model import Said, ScriptedModel
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.tiny_vocabulary import TURN_START

SCENARIOS = ("write", "two", "landed", "shell", "error")
CUT_SCENARIOS = ("landed", "shell")
N_CELLS = 131072
N_SLOTS = 4
TOKEN_SECONDS = 0.002  # the calls then take some seconds
MAX_TOKENS = 16384  # the long call has about 4,000
CUT_MAX_TOKENS = 1000
FAILS_AFTER = 3000  # characters
RUN_SECONDS = 240

PROMPT = "Write the notes into the file, as agreed."
TOOLS_END = "Write calls as <tool_call>"
RESULT = f"{TURN_START}user\n<tool_response>\n"
THOUGHT = "<think>\nThe user wants a file.\n</think>\n\n"
SENTENCE = "I write the file now.\n"
LAST_WORDS = "The work is done."
CALL_AS_JSON = """\
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
"""
CALL_AS_TAGS = """\
            {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {%- set text = value if value is string else value | tojson %}
                {{- '<parameter=' + key + '>\n' + text + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
"""
PATHS = ("path", "filePath", "file_path", "filepath")
WRITERS = ("apply_patch", "write", "write_file", "Write", "exec_command")
SHELLS = ("bash", "Bash", "run_shell_command", "exec_command")


def content(seed: str, n_characters: int) -> str:
    """Text with everything that JSON, tags and shells treat in a special way.

    No backslash before `u` and digits: Claude Code writes the character instead.
    """
    nested = json.dumps({"json": json.dumps({"in": 'json "quoted" \\ twice', "n": [1.5, None]})})
    lines = [f"Notes {seed}: caf\u00e9, \u65e5\u672c\u8a9e, \U0001f600, \u2028 and \\x41 stay."]
    while sum(map(len, lines)) < n_characters:
        number = len(lines)
        lines += [
            f"{number}\t'single' \"double\" `back` $HOME $(pwd) \\n is no line break",
            nested,
            '</tool_call> <|im_end|> </p> "}} ]]> &amp; %s {{ }}',
            "",
            f"    indented line {number} with a trailing backslash \\",
        ]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Script:
    """The model's part in one run of an agent."""

    scenario: str
    form: str  # of calls
    folder: Path  # of the agent
    files: dict[str, str] = field(init=False)
    asides: list[Said] = field(default_factory=list)  # replies to requests without tools
    calls: list[Said] = field(default_factory=list)
    ends: list[Said] = field(default_factory=list)
    tool: str = ""
    results: list[str] = field(default_factory=list)  # as the last request has them

    def __post_init__(self) -> None:
        long = {"notes.txt": content(self.scenario, 6000)}
        short = {f"part {n}.txt": content(f"{self.scenario} {n}", 400) for n in (1, 2)}
        self.files = short if self.scenario == "two" else long

    def reply_to(self, prompt: str) -> Said:
        tools = tools_of(prompt)
        names = SHELLS if self.scenario == "shell" else WRITERS
        name = next((name for name in names if name in tools), None)
        if name is None:
            self.asides.append(Said("Notes"))
            return self.asides[-1]
        self.results = [part.partition("\n</tool_response>")[0] for part in prompt.split(RESULT)]
        del self.results[0]
        if self.results or (self.scenario == "error" and self.calls):
            self.ends.append(Said(LAST_WORDS))
            return self.ends[-1]
        self.tool = name
        calls = "\n".join(self.call(tools[name], *file) for file in self.files.items())
        fails_after = FAILS_AFTER if self.scenario == "error" else None
        self.calls.append(Said(f"{THOUGHT}{SENTENCE}{calls}", fails_after))
        return self.calls[-1]

    def call(self, tool: Any, path: str, text: str) -> str:
        properties = tool["parameters"]["properties"]
        whole_path = str(self.folder / path)
        if tool["name"] == "apply_patch":
            added = "".join(f"+{line}\n" for line in text.split("\n")[:-1])
            patch = f"*** Begin Patch\n*** Add File: {path}\n{added}*** End Patch\n"
            arguments = {"input": patch}
        elif key := next((key for key in PATHS if key in properties), None):
            arguments = {key: whole_path, "content": text}
        else:
            key = "cmd" if "cmd" in properties else "command"
            arguments = {key: f"cat > '{whole_path}' <<'END OF FILE'\n{text}END OF FILE\n"}
        others = dict.fromkeys(tool["parameters"].get("required", ()), "Writes a file")
        # Grammars ask for the order of the schema.
        whole = others | arguments
        ordered = {key: whole[key] for key in properties if key in whole}
        return CALL_FORMS[self.form](tool["name"], ordered)


def call_as_json(name: str, arguments: Body) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def call_as_tags(name: str, arguments: Body) -> str:
    tags = (f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(tags)}</function>\n</tool_call>"


CALL_FORMS = {"json": call_as_json, "tags": call_as_tags}
assert CALL_AS_JSON in TEMPLATE
TEMPLATES = {"json": TEMPLATE, "tags": TEMPLATE.replace(CALL_AS_JSON, CALL_AS_TAGS)}


def tools_of(prompt: str) -> dict[str, Any]:
    """Return the tools in a prompt of the template, by name."""
    tools = {}
    for line in reversed(prompt.partition(TOOLS_END)[0].splitlines()):
        tool = parsed(line).get("function")
        if tool is None:
            break
        tools[tool["name"]] = tool
    return tools


@dataclass(slots=True)
class Output:
    """What an agent printed, and when."""

    code: int | None = None  # None: it did not end in time
    lines: list[tuple[float, str]] = field(default_factory=list)

    def first_piece(self, agent: Agent) -> float | None:
        return next((at for at, line in self.lines if agent.argument_piece(parsed(line))), None)


def parsed(line: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def run_agent(agent: Agent, agents: Path, order: Order, folder: Path) -> Output:
    node = (agents / "node24/node_modules/node/bin/node").resolve()
    program = agent.path(agents)
    assert program is not None
    start = agent.start(program, order)
    output = Output()
    with subprocess.Popen(
        start.command,
        cwd=folder,
        env={**agent.environment(order, node), **start.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        timer = threading.Timer(RUN_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            output.lines.append((time.monotonic(), line))
        is_late = not timer.is_alive()
        timer.cancel()
        code = process.wait()
    output.code = None if is_late else code
    return output


def problems_of(script: Script, output: Output, *, is_at_end: bool) -> list[str]:
    problems = []
    if output.code is None:
        problems.append(f"the agent did not end within {RUN_SECONDS} s")
    elif output.code != 0 and script.scenario != "error" and not is_at_end:
        problems.append(f"the agent ended with {output.code}")
    if not script.calls:
        return [*problems, "the agent offered no tool that writes"]
    is_cut = script.scenario in CUT_SCENARIOS
    found = {path: read(script.folder / path) for path in script.files}
    for path, text in script.files.items():
        data = found[path]
        if script.scenario in ("write", "two") and data != text.encode():
            problems.append(f"{path} has {'nothing' if data is None else data[:200]!r}")
        if is_cut and data and not text.encode().startswith(without_end(data)):
            problems.append(f"{path} has what the model did not write: {data[-200:]!r}")
        if script.scenario == "error" and data is not None:
            problems.append(f"{path} was written from a call that failed: {data[-200:]!r}")
    n_results = {"write": 1, "two": 2}.get(script.scenario)
    if n_results is not None and (len(script.calls) != 1 or len(script.results) != n_results):
        problems.append(f"{len(script.calls)} calls, {len(script.results)} results")
    replies = [
        *script.ends,
        *([] if is_cut or script.scenario == "error" else script.calls),
    ]
    problems += [
        f"behind {said.text.encode()[: said.n_bytes][-60:]!r} came {said.departure[:60]!r}"
        for said in replies
        if not said.is_whole
    ]
    return problems


def without_end(data: bytes) -> bytes:
    """Cut off the line break of a shell, and a character whose escape the engine completed."""
    return data.decode(errors="replace").removesuffix("\n")[:-1].encode()


def read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def story(agent: Agent, script: Script, output: Output) -> str:
    """Return one line of what was seen."""
    parts = [f"{script.tool}, {len(script.calls)} calls, {len(script.ends)} ends"]
    if script.asides:
        parts.append(f"{len(script.asides)} other requests")
    if script.calls:
        times = script.calls[0].times
        parts.append(f"{len(times)} tokens in {times[-1] - times[0]:.1f} s")
        piece = output.first_piece(agent)
        if piece is not None:
            parts.append(f"arguments shown from {piece - times[0]:.1f} s on")
    sizes = [len(read(script.folder / path) or b"") for path in script.files]
    parts.append(f"files of {sizes} bytes, exit {output.code}")
    if script.results:
        parts.append(f"result {script.results[-1][:80]!r}")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Campaign:
    agents: Path
    model: Path
    form: str  # of calls

    def run(self, agent: Agent, scenario: str, folder: Path) -> list[str]:
        """Print one line. Return what the agent should not have done."""
        is_at_end = scenario in CUT_SCENARIOS and not agent.sends_max_tokens
        n_cells = N_CELLS
        if is_at_end:  # a first run finds the length of the prompt
            first, _ = self._play(agent, "two", folder / "first", N_CELLS)
            n_cells = first.calls[0].n_prompt + CUT_MAX_TOKENS
        script, output = self._play(agent, scenario, folder, n_cells)
        print(f"{agent.name:<22}{scenario:<8}{story(agent, script, output)}", flush=True)
        return problems_of(script, output, is_at_end=is_at_end)

    def _play(
        self, agent: Agent, scenario: str, folder: Path, n_cells: int
    ) -> tuple[Script, Output]:
        home, work = folder / "home", folder / "work"
        for each in (home, work):
            each.mkdir(parents=True)
        script = Script(scenario, self.form, work)
        with serve_backend(
            self.model,
            folder / "cache",
            lambda vocabulary, settings: ScriptedModel(
                vocabulary, settings, script.reply_to, token_seconds=TOKEN_SECONDS
            ),
            template=TEMPLATES[self.form],
            n_cells=n_cells,
            n_slots=N_SLOTS,
            name=agent.model,
        ) as (url, _):
            max_tokens = CUT_MAX_TOKENS if scenario in CUT_SCENARIOS else MAX_TOKENS
            order = Order(url, agent.model, PROMPT, home, max_tokens)
            output = run_agent(agent, self.agents, order, work)
        (folder / "output.txt").write_text("".join(line for _, line in output.lines))
        return script, output


def smallest_model(path: Path) -> Path:
    """Only the vocabulary is used."""
    with patch.multiple(tiny_models, N_LAYER=1, N_HEAD=tiny_models.N_HEAD_KV):
        return write_tiny_model(path, TinyArchitecture.LLAMA, context_length=N_CELLS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("agents", nargs="*", help="names, or their beginnings; without any: all")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--calls", choices=CALL_FORMS, default="json", help="how the model writes")
    parser.add_argument("--keep", type=Path, help="a folder for what the agents print and write")
    options = parser.parse_args(arguments)
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        parser.error("agents must reach nothing but the server: run this as the docstring says")
    chosen = [
        agent
        for agent in AGENTS
        if agent.path(options.folder)
        and (not options.agents or agent.name.startswith(tuple(options.agents)))
    ]
    if not chosen:
        parser.error(f"no such agents in {options.folder}")
    n_problems = 0
    with tempfile.TemporaryDirectory() as temporary:
        kept = options.keep or Path(temporary)
        model = smallest_model(Path(temporary) / "model.gguf")
        campaign = Campaign(options.folder, model, options.calls)
        for agent in chosen:
            for scenario in options.scenario or SCENARIOS:
                folder = kept.absolute() / agent.name / scenario
                problems = campaign.run(agent, scenario, folder)
                n_problems += len(problems)
                for problem in problems:
                    print(f"    PROBLEM {problem}", flush=True)
    return 1 if n_problems else 0


if __name__ == "__main__":
    sys.exit(main())
