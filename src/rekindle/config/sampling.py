"""Sampling of requests that do not set it. The settings replace the model's own defaults."""

from dataclasses import dataclass

from rekindle.config.declare import setting

MOST_PENALTY = 100.0  # picked; far beyond any use
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
