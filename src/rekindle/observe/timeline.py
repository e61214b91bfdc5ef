"""Spans of time of the stages of a request, for `rekindle bench --timeline`.

A table names the function of each stage. `install` replaces each by one that also notes when it
began and ended; without `install`, nothing is changed and nothing costs time. The server and its
engine process write files of their own, with the clock of the machine.
"""

import functools
import importlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER_VARIABLE = "REKINDLE_TIMELINE"  # the folder of the files; read by engine processes


class Probe(NamedTuple):
    stage: str
    module: str
    name: str  # of the function, with its class
    counts: int | None = None  # the position of an argument with the tokens, which are counted


SERVER_PROBES = (
    Probe("read body", "rekindle.api.body", "_checked"),
    Probe("render", "rekindle.chat.prompt.prompt", "PromptBuilder.from_conversation"),
    Probe("tokenise", "rekindle.llama.tokenizer.vocabulary", "Vocabulary.tokenize"),
    Probe("store turns", "rekindle.write_behind", "WriteBehind.put"),
)
ENGINE_PROBES = (
    Probe("step", "rekindle.engine.loop", "EngineLoop.step"),
    Probe("wait for orders", "rekindle.engine.loop", "EngineLoop.receive"),
    Probe("look up", "rekindle.engine.loop", "EngineLoop._accept"),
    Probe("look up", "rekindle.engine.scheduler.admission", "Admission.admit_waiting"),
    Probe("restore", "rekindle.engine.scheduler.admission", "Admission.advance_restores"),
    Probe("plan", "rekindle.engine.scheduler.batch_runner", "BatchRunner._plan"),
    Probe("batch", "rekindle.llama.context", "LlamaBackend.decode", 1),
    Probe("batch", "rekindle.llama.context", "LlamaBackend.wait"),
    Probe("sample", "rekindle.engine.replies", "ReplySampler.sample"),
    Probe("sample", "rekindle.engine.replies", "ReplySampler.sample_ends"),
    Probe("deliver", "rekindle.engine.orders", "Outbox.flush"),
    Probe("export", "rekindle.engine.export.slot_saver", "SlotSaver.save_some"),
    Probe("export", "rekindle.engine.export.slot_saver", "SlotSaver.take_checkpoint"),
    Probe("write", "rekindle.cache.stores.transfers", "EntryTransfers._write"),
    Probe("read", "rekindle.cache.stores.transfers", "EntryTransfers._read"),
)


class StageSpan(NamedTuple):
    """One call of a stage's function. Times are those of `time.monotonic`."""

    stage: str
    began: float
    ended: float
    thread: str
    n_tokens: int = 0


def install(folder: Path, process: str, probes: tuple[Probe, ...]) -> None:
    """Note the calls of these functions from now on, in a file of this process."""
    name = f"{process}-{os.getpid()}.jsonl"
    file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(span: StageSpan) -> None:
        # One short write: a process that is killed has written all its spans.
        os.write(file, json.dumps(span).encode() + b"\n")

    for probe in probes:
        owner, name = _owner_of(probe)
        setattr(owner, name, _noted(getattr(owner, name), probe, note))


def read_spans(folder: Path) -> dict[str, list[StageSpan]]:
    """Return the spans of each process, by their beginning. A line that is cut off is left out."""
    found: dict[str, list[StageSpan]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        spans = [StageSpan(*json.loads(line)) for line in lines if line.endswith("\n")]
        found[path.stem] = sorted(spans, key=lambda span: (span.began, -span.ended))
    return found


def _owner_of(probe: Probe) -> tuple[Any, str]:
    """Return the module or class that has the function, and the function's name there."""
    owner: Any = importlib.import_module(probe.module)
    *classes, name = probe.name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name


def _noted(
    function: Callable[..., Any], probe: Probe, note: Callable[[StageSpan], None]
) -> Callable[..., Any]:
    assert not inspect.iscoroutinefunction(function)  # the thread would do other things meanwhile

    @functools.wraps(function)
    def noted(*arguments: Any, **named: Any) -> Any:
        n_tokens = 0 if probe.counts is None else len(arguments[probe.counts])
        began = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            thread = threading.current_thread().name
            note(StageSpan(probe.stage, began, time.monotonic(), thread, n_tokens))

    return noted
