"""Request and reply types of llama-server's own endpoints."""

from typing import Annotated, Literal, NotRequired

from pydantic import Field, RootModel
from typing_extensions import TypedDict

from rekindle.api.body import Items, WireModel
from rekindle.api.cache.bodies import TierProps
from rekindle.api.requests.adapters import AdapterScale
from rekindle.api.requests.limits import MAX_OPTIONS, Id


class TokenizeRequest(WireModel):
    model: Id | None = None
    content: str
    add_special: bool = False
    # Unlike llama-server, text becomes control tokens only on request.
    parse_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(WireModel):
    model: Id | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class SlotFile(WireModel):
    # Without a colon, which the names of slots have.
    filename: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]


class SaveTimings(TypedDict):
    save_ms: float


class RestoreTimings(TypedDict):
    restore_ms: float


class SlotSaved(TypedDict):
    id_slot: int
    filename: str
    n_saved: int  # tokens
    n_written: int  # bytes
    timings: SaveTimings


class SlotRestored(TypedDict):
    id_slot: int
    filename: str
    n_restored: int
    n_read: int
    timings: RestoreTimings


class SlotErased(TypedDict):
    id_slot: int
    n_erased: int


class SlotReply(RootModel[SlotSaved | SlotRestored | SlotErased]):
    """The reply depends on the action."""


class PropsChange(WireModel):
    """No property can be changed."""


class AdapterScales(RootModel[Annotated[Items[AdapterScale], Field(max_length=MAX_OPTIONS)]]):
    pass


class Adapter(TypedDict):
    """One LoRA adapter."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str


class Success(TypedDict):
    success: Literal[True]


class EngineHealth(TypedDict):
    state: str  # running, restarting, failed: the worst of all models
    restarts: dict[str, int]  # by cause


class Health(TypedDict):
    status: Literal["ok"]
    engine: NotRequired[EngineHealth]  # of models that run in processes of their own
    shared_store: NotRequired[Literal["ok", "not answering"]]  # if a loaded model uses one


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]  # bytes, if they are not valid UTF-8


class TokenizeReply(TypedDict):
    tokens: list[int] | list[TokenPiece]


class DetokenizeReply(TypedDict):
    content: str


class TemplateReply(TypedDict):
    prompt: str
    tokens: list[int]  # remembered turns as they were sampled


class SamplingProps(TypedDict):
    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    max_tokens: int
    n_predict: int
    ignore_eos: bool
    n_probs: int
    min_keep: int
    samplers: list[str]
    post_sampling_probs: bool


class GenerationProps(TypedDict):
    n_ctx: int
    params: SamplingProps


class Modalities(TypedDict):
    vision: bool
    audio: bool


class NextToken(TypedDict):
    n_decoded: int


# The functional form, because `class` is a keyword.
SlotProps = TypedDict(
    "SlotProps",
    {
        "id": int,
        "n_ctx": int,
        "is_processing": bool,
        "id_task": str | None,  # the request; null: the slot is idle
        "next_token": list[NextToken],
        "session": str,
        "class": str,
        "n_prompt_tokens": int,
        "n_rows": int,  # tokens whose rows the slot holds
    },
)


class CacheProps(TypedDict):
    model_class: str
    off_because: str | None
    tiers: list[TierProps]


class DialectProps(TypedDict):
    """How the model's tool calls are read and written."""

    name: str
    origin: str  # "derived", "by hand", "generic" or "setting"
    line: str  # one sentence for the operator
    losses: list[str]  # what the template cannot write so that it reads back
    # What the grammar refuses although the template writes it; null: not tried yet.
    refused_by_grammar: list[str] | None


class RekindleProps(TypedDict):
    version: str
    dialect: DialectProps
    cache: CacheProps | None  # null while the engine starts
    no_drafts_because: str | None


class Props(TypedDict):
    default_generation_settings: GenerationProps
    total_slots: int
    model_alias: str
    model_path: str
    model_ftype: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    rekindle: RekindleProps
