"""Reads the small files of a model folder from Hugging Face: tokenizer, template, sampling."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rekindle.config.file_sampling import recommended
from rekindle.errors import StartupError
from rekindle.generation.request import Sampling

_SAMPLING_KEYS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p")},
    "repeat_penalty": "repetition_penalty",
}
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFolder:
    path: Path
    tokenizer_json: str
    bos_text: str
    eos_text: str
    end_ids: tuple[int, ...]  # from the configs; the id of `eos_text` may be another
    n_vocab: int  # of the model; the tokenizer may have fewer tokens
    n_ctx_train: int  # 0: unknown
    architecture: str
    chat_template: str | None
    default_sampling: Sampling

    def digest(self, model: str) -> str:
        """Return a digest of the model's name and tokenizer."""
        return sha256(f"vllm {model}\0{self.tokenizer_json}".encode()).hexdigest()


def read_folder(path: Path) -> HfFolder:
    """Read a model folder. Raises StartupError."""
    if not path.is_dir():
        raise StartupError(
            f"{path} is not a folder: with --engine vllm, MODEL is the model's folder with its"
            f" {TOKENIZER_NAME}."
        )
    tokenizer_json = _text(path / TOKENIZER_NAME)
    if tokenizer_json is None:
        raise StartupError(f"The folder {path} has no {TOKENIZER_NAME}.")
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json")
    texts = _json(path / "special_tokens_map.json") | _json(path / "tokenizer_config.json")
    return HfFolder(
        path=path,
        tokenizer_json=tokenizer_json,
        bos_text=_content(texts.get("bos_token")),
        eos_text=_content(texts.get("eos_token")),
        end_ids=(*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))),
        n_vocab=_number(config.get("vocab_size")),
        n_ctx_train=_number(config.get("max_position_embeddings")),
        architecture=str(config.get("model_type") or ""),
        chat_template=_template(path, texts.get("chat_template")),
        default_sampling=Sampling(**recommended(_SAMPLING_KEYS, generation)),
    )


def _template(path: Path, configured: Any) -> str | None:
    """Return the template: from its own file, or from the config (one text, or several by name)."""
    if (text := _text(path / "chat_template.jinja")) is not None:
        return text
    if isinstance(configured, list):
        named = {each.get("name"): each.get("template") for each in configured}
        configured = named.get("default") or next(iter(named.values()), None)
    return configured if isinstance(configured, str) else None


def _content(token: Any) -> str:
    """Return a token's text from a string, or from an object that also has the token's flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The file {path} cannot be read: {error}.") from error


def _json(path: Path) -> dict[str, Any]:
    """Return the file's object, empty if there is no file."""
    text = _text(path)
    try:
        content = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise StartupError(f"The file {path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise StartupError(f"The file {path} is not a JSON object.")
    return content
