"""What a model file is and takes in memory, from its header and vocabulary: nothing is loaded."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rekindle.config.engine import EngineSettings
from rekindle.config.placement import PlacementSettings, tensor_overrides
from rekindle.errors import StartupError
from rekindle.generation.model_state import ModelClass
from rekindle.llama.context import N_DRAFT_ROWS
from rekindle.llama.model import Pooling, VocabularyFile
from rekindle.llama.placement.fit import Fitted, Memory, fit
from rekindle.llama.placement.fitting import free_memory, row_format, used_gpus, wishes
from rekindle.llama.placement.footprint import footprint
from rekindle.llama.placement.gguf_header import GgufHeader, read_header, shards
from rekindle.models.files.gguf_check import check_gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    files: list[str]
    size_bytes: int  # of the weights
    architecture: str
    quantization: str
    size_label: str | None  # as the author of the file calls it
    model_class: ModelClass
    has_experts: bool
    n_ctx_train: int
    n_vocab: int
    type_k: str
    type_v: str
    row_bytes: int  # of one token
    checkpoint_bytes: int
    fitted: Fitted
    memory: Memory
    n_layers: int
    fim: dict[str, str]  # texts of tokens, by purpose
    can_generate: bool
    can_fill_in: bool
    embeds_with: str | None  # the pooling; None: this server cannot make embeddings with it
    can_rerank: bool


def inspect_model(
    path: Path, engine: EngineSettings, placement: PlacementSettings, *, reserved_bytes: int
) -> ModelReport:
    """Read the header and the vocabulary. Raises StartupError."""
    files = shards(path)
    for file in files:
        check_gguf(file)
    header = read_header(path)
    try:
        model, rows = footprint(header, tensor_overrides(placement)), row_format(engine)
    except (ValueError, OverflowError) as error:
        raise StartupError(f"The header of {path} cannot be read: {error}.") from error
    memory = free_memory(placement, used_gpus(placement), reserved_bytes)
    vocabulary = VocabularyFile(path)
    try:
        words = vocabulary.vocabulary
        fim = {
            name: words.detokenize([token], render_special=True).decode("utf-8", "replace")
            for name, token in asdict(words.infill).items()
            if token is not None
        }
        pooling = _pooling(header)
        return ModelReport(
            files=[str(file) for file in files],
            size_bytes=sum(header.tensors.values()),
            architecture=header.architecture,
            quantization=header.quantization,
            size_label=header.text("general.size_label"),
            model_class=model.model_class,
            has_experts=model.has_experts,
            n_ctx_train=model.n_ctx_train,
            n_vocab=words.n_vocab,
            type_k=engine.cache_type_k.value,
            type_v=engine.cache_type_v.value,
            row_bytes=model.row_bytes(rows),
            checkpoint_bytes=model.checkpoint_bytes(rows),
            fitted=fit(model, rows, wishes(engine, placement, n_draft_rows=N_DRAFT_ROWS), memory),
            memory=memory,
            n_layers=len(model.layers),
            fim=fim,
            can_generate=vocabulary.is_decoder and _is_causal(header),
            can_fill_in={"prefix", "suffix", "middle"} <= fim.keys(),
            embeds_with=_embeds_with(header, pooling, is_decoder=vocabulary.is_decoder),
            can_rerank=pooling is Pooling.RANK,
        )
    finally:
        vocabulary.close()


def _pooling(header: GgufHeader) -> Pooling:
    number = header.count("pooling_type")
    return next((each for each in Pooling if each.value == number), Pooling.NONE)


def _is_causal(header: GgufHeader) -> bool:
    return bool(header.number("attention.causal", 1))


def _embeds_with(header: GgufHeader, pooling: Pooling, *, is_decoder: bool) -> str | None:
    if pooling is Pooling.RANK or not is_decoder or not _is_causal(header):
        return None
    return (Pooling.MEAN if pooling is Pooling.NONE else pooling).name.lower()
