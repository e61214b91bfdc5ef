"""Workloads for drafts: the speed of decoding replies that repeat something, or nothing.

A model of 135M parameters cannot edit a file on request. Therefore the prompts of `rewrite`,
`again` and `tool-loop` are plain texts for `/v1/completions` that have begun to repeat themselves:
a whole file, then its first lines again with an edit; or a transcript in which an agent makes the
same call again and again. A greedy reply then continues the copy, as the reply of a larger model
does when it rewrites a file. The files are modules of this package, because a small model copies
real code, but loses its place in a file of random names. Each reply has the same length on every
server (`ignore_eos`).
"""

import json
from pathlib import Path

from rekindle.bench.stage import Stage
from rekindle.bench.workloads.workloads import Workload
from rekindle.replay.traffic import ReplayRequest

COMPLETIONS = "/v1/completions"
PACKAGE = Path(__file__).parents[1]
FILE = "report/bars.py"
OTHER_FILE = "report/report.py"
FILE_LINES = 300
# Of the copy; picked. SmolLM2-135M then copied the next 80 tokens of 80 lines without a mistake.
BEGUN_LINES = 16
REWRITE_TOKENS = 250
OTHER_TOKENS = 16  # of a reply that is not measured
SAVE_SECONDS = 4.0  # picked: a server may write what it keeps before it is killed
CALL_TOKENS = 48  # picked: one call of the loop
N_KNOWN_CALLS = 3  # in the transcript of the first request
N_CALLS = 8
CALL = {
    "name": "run_tests",
    "arguments": {"suite": "billing", "path": "tests/billing/test_invoice.py", "limit": 50},
}
PROSE_TOKENS = 150
TEMPERATURE = 0.8
PROSE = (
    "Tell a story about a lighthouse keeper who finds a letter.",
    "Describe a market in a town by the sea, early in the morning.",
    "What would you pack for a walk across the mountains, and why?",
    "Explain to a child where the wind comes from.",
    "Write a letter to a friend about the first day at a new job.",
    "How did people keep food fresh before there was electricity?",
)


async def rewrite(stage: Stage) -> None:
    """A reply copies the file that its prompt holds."""
    await _complete(stage, "rewrite", rewrite_prompt(stage, FILE), is_measured=True)


async def again(stage: Stage) -> None:
    """The same rewrite a second time, after another request."""
    await _complete(stage, "first", rewrite_prompt(stage, FILE))
    await _complete(stage, "other", rewrite_prompt(stage, OTHER_FILE), max_tokens=OTHER_TOKENS)
    await _complete(stage, "again", rewrite_prompt(stage, FILE), is_measured=True)


async def again_restarted(stage: Stage) -> None:
    """The same rewrite a second time, after `kill -9` and a start in the same folder."""
    await _complete(stage, "first", rewrite_prompt(stage, FILE))
    await stage.pause(SAVE_SECONDS)
    await stage.kill_and_restart()
    await _complete(stage, "again", rewrite_prompt(stage, FILE), is_measured=True)


async def tool_loop(stage: Stage) -> None:
    """An agent makes the same call in every round.

    The transcript grows by the expected call, not by the reply, so all servers get equal prompts.
    """
    call = json.dumps(CALL)
    lines = [
        f"Run {stage.texts.nonce}. An agent repairs a test. It calls its tool until it passes."
    ]
    for number in range(1, N_KNOWN_CALLS + stage.times(N_CALLS) + 1):
        lines.append("Agent calls:")
        if number > N_KNOWN_CALLS:
            prompt = "\n".join([*lines, ""])
            name = f"call {number}"
            await _complete(stage, name, prompt, max_tokens=CALL_TOKENS, is_measured=True)
        lines += [call, f"Tool returns: {stage.texts.question(f'loop {number}', 16)}"]


async def prose(stage: Stage) -> None:
    """Replies are sampled and have nothing in common with each other or with their prompts."""
    for seed, question in enumerate(PROSE[: stage.times(len(PROSE))], start=1):
        body = {
            "messages": [{"role": "user", "content": f"Run {stage.texts.nonce}. {question}"}],
            "max_tokens": PROSE_TOKENS,
            "temperature": TEMPERATURE,
            "seed": seed,
            "speculative": True,  # Rekindle drafts nothing for a seed otherwise
            "ignore_eos": True,
        }
        name = f"question {seed}"
        stage.decoded.append(await stage.send(name, body, name))


def rewrite_prompt(stage: Stage, name: str) -> str:
    """Return a text that holds a file, and its first lines again with an edit."""
    n_lines = max(int(FILE_LINES * stage.texts.scale), 2 * BEGUN_LINES)
    old = (PACKAGE / name).read_text("utf-8").splitlines()[:n_lines]
    begun = [f"# Version 2 of {name}.", *old[:BEGUN_LINES]]
    return "\n".join(
        [
            *(f"Run {stage.texts.nonce}. The file {name}:", "", "```python", *old, "```", ""),
            *(f"The file {name} with a comment in front:", "", "```python", *begun, ""),
        ]
    )


async def _complete(
    stage: Stage,
    name: str,
    prompt: str,
    *,
    max_tokens: int = REWRITE_TOKENS,
    is_measured: bool = False,
) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = ReplayRequest(
        name=name, path=COMPLETIONS, body=body, headers=(), conversation=name, source=0
    )
    outcome = await stage.send_request(request)
    if is_measured:
        stage.decoded.append(outcome)


DRAFT_WORKLOADS = (
    Workload(
        name="rewrite",
        about=f"a reply of {REWRITE_TOKENS} tokens copies a file of {FILE_LINES} lines",
        play=rewrite,
        measures_decode=True,
    ),
    Workload(
        name="again",
        about="the same rewrite a second time, after another request",
        play=again,
        measures_decode=True,
    ),
    Workload(
        name="again-restarted",
        about="the same rewrite a second time, after kill -9",
        play=again_restarted,
        measures_decode=True,
    ),
    Workload(
        name="tool-loop",
        about="an agent that makes the same call in every round",
        play=tool_loop,
        measures_decode=True,
    ),
    Workload(
        name="prose",
        about="sampled replies to open questions, where nothing repeats",
        play=prose,
        measures_decode=True,
    ),
)
