"""llama.cpp's own server from the xllamacpp wheel, behind the llama-server flags we use."""

import argparse
import importlib
import signal
from pathlib import Path


def main() -> None:
    arguments = _parse()
    # By name: it is installed only where it is a peer, so mypy may not find it.
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames = [arguments.host]
    params.port = arguments.port
    params.n_ctx = arguments.ctx_size
    params.n_parallel = arguments.parallel
    params.cpuparams.n_threads = arguments.threads
    params.cpuparams_batch.n_threads = arguments.threads
    params.n_batch = arguments.batch_size
    if arguments.ubatch_size is not None:
        params.n_ubatch = arguments.ubatch_size
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.kv_unified = arguments.kv_unified
    params.prefill_assistant = not arguments.no_prefill_assistant
    params.slot_save_path = arguments.slot_save_path
    params.endpoint_metrics = True
    params.use_jinja = True
    params.ui = False
    if arguments.cache_ram is not None:
        params.cache_ram_mib = arguments.cache_ram
    if arguments.chat_template_file is not None:
        params.chat_template = arguments.chat_template_file.read_text("utf-8")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = xllamacpp.Server(params)
    try:
        signal.pause()
    except KeyboardInterrupt:
        del server


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--host", "--slot-save-path", "--flash-attn"):
        parser.add_argument(flag, required=True)
    for flag in ("--port", "--ctx-size", "--parallel", "--threads", "--batch-size"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--ubatch-size", type=int)
    parser.add_argument("--cache-ram", type=int)
    parser.add_argument("--chat-template-file", type=Path)
    for flag in ("--kv-unified", "--no-prefill-assistant"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
