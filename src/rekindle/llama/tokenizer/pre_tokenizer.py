"""Bounds the stack and the time that llama.cpp needs to split a text into words.

If llama.cpp has no splitter of its own for `tokenizer.ggml.pre`, it uses std::regex. libstdc++
recurses once per character of a match. A few expressions also backtrack: their time grows with
the square of a run. Numbers and commands are in docs/decisions/0017.
"""

import re
from dataclasses import dataclass

from rekindle.errors import InvalidRequest

# Twice the 320 bytes that were measured for every expression (aarch64, libstdc++).
STACK_BYTES_PER_CHARACTER = 640
STACK_BYTES = 256 * 2**10  # the rest of the call
# A shorter text gets a stack for its length: unused stack up to 64 MiB is free. In a longer text
# the longest match is searched: 3 to 10 ms per 100,000 characters, which take 100 ms to tokenise.
# Picked.
MAX_UNSEARCHED = 100_000
MAX_MATCH = 2_000_000  # characters: 1.2 GiB of stack, half of it used

# Splitters that are loops, and expressions that match one character. All other names count as
# dangerous, so a new name in llama.cpp is slow at worst.
# tests/llama/tokenizer/test_pre_tokenizers.py runs each of them on a small stack.
FLAT = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"),
        *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de"),
        *("a.x-4.0", "mellum", "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        *("mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"),
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"),
        *("minerva-7b", "mellum2", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"),
        *("megrez", "stablelm2", "hunyuan", "solar-open", "grok-2", "qwen35", "kimi-k2"),
        *("laguna", "gemma4", "granite-embed-multi-311m", "sarvam-moe"),
    )
)
# A match of this splitter may hold many words, with spaces between them.
_SPANS_SPACES = "exaone-moe"

# A match is a word with the gap after it or one character before it. Some expressions end a word
# with line breaks and slashes in any order (`[\r\n/]*`), so slashes belong to gaps as well. The
# classes overlap because Python and std::regex define white space differently.
_WORD = re.compile(r"[^ \t\n\r\v\f]+")
_GAP = re.compile(r"[\s/]+")


@dataclass(frozen=True, slots=True)
class _SlowRun:
    """Runs that take quadratic time to split."""

    pattern: re.Pattern[str]
    what: str
    max_length: int  # one such run takes a second or less


_SLOW_RUNS = {
    # Before letters, ASCII punctuation and the end of a line there is no backtracking. Unlike
    # Python, llama.cpp does not count the separators \x1c to \x1f as white space.
    "deepseek-llm": _SlowRun(
        re.compile(r"(?<![^\S\r\n\x1c-\x1f])[^\S\r\n\x1c-\x1f]++(?![\r\nA-Za-z!-/:-~]|\Z)"),
        "white space",
        2_500,
    ),
    "superbpe": _SlowRun(re.compile(r"\d+"), "digits", 2_000),
    "jais-2": _SlowRun(re.compile(r"\s+"), "white space", 100_000),
}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    name: str  # tokenizer.ggml.pre
    is_flat: bool  # the stack does not grow with the text

    @classmethod
    def of(cls, *, tokenizer: str, pre: str) -> "PreTokenizer":
        """Make one from `tokenizer.ggml.model` and `.pre`. Only BPE splits with std::regex."""
        is_flat = tokenizer in ("llama", "bert", "t5", "rwkv", "plamo2", "gemma4") or pre in FLAT
        return cls(pre, is_flat)

    @property
    def backtracks(self) -> bool:
        return self.name in _SLOW_RUNS

    def stack_bytes(self, text: str) -> int:
        """Return an upper bound of the stack needed to split the text."""
        if self.is_flat:
            return STACK_BYTES
        longest = len(text)
        if longest > MAX_UNSEARCHED and self.name != _SPANS_SPACES:
            longest = min(longest, _longest(_WORD, text) + _longest(_GAP, text) + 1)
        if longest > MAX_MATCH:
            raise InvalidRequest(
                f"The text has a run of up to {longest:,} characters that this model's tokenizer"
                f" ({self.name}) cannot split; at most {MAX_MATCH:,} are accepted."
                " Break the run up with spaces or line breaks."
            )
        return STACK_BYTES + STACK_BYTES_PER_CHARACTER * longest

    def check_time(self, text: str) -> None:
        """Raise InvalidRequest for a text that would take minutes to split."""
        slow = _SLOW_RUNS.get(self.name)
        if slow is None or len(text) <= slow.max_length:
            return
        lengths = list(map(len, slow.pattern.findall(text)))
        # Many long runs cost as much as one very long run. Long texts with ordinary runs are
        # allowed up to four times the limit.
        limit = slow.max_length**2
        if sum(n * n for n in lengths) > min(max(limit, 100 * len(text)), 4 * limit):
            raise InvalidRequest(
                f"Runs of {slow.what} are too long for this model's tokenizer ({self.name}): the"
                f" longest has {max(lengths):,} characters. A run may have {slow.max_length:,}."
                " Shorten the runs, or break them up with other text."
            )


def _longest(pattern: re.Pattern[str], text: str) -> int:
    return max(map(len, pattern.findall(text)), default=0)
