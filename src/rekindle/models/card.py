"""What the API tells about a model that is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    id: str  # every reply carries it, whatever name the client asked for
    path: str
    created: int  # seconds since the epoch
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_params: int
    size_bytes: int
    architecture: str
    quantization: str
    chat_template: str
    bos_text: str
    eos_text: str
