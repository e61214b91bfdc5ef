"""How published agents are started without a terminal, against a server of ours.

Each gets a home of its own and writes into the working folder that it is started in.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "none"
CONTEXT = 131072


@dataclass(frozen=True, slots=True)
class Order:
    """One run of an agent."""

    url: str
    model: str
    prompt: str
    home: Path
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Start:
    command: list[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    program: str  # a pattern of paths in the folder of agents
    start: Callable[[Path, Order], Start]  # the program
    argument_piece: Callable[[Any], str]  # of a call, in a line of its output
    model: str = "tiny"
    sends_max_tokens: bool = True

    def path(self, folder: Path) -> Path | None:
        return next(iter(sorted(folder.absolute().glob(self.program))), None)

    def environment(self, order: Order, node: Path) -> dict[str, str]:
        """Without the keys and settings of whoever runs the campaign."""
        return {
            "HOME": str(order.home),
            "PATH": f"{node.parent}:{os.environ['PATH']}",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "DO_NOT_TRACK": "1",
        }


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def _opencode(package: str) -> Callable[[Path, Order], Start]:
    def start(program: Path, order: Order) -> Start:
        model = {
            "name": order.model,
            "reasoning": True,
            "tool_call": True,
            "limit": {"context": CONTEXT, "output": order.max_tokens},
        }
        provider = {
            "npm": package,
            "name": "Local",
            "options": {"baseURL": f"{order.url}/v1", "apiKey": KEY},
            "models": {order.model: model},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "model": f"local/{order.model}",
            "small_model": f"local/{order.model}",
            "enabled_providers": ["local"],
            "permission": {"edit": "allow", "bash": "allow", "external_directory": "allow"},
            "provider": {"local": provider},
        }
        _write(order.home / ".config/opencode/opencode.json", settings)
        switches = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
        return Start(
            [str(program), "run", "--format", "json", order.prompt],
            {f"OPENCODE_DISABLE_{switch}": "1" for switch in switches},
        )

    return start


def _pi(api: str) -> Callable[[Path, Order], Start]:
    def start(program: Path, order: Order) -> Start:
        model = {
            "id": order.model,
            "name": order.model,
            "reasoning": True,
            "input": ["text"],
            "contextWindow": CONTEXT,
            "maxTokens": order.max_tokens,
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        }
        url = order.url if api == "anthropic-messages" else f"{order.url}/v1"
        provider = {"baseUrl": url, "api": api, "apiKey": KEY, "models": [model]}
        folder = order.home / ".pi/agent"
        _write(folder / "models.json", {"providers": {"local": provider}})
        options = ["--provider", "local", "--model", order.model, "-a", "--mode", "json"]
        return Start(
            [str(program), "-p", *options, order.prompt],
            {
                "PI_CODING_AGENT_DIR": str(folder),
                "PI_OFFLINE": "1",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_TELEMETRY": "0",
            },
        )

    return start


def _pi_piece(line: Any) -> str:
    event = line.get("assistantMessageEvent") or {}
    return str(event["delta"]) if event.get("type") == "toolcall_delta" else ""


def _qwen(auth_type: str) -> Callable[[Path, Order], Start]:
    def start(program: Path, order: Order) -> Start:
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "model": {
                "generationConfig": {
                    "samplingParams": {"max_tokens": order.max_tokens},
                    "contextWindowSize": CONTEXT,
                }
            },
        }
        _write(order.home / ".qwen/settings.json", settings)
        output = ["--output-format", "stream-json", "--include-partial-messages"]
        kind = "ANTHROPIC" if auth_type == "anthropic" else "OPENAI"
        url = order.url if auth_type == "anthropic" else f"{order.url}/v1"
        return Start(
            [str(program), "--auth-type", auth_type, "--yolo", *output, order.prompt],
            {
                f"{kind}_API_KEY": KEY,
                f"{kind}_BASE_URL": url,
                f"{kind}_MODEL": order.model,
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(order.max_tokens),
            },
        )

    return start


def _claude(program: Path, order: Order) -> Start:
    output = ["--output-format", "stream-json", "--include-partial-messages", "--verbose"]
    permissions = ["--permission-mode", "acceptEdits", "--allowedTools", "Write,Bash"]
    return Start(
        [str(program), "-p", order.prompt, "--model", order.model, *output, *permissions],
        {
            "ANTHROPIC_BASE_URL": order.url,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_SMALL_FAST_MODEL": order.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(order.max_tokens),
            "DISABLE_AUTOUPDATER": "1",
        },
    )


def _stream_event_piece(line: Any) -> str:
    delta = (line.get("event") or {}).get("delta") or {}
    return str(delta.get("partial_json") or "")


def _codex(program: Path, order: Order) -> Start:
    settings = f"""
model = "{order.model}"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.local]
name = "Local"
base_url = "{order.url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1
[analytics]
enabled = false
[otel]
exporter = "none"
[feedback]
enabled = false
"""
    _write(order.home / ".codex/config.toml", settings)
    return Start(
        [str(program), "exec", "--skip-git-repo-check", "--json", order.prompt],
        {"CODEX_HOME": str(order.home / ".codex"), "LOCAL_KEY": KEY},
    )


def _gemini(program: Path, order: Order) -> Start:
    settings = {
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "modelConfigs": {
            "overrides": [
                {
                    "match": {"model": order.model},
                    "modelConfig": {"generateContentConfig": {"maxOutputTokens": order.max_tokens}},
                }
            ]
        },
    }
    _write(order.home / ".gemini/settings.json", settings)
    options = ["--yolo", "--skip-trust", "--output-format", "stream-json"]
    return Start(
        [str(program), "--model", order.model, *options, "--prompt", order.prompt],
        {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": order.url},
    )


def _never(_line: Any) -> str:
    return ""


OPENCODE = "opencode/node_modules/opencode-linux-*/bin/opencode"
PI = "pi/node_modules/.bin/pi"
QWEN = "qwen-code/node_modules/.bin/qwen"
CLAUDE = "claude-code/node_modules/@anthropic-ai/claude-code-linux-*/claude"
CODEX = "codex/node_modules/.bin/codex"
GEMINI = "gemini-cli/node_modules/.bin/gemini"

AGENTS = [
    Agent("opencode.chat", OPENCODE, _opencode("@ai-sdk/openai-compatible"), _never),
    Agent("opencode.responses", OPENCODE, _opencode("@ai-sdk/openai"), _never),
    Agent("opencode.messages", OPENCODE, _opencode("@ai-sdk/anthropic"), _never),
    Agent("pi.chat", PI, _pi("openai-completions"), _pi_piece),
    Agent("pi.responses", PI, _pi("openai-responses"), _pi_piece),
    Agent("pi.messages", PI, _pi("anthropic-messages"), _pi_piece),
    Agent("qwen-code.chat", QWEN, _qwen("openai"), _stream_event_piece),
    Agent("qwen-code.responses", QWEN, _qwen("openai-responses"), _stream_event_piece),
    Agent("qwen-code.messages", QWEN, _qwen("anthropic"), _stream_event_piece),
    Agent("claude-code.messages", CLAUDE, _claude, _stream_event_piece),
    Agent("codex.responses", CODEX, _codex, _never, sends_max_tokens=False),
    # A name that Codex knows: then its tool for patches takes free text, not JSON.
    Agent("codex-patch.responses", CODEX, _codex, _never, model="gpt-5.5", sends_max_tokens=False),
    Agent("gemini-cli.gemini", GEMINI, _gemini, _never),
]
