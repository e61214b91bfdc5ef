"""Sound files to damage: what a server wrote into its cache directory, an archive, a model."""

import random
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.cache.tools.archive import export_to
from rekindle.cache.tools.directory import entry_paths, read_stored
from tests.support.cache_traffic import Answer, Caller, Prompt, eventually, random_tokens
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture, write_tiny_model
from tests.support.workloads import prose

N_PROMPTS = 12
N_REPLIES = 6
HEADER_BYTES = 40_000  # of a tiny model: all of its header, and some weights
SERVER = ("--parallel", "2", "--ctx-size", "4096", "--threads", "1", "--log-level", "warning")


@dataclass(frozen=True, slots=True)
class Samples:
    model: Path
    directory: Path  # nobody writes to it
    prompts: Mapping[Prompt, Answer]  # with their cold answers
    responses: tuple[str, ...]  # ids of stored responses
    entries: tuple[str, ...]  # paths in the directory
    archive: bytes
    databases: Mapping[str, bytes]  # by file name
    model_header: bytes


def make_samples(folder: Path, architecture: TinyArchitecture = TinyArchitecture.LLAMA) -> Samples:
    """Let a server fill a directory. Equal calls give equal prompts and keys."""
    model = write_tiny_model(folder / f"sample-{architecture}.gguf", architecture)
    directory = folder / f"sample-{architecture}"
    noise = random.Random("samples")
    responses = []
    prompts = [random_tokens(noise, noise.randrange(20, 600)) for _ in range(N_PROMPTS)]
    with (
        serve(str(model), *SERVER, "--cache-dir", str(directory)) as server,
        closing(Caller(server.url)) as caller,
    ):
        cold = {prompt: caller.ask(prompt) for prompt in prompts}
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(N_REPLIES):
                text = prose(f"sample {number}", 30)
                asked = {"input": text, "max_output_tokens": 16}
                reply = http.post("/v1/responses", json=asked).raise_for_status()
                responses.append(reply.json()["id"])
        assert server.stop() == 0
    eventually(lambda: _check_whole(directory))
    return Samples(
        model=model,
        directory=directory,
        prompts=cold,
        responses=tuple(responses),
        entries=tuple(str(path.relative_to(directory)) for path in entry_paths(directory)),
        archive=_archive_of(directory, folder / "sample.rk"),
        databases={path.name: path.read_bytes() for path in sorted(directory.glob("*.sqlite3"))},
        model_header=model.read_bytes()[:HEADER_BYTES],
    )


def _check_whole(directory: Path) -> None:
    assert entry_paths(directory)
    assert (directory / "responses.sqlite3").exists()


def _archive_of(directory: Path, path: Path) -> bytes:
    stored = read_stored(directory)
    longest = sorted(stored.inventory.entries, key=lambda entry: entry.row.header.stop)[-2:]
    lineages = [stored.of_entry(entry) for entry in longest]
    export_to(path, directory, stored, lineages, lambda _done, _total: None)
    return path.read_bytes()


def copied(samples: Samples, folder: Path) -> Path:
    """Return a copy of the directory."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(samples.directory, folder, symlinks=True)
    return folder
