"""Settings of models, and of conversations with them."""

# ruff: noqa: FBT003, RUF009 - `setting` declares a dataclass field, and a default may be a bool.

from dataclasses import dataclass
from pathlib import Path

from rekindle.config.choices import MediaPolicy, Overflow, ReasoningHistory, ReasoningSwitch
from rekindle.config.declare import TIB, Bytes, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    model: str | None = setting(
        None,
        "GGUF file, hf:owner/repo/file.gguf or hf:owner/repo:quant; with --engine vllm, the"
        " model's folder. Default: the embedded SmolLM2.",
        per_model=False,
    )
    alias: str | None = setting(
        None, "Model name in the APIs. Default: taken from the file name.", per_model=False
    )
    chat_template: str | None = setting(
        None, "Jinja file, Jinja text or 'chatml' to use instead of the model's own template."
    )
    models: tuple[str, ...] = setting(
        (),
        "Another model, given like MODEL and loaded on first use; may be repeated.",
        per_model=False,
    )
    models_dir: Path | None = setting(
        None, "Folder of GGUF files to serve as well, each named after its file.", per_model=False
    )
    models_memory: Bytes | None = setting(
        None,
        "Memory for loaded models; beyond it, the least recently used is unloaded. Default: half"
        " of the machine's.",
        maximum=1024 * TIB,
        per_model=False,
    )
    keep_alive: float = setting(
        0.0, "Seconds until an idle model is unloaded; 0: never.", words={"-1": 0.0}
    )
    pin: bool = setting(False, "Never unload a model to make room for another, or while idle.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    reasoning_history: ReasoningHistory = setting(
        ReasoningHistory.AUTO,
        "Where memory restores reasoning that a client dropped. template: nowhere; auto: within"
        " the current tool loop; keep: everywhere, so that the prompt depends on memory.",
    )
    overflow: Overflow = setting(
        Overflow.ERROR,
        "For a conversation longer than the context. error: refuse it; trim: leave out the oldest"
        " turns.",
    )
    media: MediaPolicy = setting(
        MediaPolicy.TEXT,
        "Images, audio, video and files in requests. text: the model reads a line about each, or"
        " the text of a text file; error: refuse the request.",
        per_model=False,
    )
    reasoning: ReasoningSwitch = setting(
        ReasoningSwitch.AUTO,
        "Whether the model reasons, if its template has a switch. auto: as the template does.",
    )
    reasoning_budget: int = setting(
        -1,
        "Most reasoning tokens of a reply; requests may ask for fewer. 0: no reasoning, -1: no"
        " limit.",
        minimum=-1,
    )
    chat_template_kwargs: str | None = setting(
        None,
        "JSON object of arguments for the chat template, such as"
        """ '{"enable_thinking": false}'; requests may replace each.""",
    )
    stream_calls: bool = setting(
        True,
        "Send tool calls while they are written, and end by force those that reach max_tokens. If"
        " off, send only whole calls.",
    )
    sticky_tools: bool = setting(
        False,
        "Render a request that continues a conversation without its tools, or with them in another"
        " order, with the tools of that conversation; dropped tools cannot be called.",
    )
    tool_dialect: str | None = setting(
        None, "How the model writes tool calls. Default: derived from the template."
    )
    rewarm: bool = setting(
        True,
        "While idle, prefill the next turn's prompt if the template will render it differently.",
    )
    volatile: tuple[str, ...] = setting(
        (),
        "Text in system prompts and tools to replace by a constant: the name of a built-in rule,"
        " or a regular expression; may be repeated.",
    )
    warm: tuple[str, ...] = setting(
        (),
        "File, folder or glob to prime at start and after each change; may be repeated.",
        per_model=False,
    )
