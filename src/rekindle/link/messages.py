"""Every message between the server and an engine process, as typed values.

The server sends orders, the engine process sends reports. `number` names a request, a question or
a grammar: the server numbers them, and each report carries the number that it is about.
"""

from pathlib import Path

from msgspec import Raw, Struct

from rekindle.config.cache import CacheSettings
from rekindle.config.engine import EngineSettings
from rekindle.config.placement import PlacementSettings
from rekindle.generation.drafts import Drafted
from rekindle.generation.events import (
    Embedded,
    Finished,
    PrefillProgress,
    PromptEvaluated,
    TokenLogprobs,
)
from rekindle.generation.model_state import StateTraits
from rekindle.generation.questions import AnyQuestion
from rekindle.generation.request import EmbeddingRequest, GenerationRequest, Grammar, Sampling
from rekindle.generation.status import EngineStatus


class Message(Struct, frozen=True, array_like=True, tag=True):
    pass


class Load(Message, frozen=True):
    """The first order: load the weights and create the context."""

    path: Path
    engine: EngineSettings
    log_level: int
    placement: PlacementSettings = PlacementSettings()
    reserved_bytes: int = 0  # host memory that stored prefixes will take


class Begin(Message, frozen=True):
    """The second order: open the stored prefixes of these weights, and start the engine."""

    weights: str  # an id that only these weights have
    cache: CacheSettings
    memory_bytes: int
    adapters: tuple[str, ...] = ()  # an id for the content of each LoRA adapter, in order


class Submit(Message, frozen=True):
    number: int
    request: GenerationRequest


class Embed(Message, frozen=True):
    number: int
    request: EmbeddingRequest


class CancelRequest(Message, frozen=True):
    request_id: str


class AskPrefixes(Message, frozen=True):
    number: int
    question: AnyQuestion


class CheckGrammar(Message, frozen=True):
    """Compile the grammar on a thread of its own. The answer is None, or InvalidRequest."""

    number: int
    grammar: Grammar


class CancelCheck(Message, frozen=True):
    """Nobody waits for this check any more: drop it, unless the grammar is being compiled."""

    number: int


class AskStatus(Message, frozen=True):
    number: int


class SetMemoryBudget(Message, frozen=True):
    n_bytes: int


class FailRequests(Message, frozen=True):
    """End every request with ShuttingDown, behind the tokens that were already sampled."""

    message: str


class StopEngine(Message, frozen=True):
    """The last order: store the rows of every slot, and exit."""


Order = (
    Load
    | Begin
    | Submit
    | Embed
    | CancelRequest
    | AskPrefixes
    | CheckGrammar
    | CancelCheck
    | AskStatus
    | SetMemoryBudget
    | FailRequests
    | StopEngine
)


class LoadedAdapter(Struct, frozen=True):
    """A LoRA adapter that applies to every request."""

    path: Path
    scale: float
    task_name: str
    prompt_prefix: str


class LoadedModel(Struct, frozen=True, kw_only=True):
    """Facts about a loaded model that the server needs."""

    architecture: str
    quantization: str
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_embd: int
    default_sampling: Sampling
    n_slots: int
    n_cells: int
    n_ctx: int
    embedding_n_ctx: int
    embedding_n_dimensions: int
    ranks: bool  # it scores texts, and makes no vectors
    # What was chosen for this load, so that the next process makes the same choice.
    ctx_size: int = 0
    ubatch_size: int = 0
    gpu_layers: int = -1
    n_cpu_moe: int = 0
    device: str | None = None
    tensor_split: str | None = None
    adapters: tuple[LoadedAdapter, ...] = ()


class Loading(Message, frozen=True):
    fraction: float


class Loaded(Message, frozen=True):
    model: LoadedModel


class LoadFailed(Message, frozen=True):
    """The model cannot be loaded, and the operator can fix it."""

    message: str


class Started(Message, frozen=True):
    """The engine has warmed up and opened its stored prefixes."""

    traits: StateTraits


class Error(Struct, frozen=True, array_like=True):
    """A `RekindleError` on its way: the name of its class, and what it says."""

    name: str
    message: str
    param: str | None = None


class Token(Message, frozen=True, gc=False):
    number: int
    token: int
    logprobs: TokenLogprobs | None = None
    lands: bool = False
    drafted: Drafted | None = None
    sampler_state: tuple[float, ...] = ()


class Progress(Message, frozen=True):
    number: int
    event: PrefillProgress


class Evaluated(Message, frozen=True):
    number: int
    event: PromptEvaluated


class End(Message, frozen=True):
    number: int
    event: Finished


class Vectors(Message, frozen=True):
    number: int
    event: Embedded


class Failure(Message, frozen=True):
    number: int
    error: Error


Event = Token | Progress | Evaluated | End | Vectors | Failure


class Step(Message, frozen=True):
    """All events of one step of the engine."""

    events: list[Event]


class Answer(Message, frozen=True):
    """The answer to a question, encoded: the server knows its type."""

    number: int
    value: Raw


class NoAnswer(Message, frozen=True):
    number: int
    error: Error


class StatusReport(Message, frozen=True):
    number: int  # 0: nobody asked
    status: EngineStatus


class Logged(Message, frozen=True):
    logger: str
    level: int
    text: str


Report = Loading | Loaded | LoadFailed | Started | Step | Answer | NoAnswer | StatusReport | Logged
