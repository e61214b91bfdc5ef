"""Settings of the engine."""

# ruff: noqa: FBT003, RUF009 - `setting` declares a dataclass field, and a default may be a bool.

from dataclasses import dataclass

from rekindle.config.choices import KV_TYPES, EngineKind, FlashAttn, KvType, Speculate
from rekindle.config.declare import setting

# llama.cpp's texts for values: -1 threads are as many as it likes, -1 slots are four.
_OWN_CHOICE = {"-1": None}
_ON_OFF = {
    **dict.fromkeys(("1", "true", "enabled"), FlashAttn.ON),
    **dict.fromkeys(("0", "false", "disabled"), FlashAttn.OFF),
    "-1": FlashAttn.AUTO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    engine: EngineKind = setting(
        EngineKind.LLAMA,
        "Engine: llama.cpp in a process of its own, or vLLM servers given with --upstream.",
        per_model=False,
    )
    upstream: tuple[str, ...] = setting(
        (), "Base URL of a vLLM server; may be repeated.", per_model=False
    )
    ctx_size: int = setting(
        0, "Tokens of context, shared by all running requests; 0: as the model was trained."
    )
    parallel: int = setting(
        4, "Requests that run at the same time.", minimum=1, maximum=64, words={"-1": 4}
    )
    threads: int | None = setting(
        None, "CPU threads. Default: the number of physical cores.", minimum=1, words=_OWN_CHOICE
    )
    threads_batch: int | None = setting(
        None,
        "CPU threads for batches of several tokens, such as prompts. Default: as --threads.",
        minimum=1,
        words=_OWN_CHOICE,
    )
    gpu_layers: int = setting(
        -1,
        "Number of layers on the GPU; -1, all or auto: all.",
        minimum=-1,
        words={"all": -1, "auto": -1},
    )
    batch_size: int = setting(2048, "Maximum tokens in one call of llama.cpp.", minimum=1)
    ubatch_size: int = setting(
        0,
        "Maximum tokens that llama.cpp computes at once; 0: 512, or with one GPU and --fit the"
        " largest of 2048, 1024 and 512 that fits.",
    )
    flash_attn: FlashAttn = setting(FlashAttn.AUTO, "Flash attention.", words=_ON_OFF)
    cache_type_k: KvType = setting(KvType.F16, f"Type of the K rows of the KV cache: {KV_TYPES}.")
    cache_type_v: KvType = setting(KvType.F16, f"Type of the V rows of the KV cache: {KV_TYPES}.")
    swa_full: bool = setting(
        False, "Keep all rows of sliding-window layers, not only those in the window."
    )
    speculate: Speculate = setting(
        Speculate.AUTO, "Speculative decoding: draft tokens from all text that was seen before."
    )
    queue_size: int = setting(64, "Requests that may wait for a slot; further ones get a 429.")
    engine_hang: float = setting(
        120.0,
        "Seconds without progress after which an engine process is restarted; 0: never.",
    )
