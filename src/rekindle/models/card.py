"""A model as the API sees it: its card, its state, and a lease while it is loaded."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LoraCard:
    """A LoRA adapter that applies to every request of the model."""

    path: str
    scale: float
    task_name: str
    prompt_prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCard:
    """What the file of a model says. It need not be loaded for this."""

    architecture: str
    chat_template: str
    n_ctx_train: int
    n_params: int = 0  # 0 and "": unknown, as for a model of vLLM
    size_bytes: int = 0  # of the weights
    quantization: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard(FileCard):
    id: str  # every reply carries it, even if the client asked for another name
    path: str
    created: int  # seconds since the epoch
    n_ctx: int
    n_vocab: int
    bos_text: str
    eos_text: str
    n_embd: int = 0
    vocab_type: int = 0  # llama.cpp's number
    adapters: tuple[LoraCard, ...] = ()  # in the order that they were given


class ModelState(StrEnum):
    LOADED = "loaded"
    LOADING = "loading"
    UNLOADED = "unloaded"


@dataclass(frozen=True, slots=True)
class ListedModel:
    id: str
    created: int  # seconds since the epoch
    state: ModelState
    card: ModelCard | None  # None while the model is not loaded
    seconds_left: float = math.inf  # until it is unloaded, if no request comes; inf: it stays


class Uses(Protocol):
    """Counter of the uses of one model."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Lease(Generic[R]):
    """One use of a model. The model stays loaded until `end`, which is safe to call twice.

    `R` is the type of the responder: this module does not import `chat`.
    """

    def __init__(self, responder: R, card: ModelCard, uses: Uses) -> None:
        self.responder = responder
        self.card = card
        self._uses = uses
        self._is_over = False
        uses.begin()

    def share(self) -> "Lease[R]":
        """Return a second lease on the same model, which ends on its own."""
        return Lease(self.responder, self.card, self._uses)

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._uses.end()

    def __enter__(self) -> "Lease[R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
