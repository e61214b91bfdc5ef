"""Cache directories with damaged entries and catalogues, and a server that restores from them.

Every answer must be the cold one, except where a damaged entry has right checksums: then it is
another state, which nobody can tell from the right one, and only a crash is a finding.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import httpx

from rekindle.cache.entry import TOKEN_BYTES, decode_preamble, token_bytes
from rekindle.cache.responses.file import RESPONSES
from tests.campaigns.fuzz.case import FileCase, Kind, noise_of
from tests.campaigns.fuzz.file_checks import response_ids
from tests.campaigns.fuzz.grow.files import entry_case, file_case
from tests.campaigns.fuzz.samples import SERVER, Samples, copied
from tests.campaigns.fuzz.watch import log_problems
from tests.support.cache_traffic import Caller, Prompt, disagreement
from tests.support.engine_processes import RESTARTS_METRIC
from tests.support.server_process import serve

DATABASE_SHARE = 0.2  # of cases; the others are entries
MAX_CASES = 12  # of one round
OTHER_VERSION = "its version is"  # refused with 503: it may be a later one


def state_case(number: int, seed: int, samples: Samples) -> FileCase:
    """Return a damaged entry, or a damaged database."""
    noise = noise_of(seed, Kind.STATE, number)
    if noise.random() < DATABASE_SHARE:
        made = file_case(Kind.DATABASE, number, noise, samples)
        return FileCase(Kind.STATE, number, made.data, made.name)
    return entry_case(number, noise, samples)


def failures_of(
    cases: Sequence[FileCase], samples: Samples, folder: Path
) -> list[tuple[FileCase, str]]:
    """Run the cases together. After a failure, run each alone to find the one to blame."""
    problem = problem_of(cases, samples, folder)
    if problem is None:
        return []
    alone = [(case, problem_of([case], samples, folder)) for case in cases]
    guilty = [(case, found) for case, found in alone if found is not None]
    return guilty or [(cases[0], f"only together with {len(cases) - 1} others: {problem}")]


def problem_of(cases: Sequence[FileCase], samples: Samples, folder: Path) -> str | None:
    """Put the files in place, start a server, and ask for every stored prompt."""
    directory = copied(samples, folder / "state")
    for case in cases:
        (directory / case.name).write_bytes(case.data)
    # A case that is replayed names the responses of another server.
    damaged_ids = response_ids(directory / RESPONSES.file_name)
    sealed = [samples.directory / case.name for case in cases if case.is_sealed]
    with (
        serve(
            *(str(samples.model), *SERVER, "--no-cache-recompute"),
            *("--cache-dir", str(directory)),
        ) as server,
        closing(Caller(server.url)) as caller,
    ):
        # Forged rows last: a NaN among them may reach the prompts that come after.
        is_forged = {each: any(_is_part(path, each) for path in sealed) for each in samples.prompts}
        for prompt in sorted(samples.prompts, key=is_forged.__getitem__):
            try:
                answer = caller.ask(prompt)
            except httpx.HTTPError as error:
                return f"a prompt of {len(prompt)} tokens: {error!r}"
            wrong = disagreement(answer, samples.prompts[prompt])
            if wrong is not None and not is_forged[prompt]:
                return f"{wrong}, with {answer.n_cached} of {len(prompt)} tokens cached"
        ids = {*samples.responses, *damaged_ids}
        if problem := _responses_problem(server.url, sorted(ids)):
            return problem
        deaths = {
            name: value
            for name, value in caller.metrics().items()
            if name.startswith(RESTARTS_METRIC) and value
        }
        if deaths:
            return f"the engine died: {deaths}"
        assert server.stop() == 0
        if problems := log_problems(server.log):
            return f"in the log: {problems.most_common(3)}"
    return None


def _responses_problem(url: str, ids: Sequence[str]) -> str | None:
    """Read and continue every stored response: a damaged one is a 404 or a 400."""
    with httpx.Client(base_url=url, timeout=120) as http:
        for id in ids:
            body = {"input": "Go on.", "previous_response_id": id, "max_output_tokens": 16}
            for reply in (
                http.get(f"/v1/responses/{quote(id, safe='')}"),
                http.get(f"/v1/responses/{quote(id, safe='')}/input_items"),
                http.post("/v1/responses", json=body),
            ):
                if reply.status_code >= 500 and OTHER_VERSION not in reply.text:
                    request = reply.request
                    return f"{request.method} {request.url.path}: {reply.text[:300]}"
    return None


def _is_part(path: Path, prompt: Prompt) -> bool:
    """Whether the sound entry at `path` belongs to the prompt."""
    if path.suffix != ".kv":
        return False
    header, _ = decode_preamble(path.read_bytes())
    part = token_bytes(prompt)[TOKEN_BYTES * header.start : TOKEN_BYTES * header.stop]
    return bool(part) and header.tokens.startswith(part)
