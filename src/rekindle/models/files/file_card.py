"""What the files of a model say about it, without loading it."""

from collections.abc import Sequence
from pathlib import Path

from rekindle.llama.placement.gguf_header import quantization_name
from rekindle.models.card import FileCard
from rekindle.models.files.gguf_check import check_gguf


def read_file_card(files: Sequence[Path]) -> FileCard:
    """Read the headers of all shards. Raises StartupError."""
    facts = [check_gguf(file) for file in files]
    first = facts[0]
    architecture = first.texts.get("general.architecture", "")
    file_type = first.numbers.get("general.file_type")
    return FileCard(
        architecture=architecture,
        chat_template=first.texts.get("tokenizer.chat_template", ""),
        n_ctx_train=first.numbers.get(f"{architecture}.context_length", 0),
        n_params=sum(each.n_weights for each in facts),
        size_bytes=sum(each.weight_bytes for each in facts),
        quantization="" if file_type is None else quantization_name(file_type),
    )
