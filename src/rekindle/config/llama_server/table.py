"""Every flag of llama-server, and what becomes of it here.

docs/from-llama-server.md has the same table. tests/config/llama_server_flags.txt lists the names
that llama.cpp's own help has. A few names are of older versions of llama.cpp.
"""

from rekindle.config.llama_server.draft_flags import DRAFT_FLAGS, NO_DRAFT_MODEL
from rekindle.config.llama_server.flag import LlamaFlag, no_effect, ours, refused

_CPU = "use taskset, nice or numactl around the server"
_NO_MEDIA = (
    "This server does not read images, audio or video; --media says what becomes of them in"
    " requests."
)
_HUB = "Use -hf with the repository of the model."
_PER_REQUEST = "Send it with each request."
_NO_TOOLS = "This server runs no tools: the client does."
_PROXY = "Use a reverse proxy in front of the server."
_LOG = "the log has one format, on stderr"
_KERNELS = "llama.cpp's default is used"

LLAMA_FLAGS: tuple[LlamaFlag, ...] = (
    # The model
    ours("model", "-m --model", "LLAMA_ARG_MODEL"),
    ours("model", "-hf -hfr --hf-repo", "LLAMA_ARG_HF_REPO"),
    ours("model", "-hff --hf-file", "LLAMA_ARG_HF_FILE"),
    refused("-hft --hf-token", "Set the variable HF_TOKEN."),
    refused(
        "-mu --model-url", "Download the file, and give its path as MODEL.", "LLAMA_ARG_MODEL_URL"
    ),
    refused("-dr --docker-repo", _HUB, "LLAMA_ARG_DOCKER_REPO"),
    refused("--offline", "Set the variable HF_HUB_OFFLINE=1.", "LLAMA_ARG_OFFLINE"),
    ours("alias", "-a --alias", "LLAMA_ARG_ALIAS"),
    no_effect("--tags", 1, "models have no tags", "LLAMA_ARG_TAGS"),
    ours("models_dir", "--models-dir", "LLAMA_ARG_MODELS_DIR"),
    refused(
        "--models-preset",
        'Write [models."NAME"] sections into a TOML file, and give it with --config.',
        "LLAMA_ARG_MODELS_PRESET",
    ),
    no_effect(
        "--models-max",
        1,
        "loaded models are bounded by their memory (--models-memory)",
        "LLAMA_ARG_MODELS_MAX",
    ),
    no_effect(
        "--models-autoload",
        0,
        "models are always loaded on first use",
        "LLAMA_ARG_MODELS_AUTOLOAD",
    ),
    refused("--no-models-autoload", "Every model is loaded on first use."),
    ours("keep_alive", "--sleep-idle-seconds"),
    no_effect("--check-tensors", 0, "damaged files are found when they are loaded"),
    refused("--override-kv", "Change the GGUF file itself, for instance with gguf_set_metadata."),
    refused("-mm --mmproj", _NO_MEDIA, "LLAMA_ARG_MMPROJ"),
    refused("-mmu --mmproj-url", _NO_MEDIA, "LLAMA_ARG_MMPROJ_URL"),
    no_effect(
        "--mmproj-auto / --no-mmproj --no-mmproj-auto",
        0,
        "images, audio and video are not read",
        "LLAMA_ARG_MMPROJ_AUTO",
    ),
    no_effect(
        "--mmproj-offload / --no-mmproj-offload",
        0,
        "images, audio and video are not read",
        "LLAMA_ARG_MMPROJ_OFFLOAD",
    ),
    refused("-mmdev --mmproj-device", _NO_MEDIA),
    refused("--image-min-tokens", _NO_MEDIA, "LLAMA_ARG_IMAGE_MIN_TOKENS"),
    refused("--image-max-tokens", _NO_MEDIA, "LLAMA_ARG_IMAGE_MAX_TOKENS"),
    refused("--mtmd-batch-max-tokens", _NO_MEDIA, "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    refused("--video-fps", _NO_MEDIA, "LLAMA_ARG_VIDEO_FPS"),
    refused("--video-timestamp-interval", _NO_MEDIA, "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    refused("--video-ffmpeg-dir", _NO_MEDIA, "LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    refused("--media-path", _NO_MEDIA),
    # The context
    ours("ctx_size", "-c --ctx-size", "LLAMA_ARG_CTX_SIZE"),
    ours("parallel", "-np --parallel", "LLAMA_ARG_N_PARALLEL"),
    ours("batch_size", "-b --batch-size", "LLAMA_ARG_BATCH"),
    ours("ubatch_size", "-ub --ubatch-size", "LLAMA_ARG_UBATCH"),
    ours("flash_attn", "-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", bare="on"),
    ours("cache_type_k", "-ctk --cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"),
    ours("cache_type_v", "-ctv --cache-type-v", "LLAMA_ARG_CACHE_TYPE_V"),
    ours("swa_full", "--swa-full", "LLAMA_ARG_SWA_FULL"),
    no_effect(
        "-kvu --kv-unified / -no-kvu --no-kv-unified",
        0,
        "all requests share one context, and each may use all of it",
        "LLAMA_ARG_KV_UNIFIED",
    ),
    refused(
        "--kv-unified-per-slot",
        "All requests share one context: give its size with -c.",
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    no_effect(
        "-cb --cont-batching / -nocb --no-cont-batching",
        0,
        "requests are always batched",
        "LLAMA_ARG_CONT_BATCHING",
    ),
    no_effect("-dt --defrag-thold", 1, "the context needs no such care", "LLAMA_ARG_DEFRAG_THOLD"),
    refused(
        "--context-shift",
        "Use --overflow trim, which drops the oldest turns.",
        "LLAMA_ARG_CONTEXT_SHIFT",
    ),
    no_effect("--no-context-shift", 0, "contexts are never shifted"),
    no_effect("--keep", 1, "contexts are never shifted"),
    no_effect("--warmup / --no-warmup", 0, "the first request warms the model up"),
    # Where the model is computed
    ours("threads", "-t --threads", "LLAMA_ARG_THREADS"),
    ours("threads_batch", "-tb --threads-batch"),
    ours("gpu_layers", "-ngl --gpu-layers --n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS"),
    ours("device", "-dev --device", "LLAMA_ARG_DEVICE"),
    ours("split_mode", "-sm --split-mode", "LLAMA_ARG_SPLIT_MODE"),
    ours("tensor_split", "-ts --tensor-split", "LLAMA_ARG_TENSOR_SPLIT"),
    ours("main_gpu", "-mg --main-gpu", "LLAMA_ARG_MAIN_GPU"),
    ours("override_tensor", "-ot --override-tensor", "LLAMA_ARG_OVERRIDE_TENSOR"),
    ours("cpu_moe", "-cmoe --cpu-moe", "LLAMA_ARG_CPU_MOE"),
    ours("n_cpu_moe", "-ncmoe --n-cpu-moe", "LLAMA_ARG_N_CPU_MOE"),
    refused("-ncffn --n-cpu-ffn", "Use -ot with a pattern of tensors.", "LLAMA_ARG_N_CPU_FFN"),
    ours("kv_offload", "-kvo --kv-offload / -nkvo --no-kv-offload", "LLAMA_ARG_KV_OFFLOAD"),
    ours("mmap", "--mmap / --no-mmap", "LLAMA_ARG_MMAP"),
    ours("mlock", "--mlock", "LLAMA_ARG_MLOCK"),
    refused(
        "-lm --load-mode",
        "Use --mmap, --no-mmap and --mlock.",
        "LLAMA_ARG_LOAD_MODE",
        accepted="auto",
    ),
    no_effect("-lzm --lazy-mode", 1, _KERNELS, "LLAMA_ARG_LAZY_MODE"),
    ours("numa", "--numa", "LLAMA_ARG_NUMA"),
    ours("fit", "-fit --fit", "LLAMA_ARG_FIT"),
    ours("fit_target", "-fitt --fit-target", "LLAMA_ARG_FIT_TARGET"),
    ours("fit_ctx", "-fitc --fit-ctx", "LLAMA_ARG_FIT_CTX"),
    ours("lora", "--lora"),
    ours("lora_scaled", "--lora-scaled"),
    refused("--lora-init-without-apply", "Adapters are applied at the start: use --lora."),
    refused("--control-vector", "Control vectors are not supported."),
    refused("--control-vector-scaled", "Control vectors are not supported."),
    refused("--control-vector-layer-range", "Control vectors are not supported."),
    ours("rope_scaling", "--rope-scaling", "LLAMA_ARG_ROPE_SCALING_TYPE"),
    ours("rope_scale", "--rope-scale", "LLAMA_ARG_ROPE_SCALE"),
    ours("rope_freq_base", "--rope-freq-base", "LLAMA_ARG_ROPE_FREQ_BASE"),
    ours("rope_freq_scale", "--rope-freq-scale", "LLAMA_ARG_ROPE_FREQ_SCALE"),
    ours("yarn_orig_ctx", "--yarn-orig-ctx", "LLAMA_ARG_YARN_ORIG_CTX"),
    ours("yarn_ext_factor", "--yarn-ext-factor", "LLAMA_ARG_YARN_EXT_FACTOR"),
    ours("yarn_attn_factor", "--yarn-attn-factor", "LLAMA_ARG_YARN_ATTN_FACTOR"),
    ours("yarn_beta_slow", "--yarn-beta-slow", "LLAMA_ARG_YARN_BETA_SLOW"),
    ours("yarn_beta_fast", "--yarn-beta-fast", "LLAMA_ARG_YARN_BETA_FAST"),
    no_effect("-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll", 1, _CPU),
    no_effect("-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch", 1, _CPU),
    no_effect("--prio-batch --poll-batch", 1, _CPU),
    no_effect("--repack / -nr --no-repack", 0, _KERNELS, "LLAMA_ARG_REPACK"),
    no_effect("--no-host", 0, _KERNELS, "LLAMA_ARG_NO_HOST"),
    no_effect("--op-offload / --no-op-offload", 0, _KERNELS),
    refused("--rpc", "Computing on other machines is not supported.", "LLAMA_ARG_RPC"),
    refused("--list-devices", "The log of the start names the devices, with --log-level debug."),
    # The cache
    ours("cache_prompt", "--cache-prompt / --no-cache-prompt", "LLAMA_ARG_CACHE_PROMPT"),
    ours("cache_ram", "-cram --cache-ram", "LLAMA_ARG_CACHE_RAM"),
    no_effect(
        "--cache-reuse", 1, "every stored prefix is found by its tokens", "LLAMA_ARG_CACHE_REUSE"
    ),
    no_effect(
        "-ctxcp --ctx-checkpoints --swa-checkpoints",
        1,
        "checkpoints are taken where prompts diverge, and stored",
        "LLAMA_ARG_CTX_CHECKPOINTS",
    ),
    no_effect(
        "-cms --checkpoint-min-step",
        1,
        "checkpoints are taken where prompts diverge, and stored",
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    ),
    no_effect(
        "--cache-idle-slots / --no-cache-idle-slots",
        0,
        "rows of idle slots are always stored",
        "LLAMA_ARG_CACHE_IDLE_SLOTS",
    ),
    no_effect(
        "-sps --slot-prompt-similarity", 1, "every request finds the longest prefix in any slot"
    ),
    no_effect("--slot-save-path", 1, "prefixes are stored without being asked for (--cache-dir)"),
    no_effect("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", 1, NO_DRAFT_MODEL),
    # Replies
    ours("n_predict", "-n --predict --n-predict", "LLAMA_ARG_N_PREDICT"),
    ours("temperature", "--temp --temperature", "LLAMA_ARG_TEMPERATURE"),
    ours("top_k", "--top-k", "LLAMA_ARG_TOP_K"),
    ours("top_p", "--top-p", "LLAMA_ARG_TOP_P"),
    ours("min_p", "--min-p", "LLAMA_ARG_MIN_P"),
    ours("typical_p", "--typical --typical-p"),
    ours("repeat_penalty", "--repeat-penalty", "LLAMA_ARG_REPEAT_PENALTY"),
    ours("repeat_last_n", "--repeat-last-n"),
    ours("presence_penalty", "--presence-penalty", "LLAMA_ARG_PRESENCE_PENALTY"),
    ours("frequency_penalty", "--frequency-penalty", "LLAMA_ARG_FREQUENCY_PENALTY"),
    ours("seed", "-s --seed"),
    ours("ignore_eos", "--ignore-eos"),
    ours("samplers", "--samplers"),
    refused("--sampler-seq --sampling-seq", "Use --samplers with the names of the samplers."),
    ours("top_n_sigma", "--top-nsigma --top-n-sigma"),
    ours("xtc_probability", "--xtc-probability"),
    ours("xtc_threshold", "--xtc-threshold"),
    ours("dry_multiplier", "--dry-multiplier"),
    ours("dry_base", "--dry-base"),
    ours("dry_allowed_length", "--dry-allowed-length"),
    ours("dry_penalty_last_n", "--dry-penalty-last-n"),
    ours("dry_sequence_breakers", "--dry-sequence-breaker"),
    ours("adaptive_target", "--adaptive-target"),
    ours("adaptive_decay", "--adaptive-decay"),
    ours("dynatemp_range", "--dynatemp-range"),
    ours("dynatemp_exponent", "--dynatemp-exp"),
    ours("mirostat", "--mirostat"),
    ours("mirostat_eta", "--mirostat-lr"),
    ours("mirostat_tau", "--mirostat-ent"),
    refused("-l --logit-bias", _PER_REQUEST),
    refused("--grammar --grammar-file -j --json-schema -jf --json-schema-file", _PER_REQUEST),
    refused("-r --reverse-prompt", "Send `stop` with each request."),
    refused("-sp --special", "Control tokens are never part of a reply's text."),
    no_effect("-bs --backend-sampling", 0, _KERNELS, "LLAMA_ARG_BACKEND_SAMPLING"),
    refused("-p --prompt -f --file -bf --binary-file", "Send prompts as requests."),
    no_effect("-e --escape / --no-escape", 0, "there is no prompt on the command line"),
    no_effect("--spm-infill", 0, "the model's own order is used"),
    # Conversations
    no_effect("--jinja", 0, "templates are always Jinja", "LLAMA_ARG_JINJA"),
    refused("--no-jinja", "Templates are always Jinja, also the built-in --chat-template chatml."),
    ours("chat_template", "--chat-template", "LLAMA_ARG_CHAT_TEMPLATE"),
    ours("chat_template", "--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    ours("chat_template_kwargs", "--chat-template-kwargs", "LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    refused(
        "--reasoning-format",
        "Reasoning is always separate from the text, as with `deepseek`.",
        "LLAMA_ARG_THINK",
        accepted="auto deepseek",
    ),
    refused(
        "-rea --reasoning",
        "Use --reasoning-budget 0 for off, and --chat-template-kwargs"
        """ '{"enable_thinking": true}' for on.""",
        "LLAMA_ARG_REASONING",
        accepted="auto",
    ),
    refused(
        "--reasoning-effort",
        """Use --chat-template-kwargs '{"reasoning_effort": "high"}'.""",
        "LLAMA_ARG_REASONING_EFFORT",
        accepted="default",
    ),
    ours("reasoning_budget", "--reasoning-budget", "LLAMA_ARG_THINK_BUDGET"),
    refused(
        "--reasoning-budget-message",
        "Reasoning that reaches its budget is closed without a message.",
        "LLAMA_ARG_THINK_BUDGET_MESSAGE",
    ),
    no_effect(
        "--reasoning-preserve / --no-reasoning-preserve",
        0,
        "--reasoning-history says which reasoning is kept",
        "LLAMA_ARG_REASONING_PRESERVE",
    ),
    refused(
        "--skip-chat-parsing",
        "Use /v1/completions for replies that are not parsed.",
        "LLAMA_ARG_SKIP_CHAT_PARSING",
    ),
    no_effect("--no-skip-chat-parsing", 0, "replies in chats are always parsed"),
    no_effect(
        "--prefill-assistant / --no-prefill-assistant",
        0,
        "a request says whether its last message is continued (`continue_final_message`)",
        "LLAMA_ARG_PREFILL_ASSISTANT",
    ),
    no_effect(
        "--embedding --embeddings", 0, "/v1/embeddings is always there", "LLAMA_ARG_EMBEDDINGS"
    ),
    no_effect("--rerank --reranking", 0, "models that rank do so", "LLAMA_ARG_RERANKING"),
    refused("--pooling", "The model's own pooling is used.", "LLAMA_ARG_POOLING"),
    refused("--embd-normalize", "Embeddings always have length 1.", accepted="2"),
    # The server
    ours("host", "--host", "LLAMA_ARG_HOST"),
    ours("port", "--port", "LLAMA_ARG_PORT"),
    refused("--reuse-port", _PROXY, "LLAMA_ARG_REUSE_PORT"),
    ours("api_key", "--api-key", "LLAMA_API_KEY"),
    ours("api_key_file", "--api-key-file", "LLAMA_ARG_API_KEY_FILE"),
    refused("--ssl-key-file", _PROXY, "LLAMA_ARG_SSL_KEY_FILE"),
    refused("--ssl-cert-file", _PROXY, "LLAMA_ARG_SSL_CERT_FILE"),
    refused("--path", _PROXY, "LLAMA_ARG_STATIC_PATH"),
    refused("--api-prefix", _PROXY, "LLAMA_ARG_API_PREFIX"),
    ours("cors", "--cors-origins", "LLAMA_ARG_CORS_ORIGINS"),
    no_effect("--cors-methods", 1, "every method is allowed", "LLAMA_ARG_CORS_METHODS"),
    no_effect("--cors-headers", 1, "every header is allowed", "LLAMA_ARG_CORS_HEADERS"),
    no_effect(
        "--cors-credentials / --no-cors-credentials",
        0,
        "clients send their key in a header",
        "LLAMA_ARG_CORS_CREDENTIALS",
    ),
    no_effect(
        "-to --timeout",
        1,
        "replies have no time limit; --receive-timeout is for slow requests",
        "LLAMA_ARG_TIMEOUT",
    ),
    ours("ping_interval", "--sse-ping-interval", "LLAMA_ARG_SSE_PING_INTERVAL"),
    no_effect("--threads-http", 1, "the server needs no such threads", "LLAMA_ARG_THREADS_HTTP"),
    no_effect("--metrics", 0, "/metrics is always there", "LLAMA_ARG_ENDPOINT_METRICS"),
    no_effect("--props", 0, "POST /props changes nothing", "LLAMA_ARG_ENDPOINT_PROPS"),
    no_effect("--slots", 0, "/slots is always there", "LLAMA_ARG_ENDPOINT_SLOTS"),
    refused("--no-slots", "Use --admin-key: other clients then see only their own requests."),
    no_effect(
        "--ui --webui / --no-ui --no-webui", 0, "/ is the dashboard, without a chat", "LLAMA_ARG_UI"
    ),
    no_effect("--ui-config --webui-config", 1, "/ is the dashboard", "LLAMA_ARG_UI_CONFIG"),
    no_effect(
        "--ui-config-file --webui-config-file", 1, "/ is the dashboard", "LLAMA_ARG_UI_CONFIG_FILE"
    ),
    refused("--ui-mcp-proxy --webui-mcp-proxy", _NO_TOOLS, "LLAMA_ARG_UI_MCP_PROXY"),
    no_effect("--no-ui-mcp-proxy --no-webui-mcp-proxy", 0, "there is no such proxy"),
    refused("--tools", _NO_TOOLS, "LLAMA_ARG_TOOLS"),
    refused("--tools-runtime", _NO_TOOLS, "LLAMA_ARG_TOOLS_RUNTIME"),
    refused("--mcp-servers-config", _NO_TOOLS, "LLAMA_ARG_MCP_SERVERS_CONFIG"),
    refused("--mcp-servers-json", _NO_TOOLS, "LLAMA_ARG_MCP_SERVERS_JSON"),
    refused("-ag --agent", _NO_TOOLS, "LLAMA_ARG_AGENT"),
    no_effect("-no-ag --no-agent", 0, "this server runs no tools"),
    # The log
    ours("log_level", "-v --verbose --log-verbose", fixed="debug"),
    ours("log_level", "--log-disable", fixed="error"),
    ours("log_level", "-lv --verbosity --log-verbosity", "LLAMA_ARG_LOG_VERBOSITY"),
    refused("--log-file", "Send stderr to a file: 2>FILE.", "LLAMA_ARG_LOG_FILE"),
    refused("--log-jsonl", "Use --trace FILE: one line of JSON per reply.", "LLAMA_ARG_LOG_JSONL"),
    no_effect("--no-log-jsonl", 0, _LOG),
    refused("--log-prompts-dir", "Use --trace FILE with --trace-prompts."),
    no_effect("--log-colors", 1, _LOG, "LLAMA_ARG_LOG_COLORS"),
    no_effect("--log-prefix / --no-log-prefix", 0, _LOG, "LLAMA_ARG_LOG_PREFIX"),
    no_effect("--log-timestamps / --no-log-timestamps", 0, _LOG, "LLAMA_ARG_LOG_TIMESTAMPS"),
    no_effect("--perf / --no-perf", 0, "timings are in every reply", "LLAMA_ARG_PERF"),
    # Commands and presets
    refused("--usage", "Use --help."),
    refused("--version", "Use rekindle --version."),
    refused("-cl --cache-list", "Use rekindle cache ls for stored prefixes."),
    refused("--completion-bash", "Use rekindle --install-completion."),
    refused(
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default"
        " --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default"
        " --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default"
        " --vision-gemma-12b-default",
        _HUB,
    ),
    *DRAFT_FLAGS,
)
