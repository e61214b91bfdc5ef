"""The agents that `rekindle launch` knows."""

import difflib

from rekindle.errors import StartupError
from rekindle.launch import plans
from rekindle.launch.plan import KnownAgent

AGENTS = (
    KnownAgent(
        name="claude",
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        api="Messages",
        n_first_prompt=12_000,
        plan=plans.claude,
    ),
    KnownAgent(
        name="codex",
        title="Codex",
        program="codex",
        install="npm install -g @openai/codex",
        api="Responses",
        n_first_prompt=9_000,
        plan=plans.codex,
    ),
    KnownAgent(
        name="opencode",
        title="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        api="Chat Completions",
        n_first_prompt=7_500,
        plan=plans.opencode,
    ),
    KnownAgent(
        name="qwen",
        title="qwen-code",
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        api="Chat Completions",
        n_first_prompt=20_000,
        plan=plans.qwen,
    ),
    KnownAgent(
        name="pi",
        title="pi",
        program="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        api="Chat Completions",
        n_first_prompt=1_500,
        plan=plans.pi,
    ),
    KnownAgent(
        name="gemini",
        title="gemini-cli",
        program="gemini",
        install="npm install -g @google/gemini-cli",
        api="Gemini",
        n_first_prompt=12_000,
        plan=plans.gemini,
    ),
    KnownAgent(
        name="aider",
        title="aider",
        program="aider",
        install="pip install aider-chat",
        api="Chat Completions",
        n_first_prompt=2_500,
        plan=plans.aider,
    ),
    KnownAgent(
        name="goose",
        title="goose",
        program="goose",
        install="npm install -g @aaif/goose",
        api="Chat Completions",
        n_first_prompt=0,
        plan=plans.goose,
    ),
    KnownAgent(
        name="cline",
        title="Cline",
        program="cline",
        install="npm install -g cline",
        api="Chat Completions",
        n_first_prompt=12_000,
        plan=plans.cline,
    ),
    KnownAgent(
        name="copilot",
        title="GitHub Copilot CLI",
        program="copilot",
        install="npm install -g @github/copilot",
        api="Chat Completions",
        n_first_prompt=12_000,
        plan=plans.copilot,
    ),
    KnownAgent(
        name="llm",
        title="llm",
        program="llm",
        install="pip install llm",
        api="Chat Completions",
        n_first_prompt=0,
        plan=plans.llm,
    ),
    KnownAgent(
        name="continue",
        title="Continue",
        program="cn",
        install="npm install -g @continuedev/cli",
        api="Chat Completions",
        n_first_prompt=2_000,
        plan=plans.continue_cli,
    ),
    KnownAgent(
        name="gptme",
        title="gptme",
        program="gptme",
        install="pip install gptme",
        api="Chat Completions",
        n_first_prompt=9_000,
        plan=plans.gptme,
    ),
)


def find_agent(name: str) -> KnownAgent:
    """Raises StartupError."""
    by_name = {agent.name: agent for agent in AGENTS}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f" Did you mean {near[0]}?" if near else f" Known agents: {', '.join(by_name)}."
        raise StartupError(f"There is no agent {name!r}.{hint}")
    return by_name[name]
