"""Compare greedy replies with and without drafts on a real model, and explain each difference.

    python -m tests.campaigns.drafts [--prompts 30] [--model FILE]

Each prompt is asked of a server without drafts, then twice of one with them: new, and again
(drafted from the earlier reply); and once more without, beside other streams. Where two replies
differ, it must be a near tie:
by plain decoding the two tokens are at most MAX_TIE nats apart. Exits with 1 otherwise.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.server_process import ServerProcess, serve
from tests.support.workloads import prose

MAX_TIE = 0.5  # nats
N_TOKENS = 120
N_BESIDE = 3
TOP = 5
CODE = "".join(f"def step_{n}(value):\n    return value + {n}\n\n\n" for n in range(12))


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    top: dict[str, float]


def prompts(count: int) -> list[str]:
    """Return prompts whose replies repeat something, and some whose replies do not."""
    texts = []
    for n in range(count):
        match n % 3:
            case 0:
                code = CODE.replace("value", f"value{n}")
                texts.append(f"# a file\n{code}\n# the same file again\n{code[:60]}")
            case 1:
                texts.append(f"{prose(f'essay {n}', 80)}\n\nIn short,")
            case _:
                texts.append(f"List number {n} of animals, one per line:\n1. cat\n2. dog\n3.")
    return texts


def ask(server: ServerProcess, prompt: str, **fields: Any) -> tuple[list[Token], dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "logprobs": TOP, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).json()
    scored = reply["choices"][0]["logprobs"]
    pairs = zip(scored["tokens"], scored["top_logprobs"], strict=True)
    return [Token(text, dict(top)) for text, top in pairs], reply["timings"]


def difference(plain: list[Token], other: list[Token]) -> float | None:
    """Return how far apart the first two different tokens are, by plain decoding; None: equal."""
    for one, two in zip(plain, other, strict=False):
        if one.text != two.text:
            return one.top[one.text] - one.top.get(two.text, float("-inf"))
    return None if len(plain) == len(other) else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--model", nargs="*", default=[])
    options = parser.parse_args()
    gaps: dict[str, list[float]] = {"new": [], "again": [], "beside others": []}
    n_drafted = n_accepted = 0
    with ExitStack() as stack:
        common = (*options.model, "--parallel", str(1 + N_BESIDE), "--ctx-size", "16384")
        drafting = stack.enter_context(serve(*common))
        plain_server = stack.enter_context(serve(*common, "--speculate", "off"))
        pool = stack.enter_context(ThreadPoolExecutor(N_BESIDE))
        for prompt in prompts(options.prompts):
            plain, _ = ask(plain_server, prompt)
            for case in ("new", "again"):
                reply, timings = ask(drafting, prompt)
                n_drafted += timings.get("draft_n", 0)
                n_accepted += timings.get("draft_n_accepted", 0)
                _note(gaps[case], plain, reply, f"{case}: {prompt[:30]!r}")
            # For comparison, without drafts: the same rounding beside other streams.
            others = [
                pool.submit(ask, plain_server, f"{n} {prompt}", ignore_eos=True)
                for n in range(N_BESIDE)
            ]
            reply, _ = ask(plain_server, prompt)
            _note(gaps["beside others"], plain, reply, f"beside others: {prompt[:30]!r}")
            for other in others:
                other.result()
    for case, found in gaps.items():
        _tell(
            f"{case}: {len(found)} of {options.prompts} replies differ, the widest by"
            f" {max(found, default=0.0):.3f} nats"
        )
    _tell(f"{n_drafted} tokens drafted, {n_accepted} accepted")
    widest = max((gap for found in gaps.values() for gap in found), default=0.0)
    return 1 if widest > MAX_TIE or not n_accepted else 0


def _note(gaps: list[float], plain: list[Token], reply: list[Token], name: str) -> None:
    gap = difference(plain, reply)
    if gap is not None:
        gaps.append(gap)
        _tell(f"{name} differs, by {gap:.3f} nats")


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
