"""What each agent is told: one function for each. A plan depends only on its arguments."""

import json
from pathlib import Path
from typing import Any

from rekindle.launch.overlay import FolderOverlay
from rekindle.launch.plan import Endpoint, LaunchPlan

PROVIDER = "rekindle"
_KEY_VARIABLE = "REKINDLE_LAUNCH_KEY"
_CLAUDE_MIN_WINDOW = 100_000  # Claude Code treats a smaller window as this one
_GEMINI_HOME = "GEMINI_CLI_HOME"
_GEMINI_WINDOW = 1_048_576  # gemini-cli assumes it for every model that it does not know
_COMPRESS_AT = 0.5  # of the context, as gemini-cli does by itself


def claude(server: Endpoint, folder: Path) -> LaunchPlan:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    families = ("OPUS", "SONNET", "HAIKU")
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(models, server.model),
        **{f"ANTHROPIC_DEFAULT_{family}_MODEL": server.model for family in families},
        # A line in the system prompt that differs in every conversation.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        **_limit("CLAUDE_CODE_MAX_OUTPUT_TOKENS", server.n_output),
        **_claude_window(server),
    }
    clouds = [
        "BEDROCK",
        "VERTEX",
        "FOUNDRY",
        "MANTLE",
        "GATEWAY",
        "ANTHROPIC_AWS",
        "ANTHROPIC_GOOGLE_CLOUD",
    ]
    removed = ("ANTHROPIC_API_KEY", *(f"CLAUDE_CODE_USE_{cloud}" for cloud in clouds))
    settings = {"env": {**environment, **dict.fromkeys(removed, "")}}
    return LaunchPlan(
        # Variables in the user's settings win over those of the shell, and these over both.
        arguments=("--settings", str(folder / "settings.json")),
        environment=environment,
        removed=removed,
        files={"settings.json": _json(settings)},
    )


def _claude_window(server: Endpoint) -> dict[str, str]:
    """Make Claude Code compact in time, also in a context below its smallest window."""
    if server.n_ctx is None or server.n_output is None:
        return {}
    window = max(server.n_ctx, _CLAUDE_MIN_WINDOW)
    variables = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window)}
    if window > server.n_ctx:
        percent = 100 * (server.n_ctx - server.n_output) // window
        variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(percent)
    return variables


def codex(server: Endpoint, _folder: Path) -> LaunchPlan:
    provider = {
        "name": "Rekindle",
        "base_url": server.openai_url,
        "env_key": _KEY_VARIABLE,
        "wire_api": "responses",
    }
    settings: dict[str, Any] = {
        "model": server.model,
        "model_provider": PROVIDER,
        **{f"model_providers.{PROVIDER}.{name}": value for name, value in provider.items()},
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
    }
    if server.n_ctx is not None and server.n_output is not None:
        settings["model_context_window"] = server.n_ctx
        settings["model_auto_compact_token_limit"] = server.n_ctx - server.n_output
    # JSON is TOML for strings, numbers and booleans.
    pairs = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return LaunchPlan(
        arguments=[word for pair in pairs for word in ("-c", pair)],
        environment={_KEY_VARIABLE: server.key},
    )


def opencode(server: Endpoint, _folder: Path) -> LaunchPlan:
    model: dict[str, Any] = {"name": server.model, "reasoning": True, "tool_call": True}
    if server.n_ctx is not None:
        model["limit"] = {"context": server.n_ctx, "output": server.n_output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Rekindle",
        "options": {"baseURL": server.openai_url, "apiKey": server.key},
        "models": {server.model: model},
    }
    settings = {
        "model": f"{PROVIDER}/{server.model}",
        "small_model": f"{PROVIDER}/{server.model}",
        "enabled_providers": [PROVIDER],
        "provider": {PROVIDER: provider},
        "autoupdate": False,
        "share": "disabled",
    }
    return LaunchPlan(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def qwen(server: Endpoint, folder: Path) -> LaunchPlan:
    generation: dict[str, Any] = {}
    if server.n_ctx is not None:
        generation = {
            "contextWindowSize": server.n_ctx,
            "samplingParams": {"max_tokens": server.n_output},
        }
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "model": {"name": server.model, "generationConfig": generation},
        "security": {"auth": {"selectedType": "openai"}},
    }
    return LaunchPlan(
        arguments=("--auth-type", "openai"),
        environment={
            "OPENAI_BASE_URL": server.openai_url,
            "OPENAI_API_KEY": server.key,
            "OPENAI_MODEL": server.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(folder / "settings.json"),
            **_limit("QWEN_CODE_MAX_OUTPUT_TOKENS", server.n_output),
        },
        files={"settings.json": _json(settings)},
    )


def pi(server: Endpoint, folder: Path) -> LaunchPlan:
    model: dict[str, Any] = {
        "id": server.model,
        "name": server.model,
        "reasoning": True,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": server.n_ctx or 128_000,  # pi's own default
        "maxTokens": server.n_output or 16_384,
    }
    provider = {
        "baseUrl": server.openai_url,
        "apiKey": server.key,
        "api": "openai-completions",
        "models": [model],
    }
    extension = f"""\
export default function (pi) {{
  pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider, indent=2)});
}}
"""
    name = "rekindle.js"
    return LaunchPlan(
        arguments=(
            *("--extension", str(folder / name)),
            *("--provider", PROVIDER, "--model", server.model),
        ),
        environment={"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        files={name: extension},
    )


def gemini(server: Endpoint, folder: Path) -> LaunchPlan:
    settings: dict[str, Any] = {
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "model": {"name": server.model},
    }
    if server.n_ctx is not None:
        limit = {"generateContentConfig": {"maxOutputTokens": server.n_output}}
        settings["modelConfigs"] = {
            "overrides": [{"match": {"model": server.model}, "modelConfig": limit}]
        }
        settings["model"]["compressionThreshold"] = _COMPRESS_AT * server.n_ctx / _GEMINI_WINDOW
    return LaunchPlan(
        environment={
            "GEMINI_API_KEY": server.key,
            "GOOGLE_GEMINI_BASE_URL": server.url,
            "GEMINI_MODEL": server.model,
            _GEMINI_HOME: str(folder),
        },
        removed=("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA"),
        # Only a file says that the key counts, and not an account of Google.
        overlay=FolderOverlay(
            variable=_GEMINI_HOME, folder=".gemini", file="settings.json", settings=settings
        ),
    )


def aider(server: Endpoint, folder: Path) -> LaunchPlan:
    model = f"openai/{server.model}"
    arguments = ["--model", model, "--weak-model", model, "--editor-model", model]
    arguments += ["--no-check-update", "--no-show-model-warnings", "--no-analytics"]
    files = {}
    if server.n_ctx is not None:
        known = {
            "max_input_tokens": server.n_ctx,
            "max_output_tokens": server.n_output,
            "max_tokens": server.n_output,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        files["models.json"] = _json({model: known})
        arguments += ["--model-metadata-file", str(folder / "models.json")]
    return LaunchPlan(
        arguments=arguments,
        environment={
            "OPENAI_API_BASE": server.openai_url,
            "OPENAI_API_KEY": server.key,
            # Without it, a table of prices is downloaded at every start.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # The map of the repository changes only with the files of the chat.
            "AIDER_MAP_REFRESH": "files",
        },
        files=files,
    )


def goose(server: Endpoint, _folder: Path) -> LaunchPlan:
    return LaunchPlan(
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": server.model,
            "OPENAI_HOST": server.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": server.key,
            **_limit("GOOSE_CONTEXT_LIMIT", server.n_ctx),
            **_limit("GOOSE_MAX_TOKENS", server.n_output),
        }
    )


def cline(server: Endpoint, folder: Path) -> LaunchPlan:
    kind = "openai-compatible"
    provider = {
        "provider": kind,
        "apiKey": server.key,
        "model": server.model,
        "baseUrl": server.openai_url,
    }
    settings = {
        "version": 1,
        "lastUsedProvider": kind,
        "modes": {},
        "providers": {
            kind: {
                "settings": provider,
                "updatedAt": "2026-01-01T00:00:00.000Z",  # Cline insists on a time
                "tokenSource": "manual",
            }
        },
    }
    return LaunchPlan(
        arguments=("--provider", kind, "--model", server.model),
        environment={
            "CLINE_PROVIDER_SETTINGS_PATH": str(folder / "providers.json"),
            "CLINE_NO_AUTO_UPDATE": "1",
            # Else a process in the background keeps the settings of this run.
            "CLINE_SESSION_BACKEND_MODE": "local",
        },
        files={"providers.json": _json(settings)},
    )


def copilot(server: Endpoint, _folder: Path) -> LaunchPlan:
    n_prompt = None
    if server.n_ctx is not None and server.n_output is not None:
        n_prompt = server.n_ctx - server.n_output
    return LaunchPlan(
        environment={
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": server.openai_url,
            "COPILOT_PROVIDER_API_KEY": server.key,
            "COPILOT_MODEL": server.model,
            "COPILOT_OFFLINE": "true",
            **_limit("COPILOT_PROVIDER_MAX_PROMPT_TOKENS", n_prompt),
            **_limit("COPILOT_PROVIDER_MAX_OUTPUT_TOKENS", server.n_output),
        }
    )


def llm(server: Endpoint, folder: Path) -> LaunchPlan:
    settings = {
        "model_id": PROVIDER,
        "model_name": server.model,
        "api_base": server.openai_url,
        "key": server.key,
        "supports_tools": True,
        "supports_schema": True,
    }
    plugin = f"""\
import llm
from llm.default_plugins.openai_models import AsyncChat, Chat

SETTINGS = {settings!r}


@llm.hookimpl
def register_models(register):
    models = Chat(**SETTINGS), AsyncChat(**SETTINGS)
    for model in models:
        model.needs_key = {PROVIDER!r}
    register(*models)
"""
    package = "rekindle_launch"
    about = f"{package}-1.dist-info"
    return LaunchPlan(
        environment={"LLM_MODEL": PROVIDER},
        prepended={"PYTHONPATH": str(folder)},  # llm finds its plugins there
        removed=("LLM_LOAD_PLUGINS",),
        files={
            f"{package}.py": plugin,
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n",
            f"{about}/entry_points.txt": f"[llm]\n{PROVIDER} = {package}\n",
        },
    )


def continue_cli(server: Endpoint, folder: Path) -> LaunchPlan:
    model: dict[str, Any] = {
        "name": server.model,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.openai_url,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
    }
    if server.n_ctx is not None:
        model["defaultCompletionOptions"] = {
            "contextLength": server.n_ctx,
            "maxTokens": server.n_output,
        }
    settings = {"name": "Rekindle", "version": "1.0.0", "schema": "v1", "models": [model]}
    return LaunchPlan(
        arguments=("--config", str(folder / "config.yaml")),
        files={"config.yaml": _json(settings)},  # JSON is YAML
    )


def gptme(server: Endpoint, _folder: Path) -> LaunchPlan:
    # gptme prefers a variable with this prefix to one without it and to the user's settings.
    # Requests use the older of the two names of the address if both are there.
    return LaunchPlan(
        environment={
            "GPTME_OPENAI_API_BASE": server.openai_url,
            "GPTME_OPENAI_BASE_URL": server.openai_url,
            "GPTME_OPENAI_API_KEY": server.key,
            "GPTME_MODEL": f"local/{server.model}",
            **_limit("GPTME_MAX_TOKENS", server.n_output),
        }
    )


def _limit(name: str, n_tokens: int | None) -> dict[str, str]:
    return {} if n_tokens is None else {name: str(n_tokens)}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
