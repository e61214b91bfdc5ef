"""vLLM on the CPU with prefix caching, behind the llama-server flags we use.

It reads no GGUF on a CPU, so the weights are a folder as Hugging Face has it.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32  # the least that its attention on CPUs likes; smaller blocks are found more often
BF16_BYTES = 2
DEFAULT_CACHE_MIB = 2048
MIB = 2**20


def main() -> None:
    arguments = _parse()
    config = json.loads((arguments.weights / "config.json").read_text("utf-8"))
    command = [
        *(str(arguments.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(arguments.weights), "--served-model-name", arguments.weights.name),
        *("--dtype", "bfloat16", "--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", str(arguments.ctx_size), "--max-num-seqs", str(arguments.parallel)),
        *("--max-num-batched-tokens", str(arguments.batch_size)),
        *("--kv-cache-memory-bytes", str(_cache_bytes(arguments, config))),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--host", arguments.host, "--port", str(arguments.port)),
    ]
    if arguments.chat_template is not None:
        command += ["--chat-template", str(arguments.chat_template)]
    os.execve(command[0], command, os.environ | _environment(arguments))


def _cache_bytes(arguments: argparse.Namespace, config: dict[str, Any]) -> int:
    """Return the memory of a context and of a cache beside it: vLLM has one pool for both."""
    heads = config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row_bytes = 2 * BF16_BYTES * heads * width * config["num_hidden_layers"]
    return int(row_bytes * arguments.ctx_size + arguments.cache_ram * MIB)


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # as others, whatever the model was trained for
        # Its default leaves one core for the HTTP server.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}",
    }
    # vLLM's manual: without these two libraries it is slower.
    libraries = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),  # Debian's place
        *(arguments.python.parent.parent / "lib").glob("libiomp5.so"),
    ]
    if libraries:
        settings["LD_PRELOAD"] = ":".join(map(str, libraries))
    return settings


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--python", "--weights"):
        parser.add_argument(flag, type=Path, required=True)
    for flag in ("--port", "--ctx-size", "--parallel", "--threads", "--batch-size"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--cache-ram", type=int, default=DEFAULT_CACHE_MIB)
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--host", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
