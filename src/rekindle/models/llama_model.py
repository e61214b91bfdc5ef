"""Factory of models that llama.cpp computes in this process."""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from rekindle.cache.fingerprint import Identity
from rekindle.config import EngineSettings, Settings
from rekindle.engine.handle import EngineHandle
from rekindle.errors import ShuttingDown
from rekindle.generation.model_state import StateTraits
from rekindle.generation.tokenizer import Tokenizer
from rekindle.llama.context import ContextParams, LlamaBackend
from rekindle.llama.embedder import LlamaEmbedder
from rekindle.llama.library import STATE_VERSION
from rekindle.llama.model import GgufModel, ModelFacts
from rekindle.llama.threads import physical_cores
from rekindle.models.card import ModelCard
from rekindle.models.chat_setup import set_up_chat, template_source
from rekindle.models.serving_model import LoadProgress, ServerParts, ServingModel
from rekindle.models.source import ModelFile
from rekindle.models.stores import ModelStores

# How long one thread may hold the GIL. Python's default of 5 ms is half a decode step of a
# small model.
SWITCH_SECONDS = 0.0005
# llama.cpp calls back a thousand times while it reads a file, and waits for the GIL each time.
OPENING_SWITCH_SECONDS = 0.00002

OpenedModel = Future[GgufModel]


class ClosableTokenizer:
    """A vocabulary that can be closed while threads still use it.

    A thread keeps working after its request was cancelled, even after the last lease has ended.
    """

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary
        # Read once, because llama.cpp's vocabulary is gone after `close`.
        self.n_vocab = vocabulary.n_vocab
        self.special_strings = vocabulary.special_strings
        self.end_strings = vocabulary.end_strings
        self.bos_text = vocabulary.bos_text
        self.eos_text = vocabulary.eos_text
        self.bos_token = vocabulary.bos_token
        self.piece = vocabulary.piece
        self._n_asking = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        with self._changed:
            if self._is_closed:
                raise ShuttingDown("The model was unloaded.")
            self._n_asking += 1
        try:
            return self._vocabulary.tokenize(text, parse_special=parse_special)
        finally:
            with self._changed:
                self._n_asking -= 1
                self._changed.notify_all()

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        return self._vocabulary.detokenize(tokens, render_special=render_special)

    def close(self) -> None:
        """Wait for running calls, and refuse later ones."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._n_asking == 0)


def open_ahead(
    settings: Settings, file: ModelFile, on_progress: Callable[[float], bool]
) -> OpenedModel:
    """Start to read the weights on another thread, while Python imports the other modules."""
    sys.setswitchinterval(OPENING_SWITCH_SECONDS)
    executor = ThreadPoolExecutor(max_workers=1)
    opened = executor.submit(_open, settings, file, on_progress)
    executor.shutdown(wait=False)
    return opened


def _open(settings: Settings, file: ModelFile, on_progress: Callable[[float], bool]) -> GgufModel:
    return GgufModel(file.path, gpu_layers=settings.engine.gpu_layers, on_progress=on_progress)


def load_llama(
    parts: ServerParts,
    name: str,
    file: ModelFile,
    stores: ModelStores,
    progress: LoadProgress,
    opened: OpenedModel | None = None,
) -> ServingModel:
    """Load a GGUF file into llama.cpp. Blocking. Raises StartupError.

    `opened`: the model that `open_ahead` is already reading.
    """
    weights = stores.weights(file, progress.on_digest)
    model = opened.result() if opened else _open(parts.settings, file, progress.on_weights)
    try:
        return _assemble(parts, name, file, stores, weights, model)
    except BaseException:
        model.close()
        raise


def _assemble(
    parts: ServerParts,
    name: str,
    file: ModelFile,
    stores: ModelStores,
    weights: str,
    model: GgufModel,
) -> ServingModel:
    facts = model.facts
    tokenizer = ClosableTokenizer(model.vocabulary)
    params = _context_params(parts.settings.engine, model)
    backend = LlamaBackend(model, params)
    engine = EngineHandle(
        backend,
        partial(stores.open_cache, partial(_identity, weights, facts, params)),
        queue_size=parts.settings.engine.queue_size,
        embedder=LlamaEmbedder(
            model,
            max_cells=params.n_cells,
            n_threads=params.n_threads,
            flash_attn=params.flash_attn,
        ),
    )
    template = template_source(parts.settings.model.chat_template, facts.chat_template)
    responder = set_up_chat(
        parts,
        name,
        engine,
        tokenizer,
        stores.open_turns(weights),
        template=template,
        default_sampling=facts.default_sampling,
        embedding_end_token=model.vocabulary.added_eos_token,
        can_rewarm=True,
    )
    card = ModelCard(
        id=name,
        path=str(file.path),
        created=int(time.time()),
        n_ctx=backend.n_ctx,
        n_ctx_train=facts.n_ctx_train,
        n_vocab=tokenizer.n_vocab,
        n_params=facts.n_params,
        size_bytes=facts.size_bytes,
        architecture=facts.architecture,
        quantization=facts.quantization,
        chat_template=template,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
    )

    def close() -> None:
        engine.close()
        stores.close()
        tokenizer.close()
        model.close()

    return ServingModel(
        card,
        responder,
        engine,
        n_bytes=lambda: facts.size_bytes + stores.row_bytes * params.n_cells,
        close=close,
    )


def _context_params(settings: EngineSettings, model: GgufModel) -> ContextParams:
    return ContextParams(
        n_cells=settings.ctx_size or model.facts.n_ctx_train,
        n_slots=settings.parallel,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        n_threads=settings.threads or physical_cores(),
        flash_attn=settings.flash_attn.value,
        type_k=settings.cache_type_k.value,
        type_v=settings.cache_type_v.value,
        swa_full=settings.swa_full,
    )


def _identity(
    weights: str, facts: ModelFacts, params: ContextParams, traits: StateTraits
) -> Identity:
    return Identity(
        weights=weights,
        model_class=traits.model_class,
        type_k=params.type_k,
        type_v=params.type_v,
        flash_attn=params.flash_attn,
        swa_full=params.swa_full,
        rope_n_ctx=params.n_cells if facts.rope_depends_on_n_ctx else None,
        attn_rot_disable=os.environ.get("LLAMA_ATTN_ROT_DISABLE"),
        state_version=STATE_VERSION,
    )
