"""Factory of models that llama.cpp computes, each in a process of its own.

This process holds the vocabulary, the template and the turns.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rekindle.chat.rerank import RerankFormat
from rekindle.config.choices import Fit
from rekindle.config.placement import adapter_files
from rekindle.config.settings import Settings
from rekindle.errors import EngineDied, ShuttingDown, StartupError
from rekindle.generation.status import CacheCounters
from rekindle.generation.tokenizer import Tokenizer
from rekindle.link.messages import Begin, Load, LoadedModel
from rekindle.llama.model import VocabularyFile
from rekindle.models.card import LoraCard, ModelCard
from rekindle.models.chat_setup import ReadTemplate, read_template, set_up_chat
from rekindle.models.files.gguf_check import check_gguf
from rekindle.models.serving_model import LoadProgress, ServerParts, ServingModel
from rekindle.models.source import ModelFile
from rekindle.models.stores import ModelStores, cache_memory_bytes, state_of
from rekindle.supervisor.engine import SupervisedEngine
from rekindle.supervisor.process import EngineProcess


class OpenedEngine(NamedTuple):
    """An engine process that has loaded its model."""

    process: EngineProcess
    model: LoadedModel
    load: Load  # of the next process, if this one dies
    files: list[Path]
    files_state: str  # before the load


OpenedModel = Future[OpenedEngine]


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
        self.infill = vocabulary.infill
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
    settings: Settings,
    file: ModelFile,
    on_progress: Callable[[float], bool],
    process: EngineProcess | None = None,
) -> OpenedModel:
    """Let an engine process load the model while Python imports the other modules.

    `process` is one that was started before, for this model. Raises StartupError for an adapter
    that cannot be read.
    """
    for path in adapter_paths(settings):
        check_gguf(path)
    executor = ThreadPoolExecutor(max_workers=1)
    opened = executor.submit(_open, settings, file, on_progress, process)
    executor.shutdown(wait=False)
    return opened


def _open(
    settings: Settings,
    file: ModelFile,
    on_progress: Callable[[float], bool],
    process: EngineProcess | None,
) -> OpenedEngine:
    load = Load(
        file.path,
        settings.engine,
        logging.getLogger("rekindle").getEffectiveLevel(),
        settings.placement,
        cache_memory_bytes(settings.cache),
    )
    files = [*file.files, *adapter_paths(settings)]
    state = state_of(files)
    process = process or EngineProcess()
    try:
        model = process.load(load, on_progress)
        _check_files(files, state)
        return OpenedEngine(process, model, _as_loaded(load, model), files, state)
    except EngineDied as error:
        process.close()
        raise StartupError(error.message) from error
    except BaseException:
        process.close()
        raise


def adapter_paths(settings: Settings) -> list[Path]:
    return [each.path for each in adapter_files(settings.placement)]


def _as_loaded(load: Load, model: LoadedModel) -> Load:
    """Return the order that loads the model in the same way, however much memory is free then."""
    return Load(
        load.path,
        replace(
            load.engine,
            ctx_size=model.ctx_size,
            ubatch_size=model.ubatch_size,
            gpu_layers=model.gpu_layers,
        ),
        load.log_level,
        replace(
            load.placement,
            n_cpu_moe=model.n_cpu_moe,
            device=model.device,
            tensor_split=model.tensor_split,
            fit=Fit.OFF,
        ),
    )


def _check_files(files: Sequence[Path], state: str) -> None:
    """Raise StartupError if the files are not those of `state`."""
    if state_of(files) != state:
        has_adapters = " or one of its adapters" if len(files) > 1 else ""
        raise StartupError(
            f"The model file {files[0]}{has_adapters} has changed since it was loaded. Unload the"
            " model and load it again."
        )


def load_llama(
    parts: ServerParts,
    name: str,
    file: ModelFile,
    stores: ModelStores,
    progress: LoadProgress,
    opened: OpenedModel | None = None,
) -> ServingModel:
    """Load a GGUF file into llama.cpp. Blocking. Raises StartupError and EngineDied.

    `opened`: the engine process that `open_ahead` has started.
    """
    opened = opened or open_ahead(parts.settings, file, progress.on_weights)
    try:
        weights = stores.weights(file, progress.on_digest)
        adapters = stores.adapters(adapter_paths(parts.settings))
        vocabulary = VocabularyFile(file.path)
    except BaseException:
        opened.add_done_callback(_close_opened)
        raise
    try:
        try:
            # While the engine process loads the weights.
            read = read_template(
                parts.settings, name, vocabulary.chat_template, vocabulary.vocabulary
            )
        except BaseException:
            opened.add_done_callback(_close_opened)
            raise
        engine = opened.result()
        try:
            return _assemble(parts, name, file, stores, weights, adapters, vocabulary, read, engine)
        except BaseException:
            engine.process.close()
            stores.close(CacheCounters(), {})
            raise
    except BaseException:
        vocabulary.close()
        raise


def _close_opened(opened: OpenedModel) -> None:
    if opened.exception() is None:
        opened.result().process.close()


def _assemble(
    parts: ServerParts,
    name: str,
    file: ModelFile,
    stores: ModelStores,
    weights: str,
    adapters: tuple[str, ...],
    vocabulary_file: VocabularyFile,
    read: ReadTemplate,
    opened: OpenedEngine,
) -> ServingModel:
    settings, model = parts.settings, opened.model
    begin = Begin(weights, settings.cache, stores.memory_share(), adapters)
    opened.process.send(begin)
    engine = SupervisedEngine(
        opened.process,
        model,
        opened.load,
        begin,
        start_process=EngineProcess,
        check_files=partial(_check_files, opened.files, opened.files_state),
        queue_size=settings.engine.queue_size,
        hang_seconds=settings.engine.engine_hang,
    )
    stores.follow_budget(engine.set_memory_budget)
    vocabulary = vocabulary_file.vocabulary
    tokenizer = ClosableTokenizer(vocabulary)
    responder = set_up_chat(
        parts,
        name,
        engine,
        tokenizer,
        stores.open_turns(weights),
        read=read,
        default_sampling=model.default_sampling,
        embedding_end_token=vocabulary.added_eos_token,
        rerank_format=RerankFormat(
            vocabulary_file.rerank_template,
            vocabulary.marks_between_texts,
            vocabulary.marks_behind_texts,
        ),
        can_rewarm=True,
    )
    card = ModelCard(
        id=name,
        path=str(file.path),
        created=int(time.time()),
        n_ctx=model.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_vocab=tokenizer.n_vocab,
        vocab_type=vocabulary.kind,
        n_embd=model.n_embd,
        n_params=model.n_params,
        size_bytes=model.size_bytes,
        architecture=model.architecture,
        quantization=model.quantization,
        chat_template=read.template.source,
        bos_text=tokenizer.bos_text,
        eos_text=tokenizer.eos_text,
        adapters=tuple(
            LoraCard(str(each.path), each.scale, each.task_name, each.prompt_prefix)
            for each in model.adapters
        ),
    )

    def close() -> None:
        engine.close()
        status = engine.status()
        counters = status.cache.counters if status.cache is not None else CacheCounters()
        stores.close(counters, status.process.restarts if status.process is not None else {})
        tokenizer.close()
        vocabulary_file.close()

    return ServingModel(
        card,
        responder,
        engine,
        n_bytes=lambda: model.size_bytes + engine.row_bytes * model.n_cells,
        close=close,
    )
