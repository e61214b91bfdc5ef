"""Sampling of requests that do not set it. The settings replace the model's own defaults."""

from dataclasses import dataclass

from rekindle.config.declare import setting

MOST_PENALTY = 100.0  # picked; far beyond any use
MOST = 1000.0  # of other values; picked likewise
RANDOM_SEED = -1
MAX_SEED = 2**32 - 1  # llama.cpp's seeds are 32 bits wide, and the last one means "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Fields are named as in `generation.request.Sampling`. None: the model's own default."""

    n_predict: int = setting(
        -1, "Most tokens of a reply, unless the request says; -1: no limit.", minimum=-1
    )
    temperature: float | None = setting(
        None, "Temperature; 0: the likeliest token.", maximum=100, metavar="N"
    )
    top_k: int | None = setting(
        None, "Sample among so many of the likeliest tokens; 0: all.", words={"-1": 0}
    )
    top_p: float | None = setting(
        None,
        "Sample among the likeliest tokens that make up this probability.",
        maximum=1,
        metavar="N",
    )
    min_p: float | None = setting(
        None,
        "Drop tokens with less than this part of the highest probability.",
        maximum=1,
        metavar="N",
    )
    typical_p: float | None = setting(
        None, "Locally typical sampling with this probability; 1: off.", maximum=1, metavar="N"
    )
    repeat_penalty: float | None = setting(
        None,
        "Penalty on repeated tokens; 1: none.",
        minimum=0.01,
        maximum=MOST_PENALTY,
        metavar="N",
    )
    repeat_last_n: int | None = setting(
        None, "Last tokens that penalties look at; -1: the whole context.", minimum=-1
    )
    frequency_penalty: float | None = setting(
        None,
        "Penalty on a token for each time it occurred.",
        minimum=-MOST_PENALTY,
        maximum=MOST_PENALTY,
        metavar="N",
    )
    presence_penalty: float | None = setting(
        None,
        "Penalty on each token that occurred.",
        minimum=-MOST_PENALTY,
        maximum=MOST_PENALTY,
        metavar="N",
    )
    seed: int | None = setting(
        None, "Seed; -1: another one for each request.", minimum=RANDOM_SEED, maximum=MAX_SEED
    )
    ignore_eos: bool | None = setting(None, "Continue after the model's end of text.")
    samplers: str | None = setting(
        None, "Samplers in their order, separated by semicolons: see the docs of the HTTP API."
    )
    dynatemp_range: float | None = setting(
        None, "Range of the dynamic temperature; 0: off.", maximum=MOST, metavar="N"
    )
    dynatemp_exponent: float | None = setting(
        None, "Exponent of the dynamic temperature.", maximum=MOST, metavar="N"
    )
    top_n_sigma: float | None = setting(
        None,
        "Sample among tokens within so many standard deviations of the best; -1: off.",
        minimum=-1,
        maximum=MOST,
        metavar="N",
    )
    xtc_probability: float | None = setting(
        None, "Chance of removing the likeliest tokens (XTC); 0: off.", maximum=1, metavar="N"
    )
    xtc_threshold: float | None = setting(
        None, "Probability from which XTC removes tokens; above 0.5: off.", maximum=1, metavar="N"
    )
    dry_multiplier: float | None = setting(
        None,
        "Strength of the penalty on repetitions (DRY); 0: off.",
        maximum=MOST,
        metavar="N",
    )
    dry_base: float | None = setting(
        None, "Base of the penalty of DRY.", minimum=1, maximum=MOST, metavar="N"
    )
    dry_allowed_length: int | None = setting(None, "Longest repetition without a penalty of DRY.")
    dry_penalty_last_n: int | None = setting(
        None, "Last tokens that DRY looks at; -1: the whole context.", minimum=-1
    )
    dry_sequence_breakers: tuple[str, ...] = setting(
        (),
        "Text that ends a repetition for DRY; may be repeated. none: there is none.",
        may_be_blank=True,
    )
    mirostat: int | None = setting(
        None, "Mirostat, version 1 or 2, in place of other samplers; 0: off.", maximum=2
    )
    mirostat_eta: float | None = setting(
        None, "Learning rate of Mirostat.", maximum=MOST, metavar="N"
    )
    mirostat_tau: float | None = setting(
        None, "Target entropy of Mirostat.", maximum=MOST, metavar="N"
    )
    adaptive_target: float | None = setting(
        None,
        "Probability that adaptive-p aims at; negative: off.",
        minimum=-1,
        maximum=1,
        metavar="N",
    )
    adaptive_decay: float | None = setting(
        None, "Memory of adaptive-p, 0 to 0.99.", maximum=0.99, metavar="N"
    )
