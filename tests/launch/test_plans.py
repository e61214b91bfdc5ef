"""What each agent is told, given a server: nothing is started here."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.errors import StartupError
from rekindle.launch.plan import Endpoint, LaunchPlan
from rekindle.launch.shell_lines import shell_lines
from rekindle.launch.table import AGENTS, find_agent
from tests.campaigns.launch import ARGUMENTS, BY_HAND, GUIDE, MODEL, PROMPT, block_of_guide

FOLDER = Path("/run/of/launch")
URL = "http://127.0.0.1:8123"
SERVER = Endpoint(url=URL, key="secret", model="qwen3", n_ctx=65536)
UNKNOWN = Endpoint(url=URL, key="secret", model="qwen3", n_ctx=None)


def plan_of(name: str, server: Endpoint = SERVER) -> LaunchPlan:
    return find_agent(name).plan(server, FOLDER)


def settings_in(plan: LaunchPlan) -> Any:
    return json.loads(plan.files["settings.json"])


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_every_agent_is_told_the_address_the_key_and_the_model(agent: Any) -> None:
    plan = agent.plan(SERVER, FOLDER)
    told = " ".join((*plan.arguments, *plan.environment.values(), *plan.files.values()))
    assert URL in told
    assert "secret" in told
    assert "qwen3" in told


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_no_key_is_an_argument_that_other_users_could_see(agent: Any) -> None:
    assert not any("secret" in word for word in agent.plan(SERVER, FOLDER).arguments)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_every_file_that_is_named_is_written(agent: Any) -> None:
    plan = agent.plan(SERVER, FOLDER)
    words = (*plan.arguments, *plan.environment.values(), *plan.prepended.values())
    paths = [Path(word) for word in words if word.startswith(str(FOLDER))]
    written = {FOLDER / name for name in plan.files}
    assert {path for path in paths if path != FOLDER} <= written
    assert bool(paths) == bool(plan.files or plan.overlay)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_unknown_context_sets_no_limit_of_none(agent: Any) -> None:
    plan = agent.plan(UNKNOWN, FOLDER)
    texts = (*plan.arguments, *plan.environment.values(), *plan.files.values())
    assert not any("None" in text or "null" in text for text in texts)


def test_a_reply_may_take_a_quarter_of_the_context_up_to_a_limit() -> None:
    assert SERVER.n_output == 16384
    large = Endpoint(url=URL, key="", model="m", n_ctx=1_000_000)
    assert large.n_output == 32_000
    assert UNKNOWN.n_output is None


def test_claude_gets_every_model_name_and_no_line_that_differs_in_each_conversation() -> None:
    plan = plan_of("claude")
    variables = plan.environment
    assert variables["ANTHROPIC_BASE_URL"] == URL
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"qwen3"}
    assert variables.items() <= settings_in(plan)["env"].items()  # wins over the user's settings


def test_claude_uses_no_cloud_that_the_shell_or_the_users_settings_name() -> None:
    plan = plan_of("claude")
    clouds = [
        "BEDROCK",
        "VERTEX",
        "FOUNDRY",
        "MANTLE",
        "GATEWAY",
        "ANTHROPIC_AWS",
        "ANTHROPIC_GOOGLE_CLOUD",
    ]
    names = {"ANTHROPIC_API_KEY", *(f"CLAUDE_CODE_USE_{cloud}" for cloud in clouds)}
    assert set(plan.removed) == names
    # A variable that is not there would leave the one in the user's settings.
    assert {name: settings_in(plan)["env"].get(name) for name in names} == dict.fromkeys(names, "")


def test_claude_compacts_within_a_context_below_its_smallest_window() -> None:
    variables = plan_of("claude").environment
    window = int(variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"])
    assert window == 100_000
    assert window * int(variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"]) / 100 <= 65536 - 16384
    large = plan_of("claude", Endpoint(url=URL, key="", model="m", n_ctx=131072)).environment
    assert large["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "131072"
    assert "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE" not in large


def test_codex_gets_a_provider_by_overrides_and_compacts_within_the_context() -> None:
    plan = plan_of("codex")
    assert plan.arguments[::2] == ["-c"] * (len(plan.arguments) // 2)
    overrides = dict(each.split("=", 1) for each in plan.arguments[1::2])
    provider = "model_providers.rekindle"
    assert overrides["model_provider"] == '"rekindle"'
    assert overrides[f"{provider}.base_url"] == f'"{URL}/v1"'
    assert overrides["model_context_window"] == "65536"
    assert overrides["model_auto_compact_token_limit"] == "49152"
    key = json.loads(overrides[f"{provider}.env_key"])
    assert plan.environment[key] == "secret"
    assert not plan.files


def test_opencode_gets_its_settings_in_one_variable() -> None:
    settings = json.loads(plan_of("opencode").environment["OPENCODE_CONFIG_CONTENT"])
    provider = settings["provider"]["rekindle"]
    assert settings["model"] == settings["small_model"] == "rekindle/qwen3"
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": "secret"}
    assert provider["models"]["qwen3"]["limit"] == {"context": 65536, "output": 16384}


def test_qwen_gets_its_window_in_a_settings_file_of_this_run() -> None:
    plan = plan_of("qwen")
    assert plan.environment["QWEN_CODE_SYSTEM_SETTINGS_PATH"] == str(FOLDER / "settings.json")
    generation = settings_in(plan)["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 65536
    assert generation["samplingParams"] == {"max_tokens": 16384}


def test_pi_gets_a_provider_from_an_extension_of_this_run() -> None:
    plan = plan_of("pi")
    [(name, text)] = plan.files.items()
    assert plan.arguments[:2] == ("--extension", str(FOLDER / name))
    provider = json.loads(text[text.index('{\n  "') : text.rindex(");")])
    [model] = provider["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == ("qwen3", 65536, 16384)


def test_gemini_compresses_within_the_context_that_it_does_not_know() -> None:
    plan = plan_of("gemini")
    assert plan.environment["GOOGLE_GEMINI_BASE_URL"] == URL
    assert plan.overlay is not None
    settings = plan.overlay.settings
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"
    # gemini-cli multiplies it by the window that it assumes.
    assert settings["model"]["compressionThreshold"] * 1_048_576 == 65536 / 2
    assert "GOOGLE_GENAI_USE_VERTEXAI" in plan.removed


def test_aider_gets_the_limits_of_the_model_in_a_file_of_this_run() -> None:
    plan = plan_of("aider")
    [(name, text)] = plan.files.items()
    assert plan.arguments[-1] == str(FOLDER / name)
    assert json.loads(text)["openai/qwen3"]["max_input_tokens"] == 65536


def test_goose_gets_the_host_without_the_path() -> None:
    variables = plan_of("goose").environment
    assert variables["OPENAI_HOST"] == URL
    assert variables["GOOSE_CONTEXT_LIMIT"] == "65536"


def test_cline_gets_a_file_of_providers_of_this_run() -> None:
    plan = plan_of("cline")
    file = json.loads(plan.files["providers.json"])
    settings = file["providers"][file["lastUsedProvider"]]["settings"]
    assert settings["baseUrl"] == f"{URL}/v1"


def test_copilot_gets_limits_that_add_up_to_the_context() -> None:
    variables = plan_of("copilot").environment
    limits = [variables[f"COPILOT_PROVIDER_MAX_{each}_TOKENS"] for each in ("PROMPT", "OUTPUT")]
    assert sum(map(int, limits)) == 65536


def test_llm_finds_a_plugin_on_the_path_of_python() -> None:
    plan = plan_of("llm")
    assert plan.prepended == {"PYTHONPATH": str(FOLDER)}
    plugin = next(text for name, text in plan.files.items() if name.endswith(".py"))
    compile(plugin, "plugin", "exec")
    assert plan.environment["LLM_MODEL"] in plugin


def test_continue_gets_its_model_and_the_limits_in_a_file_of_this_run() -> None:
    plan = plan_of("continue")
    [(name, text)] = plan.files.items()
    assert plan.arguments == ("--config", str(FOLDER / name))
    [model] = json.loads(text)["models"]
    assert (model["apiBase"], model["apiKey"]) == (f"{URL}/v1", "secret")
    assert model["defaultCompletionOptions"] == {"contextLength": 65536, "maxTokens": 16384}


def test_gptme_gets_variables_that_win_over_those_of_the_shell_and_of_the_user() -> None:
    variables = plan_of("gptme").environment
    addresses = {variables[f"GPTME_OPENAI_{name}"] for name in ("API_BASE", "BASE_URL")}
    assert addresses == {f"{URL}/v1"}
    assert variables["GPTME_MODEL"] == "local/qwen3"
    assert all(name.startswith("GPTME_") for name in variables)


def test_an_agent_that_is_not_known_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(StartupError, match="Did you mean codex"):
        find_agent("codx")
    with pytest.raises(StartupError, match="Known agents: claude, codex"):
        find_agent("zzzz")


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_printed_lines_write_only_into_a_folder_that_no_other_user_can_make_or_read(
    agent: Any, tmp_path: Path
) -> None:
    *lines, _ = shell_lines(agent, SERVER, ())
    home = tmp_path / "a home"
    home.mkdir()
    show = 'umask 022\n{}\nprintf "%s\\n" "$GEMINI_CLI_HOME" "$PYTHONPATH"'
    run = subprocess.run(
        ["sh", "-ec", show.format("\n".join(lines))],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": "/a b"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    plan = agent.plan(SERVER, folder := home / ".cache/rekindle-launch")
    written = {path for path in home.rglob("*") if path.is_file()}
    files = [*plan.files, *([f"{plan.overlay.folder}/{plan.overlay.file}"] if plan.overlay else [])]
    assert written == {folder / name for name in files}
    assert not files or folder.stat().st_mode & 0o777 == 0o700
    python_path = plan.prepended.get("PYTHONPATH", "")
    assert run.stdout.splitlines() == [
        plan.environment.get("GEMINI_CLI_HOME", ""),
        f"{python_path}:/a b" if python_path else "/a b",
    ]
    assert not any("/tmp" in line for line in lines)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_the_guide_has_the_lines_of_every_agent(agent: Any) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/agents.md").read_text("utf-8")
    section = guide.partition(f"\n## {agent.title}\n")[2].partition("\n## ")[0]
    shown = Endpoint(url="http://127.0.0.1:8080", key="none", model="my-model", n_ctx=65536)
    assert "\n".join(shell_lines(agent, shown, ())) in section
    assert f"`{agent.install}`" in section
    assert f"rekindle launch {agent.name} -- " in section


def test_the_guide_has_continues_file_as_yaml_for_editors() -> None:
    shown = Endpoint(url="http://127.0.0.1:8080", key="none", model="my-model", n_ctx=65536)
    [text] = plan_of("continue", shown).files.values()
    [block] = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text("utf-8"), re.M | re.S)
    assert yaml.safe_load(block) == json.loads(text)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_guide_has_a_block_for_every_agent_that_launch_does_not_start(name: str) -> None:
    url = "http://127.0.0.1:1"
    language, code = block_of_guide(BY_HAND[name], url)
    for word in (url, MODEL, PROMPT):
        assert word in code
    if language == "python":
        compile(code, name, "exec")
    else:
        subprocess.run(["bash", "-n", "-c", code], check=True)


def test_the_guide_says_of_every_agent_how_it_was_tested() -> None:
    section = GUIDE.read_text("utf-8").partition("\n## As tested\n")[2].partition("\n## ")[0]
    tested = re.findall(r"^\| ([\w-]+) \| \d", section, re.MULTILINE)
    assert tested == [*(agent.name for agent in AGENTS), *BY_HAND]
    assert set(ARGUMENTS) == {agent.name for agent in AGENTS}
