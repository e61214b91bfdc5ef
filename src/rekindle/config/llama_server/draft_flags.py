"""Flags of llama-server for speculative decoding."""

from rekindle.config.llama_server.flag import LlamaFlag, no_effect

NO_DRAFT_MODEL = "tokens are drafted without a second model, as many as pay (--speculate)"

DRAFT_FLAGS: tuple[LlamaFlag, ...] = (
    no_effect("--spec-type", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_TYPE"),
    no_effect("--spec-default", 0, NO_DRAFT_MODEL),
    no_effect(
        "-md --model-draft --spec-draft-model", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_DRAFT_MODEL"
    ),
    no_effect(
        "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
        1,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO",
    ),
    no_effect("--draft --draft-n --draft-max", 1, NO_DRAFT_MODEL, "LLAMA_ARG_DRAFT_MAX"),
    no_effect("--draft-min --draft-n-min", 1, NO_DRAFT_MODEL, "LLAMA_ARG_DRAFT_MIN"),
    no_effect("--spec-draft-n-max", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    no_effect("--spec-draft-n-min", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    no_effect("--draft-p-min --spec-draft-p-min", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    no_effect(
        "--draft-p-split --spec-draft-p-split", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"
    ),
    no_effect(
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
        1,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    ),
    no_effect(
        "-ctkd --cache-type-k-draft --spec-draft-type-k",
        1,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
    no_effect(
        "-ctvd --cache-type-v-draft --spec-draft-type-v",
        1,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
    no_effect(
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe",
        0,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
    ),
    no_effect(
        "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe",
        1,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
    ),
    no_effect(
        "--spec-draft-backend-sampling / --no-spec-draft-backend-sampling",
        0,
        NO_DRAFT_MODEL,
        "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
    ),
    no_effect(
        "-devd --device-draft --spec-draft-device -otd --override-tensor-draft"
        " --spec-draft-override-tensor -td --threads-draft --spec-draft-threads"
        " -tbd --threads-batch-draft --spec-draft-threads-batch",
        1,
        NO_DRAFT_MODEL,
    ),
    no_effect(
        "-Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd --cpu-range-draft --spec-draft-cpu-range"
        " --cpu-strict-draft --spec-draft-cpu-strict --prio-draft --spec-draft-prio --poll-draft"
        " --spec-draft-poll -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch"
        " --cpu-strict-batch-draft --spec-draft-cpu-strict-batch --prio-batch-draft"
        " --spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch",
        1,
        NO_DRAFT_MODEL,
    ),
    no_effect(
        "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match"
        " --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits"
        " --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits"
        " --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits"
        " --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        1,
        NO_DRAFT_MODEL,
    ),
    no_effect("--spec-synth-len", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_SYNTH_LEN"),
    no_effect("--spec-synth-rates", 1, NO_DRAFT_MODEL, "LLAMA_ARG_SPEC_SYNTH_RATES"),
)
