"""Arguments of `rekindle serve` in place of llama-server's, for llama.cpp's tests of its server.

The tests name models of a hub. A tiny model with random weights takes the place of each.
"""

from collections.abc import Sequence
from pathlib import Path

from rekindle.config.llama_server.flag import FlagFate
from rekindle.config.llama_server.table import LLAMA_FLAGS

MODEL_FLAGS = frozenset({"--hf-repo", "--hf-file", "--model", "--model-url", "--model-draft"})
REFUSED = frozenset(
    name for flag in LLAMA_FLAGS if flag.fate is FlagFate.REFUSED for name in flag.all_names
)
WITHOUT_VALUE = frozenset(
    {
        *("--offline", "--cont-batching", "--embedding", "--reranking", "--metrics"),
        *("--kv-unified", "--swa-full", "--slots", "--no-slots", "--verbose", "--context-shift"),
        *("--no-ui", "--no-models-autoload", "--jinja", "--no-jinja", "--no-mmproj"),
        *("--no-cache-idle-slots", "--ui-mcp-proxy", "--backend_sampling"),
    }
)


def translated(arguments: Sequence[str], models: Path) -> list[str]:
    """Return the arguments of `rekindle serve`."""
    name, kept = "", []
    rest = iter(arguments)
    for flag in rest:
        value = [] if flag in WITHOUT_VALUE else [next(rest)]
        if flag in MODEL_FLAGS:
            name += value[0]
        elif flag == "--chat-template-file":  # the server has another working directory
            kept += [flag, str(Path(value[0]).resolve())]
        elif flag not in REFUSED:
            kept += [flag, *value]
    if {"--ctx-size", "--parallel"} <= {*kept} and "--kv-unified" not in kept:
        # The context of one slot.
        place = kept.index("--ctx-size") + 1
        kept[place] = str(int(kept[place]) // int(kept[kept.index("--parallel") + 1]))
    kind = next((kind for kind in ("infill", "reranker") if kind in name), "plain")
    return ["serve", str(models / f"{kind}.gguf"), *kept]
