"""Writes tiny random LoRA adapters for tiny models, in the format of llama.cpp's converter."""

from pathlib import Path

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from tests.support.tiny_models import HEAD_DIM, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_LAYER

RANK = 4
# Weight -> (inputs, outputs). The K and V rows depend on two of them.
ADAPTED = {
    "attn_k": (N_EMBD, N_HEAD_KV * HEAD_DIM),
    "attn_v": (N_EMBD, N_HEAD_KV * HEAD_DIM),
    "attn_output": (N_HEAD * HEAD_DIM, N_EMBD),
    "ffn_down": (N_FF, N_EMBD),
}


def write_tiny_adapter(
    path: Path,
    *,
    seed: int = 1,
    architecture: str = "llama",
    layers: int = N_LAYER,
    task_name: str | None = None,
    invocation_tokens: list[int] | None = None,
) -> Path:
    """Equal arguments give equal bytes."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(str(path), architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    if task_name is not None:
        writer.add_string("adapter.lora.task_name", task_name)
    if invocation_tokens is not None:
        key, numbers = "adapter.alora.invocation_tokens", GGUFValueType.UINT32
        writer.add_key_value(key, invocation_tokens, GGUFValueType.ARRAY, sub_type=numbers)
    for layer in range(layers):
        for weight, (n_in, n_out) in ADAPTED.items():
            name = f"blk.{layer}.{weight}.weight"
            low = random.normal(0, 1 / np.sqrt(n_in), (RANK, n_in))
            high = random.normal(0, 1 / np.sqrt(RANK), (n_out, RANK))
            writer.add_tensor(f"{name}.lora_a", low.astype(np.float32))
            writer.add_tensor(f"{name}.lora_b", high.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
