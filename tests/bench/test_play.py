"""One workload on one server: processes, peers with limits, and their notes."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.bench.meter import counts_in
from rekindle.bench.peers.contenders import (
    PEERS,
    Flags,
    Program,
    RemoteServer,
    Vllm,
    find_contenders,
    find_variants,
    in_turn,
    remote_of,
)
from rekindle.bench.peers.drafts import DRAFTS, llama_server_drafts
from rekindle.bench.peers.processes import DidNotStart, ServerProcess, peak_memory_bytes
from rekindle.bench.play import Conditions, Play
from rekindle.bench.report.results import Progress
from rekindle.bench.report.rows import busy_seconds
from rekindle.bench.workloads.texts import Texts
from rekindle.bench.workloads.workloads import WORKLOADS
from rekindle.errors import StartupError
from rekindle.replay.client import Outcome
from rekindle.replay.stream import Counts
from tests.support.fake_openai import fake_openai

AGENT_LOOP = WORKLOADS[0]
ANSWERING = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
print(sorted(name for name in os.environ if name.startswith("REKINDLE_")), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
LOG = """
llama_perf_context_print: prompt eval time =     900.00 ms /   300 tokens (    3.00 ms per token)
llama_perf_context_print:        eval time =     100.00 ms /    19 runs   (    5.26 ms per token)
Llama.generate: 318 prefix-match hit, remaining 40 prompt tokens to eval
llama_perf_context_print: prompt eval time =     100.00 ms /    40 tokens (    2.50 ms per token)
llama_perf_context_print:        eval time =     100.00 ms /     7 runs   (   14.28 ms per token)
"""


def conditions(folder: Path) -> Conditions:
    return Conditions(
        model=folder / "model.gguf",
        shows_tools=True,
        threads=1,
        texts=Texts("5eed", 0.1),
        is_quick=True,
        scratch=folder,
    )


def flags(folder: Path) -> Flags:
    return Flags(model=folder / "model.gguf", ctx_size=512, parallel=1, threads=1)


def program(*command: str) -> Program:
    return Program(name="peer", version="1", command=lambda _flags, _folder: list(command))


def played(contender: Program | RemoteServer, folder: Path) -> Progress:
    progress = Progress(on_step=lambda _: None, on_done=lambda: None, on_trouble=lambda _: None)
    asyncio.run(Play(contender, AGENT_LOOP, 1, conditions(folder), progress).run())
    return progress


def test_a_peer_that_does_not_start_is_a_note_with_the_end_of_its_log(tmp_path: Path) -> None:
    broken = program(sys.executable, "-c", "raise SystemExit('cannot read the model')")
    [row] = played(broken, tmp_path).workloads
    assert row.requests == 0
    assert row.total_seconds is None
    assert row.note is not None
    assert row.note.endswith("cannot read the model")


def test_a_peer_that_answers_errors_is_counted_and_noted(tmp_path: Path) -> None:
    with fake_openai(refuses=True) as fake:
        results = played(RemoteServer("peer", fake.url), tmp_path)
    [row] = results.workloads
    assert row.errors == row.requests == len(results.requests) > 0
    assert row.note is not None
    assert "out of memory" in row.note


def test_an_unreachable_peer_is_a_note(tmp_path: Path) -> None:
    [row] = played(RemoteServer("peer", "http://127.0.0.1:9"), tmp_path).workloads
    assert row.note is not None
    assert "cannot be reached" in row.note


def test_a_remote_peer_is_measured_by_the_counts_in_its_replies(tmp_path: Path) -> None:
    with fake_openai() as fake:
        results = played(RemoteServer("peer", fake.url), tmp_path)
    [row] = results.workloads
    assert row.errors == 0
    # The fake reports that nothing is ever cached.
    assert row.prefilled_tokens == row.prompt_tokens
    assert row.floor_tokens is not None
    assert row.amplification is not None
    assert row.amplification > 1.5
    assert [each.request for each in results.requests[:2]] == ["agent, turn 1", "agent, turn 2"]
    assert row.peak_memory_bytes is None
    assert row.note is not None
    assert "floor by characters" in row.note


def test_a_killed_server_comes_back_on_its_port_without_our_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_RAM", "1")

    async def run() -> ServerProcess:
        process = ServerProcess([sys.executable, "-c", ANSWERING], tmp_path, "/health")
        await process.start()
        url = process.url
        await process.end()
        await process.start()
        assert process.url == url
        await process.end()
        return process

    process = asyncio.run(run())
    assert process.log.splitlines() == ["[]", "[]"]
    if sys.platform == "linux":
        assert process.usage.peak_memory_bytes is not None
        assert process.usage.peak_memory_bytes > 2**20
        assert process.usage.written_bytes is not None


@pytest.mark.skipif(sys.platform != "linux", reason="from /proc")
@pytest.mark.parametrize("group", ["", ", process_group=0"])
@pytest.mark.parametrize(
    ("program", "number"),
    [(ANSWERING, signal.SIGTERM), (ANSWERING, signal.SIGKILL), ("exit(1)", signal.SIGTERM)],
)
def test_no_process_of_a_server_outlives_it(
    tmp_path: Path, program: str, number: signal.Signals, group: str
) -> None:
    child = f"import subprocess; child = subprocess.Popen(['sleep', '1000']{group})\n"
    child += "print(child.pid, flush=True)\n"

    async def run() -> int:
        process = ServerProcess([sys.executable, "-c", child + program], tmp_path, "/health")
        with suppress(DidNotStart):
            await process.start()
        pid = int(process.log.splitlines()[0])
        assert _runs(pid)
        await process.end(number)
        return pid

    pid = asyncio.run(run())
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return False
    return "State:\tZ" not in status


def test_a_missing_program_did_not_start(tmp_path: Path) -> None:
    process = ServerProcess([str(tmp_path / "nothing")], tmp_path, "/health")
    with pytest.raises(DidNotStart):
        asyncio.run(process.start())


def test_counts_are_read_from_the_log_of_a_server_that_reports_none() -> None:
    assert list(counts_in(LOG)) == [
        Counts(n_prompt=300, n_cached=0, n_prefilled=300, n_reply=20),
        Counts(n_prompt=358, n_cached=318, n_prefilled=40, n_reply=8),
    ]


def test_total_time_excludes_pauses_and_counts_overlaps_once() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (10.0, 1.0)]
    assert busy_seconds([Outcome(n, *span) for n, span in enumerate(spans)]) == 5.0


def test_servers_take_turns_in_going_first() -> None:
    peers = [replace(program("x"), name=name) for name in "abc"]
    firsts = [in_turn(peers, number)[0].name for number in range(4)]
    assert firsts == ["a", "b", "c", "a"]


def test_a_peer_is_a_name_and_a_url() -> None:
    assert remote_of("vllm=http://127.0.0.1:8000/v1") == RemoteServer(
        "vllm", "http://127.0.0.1:8000/v1"
    )
    for text in ("http://127.0.0.1", "vllm=", "=http://x", "vllm=127.0.0.1"):
        with pytest.raises(StartupError):
            remote_of(text)


def test_this_server_is_first_and_others_can_be_left_out() -> None:
    peers = ["llama-server", "xllamacpp", "llama_cpp.server"]
    found = find_contenders(
        llama_server=None, remotes=[RemoteServer("other", "http://127.0.0.1:1")], without=peers
    )
    assert [each.name for each in found] == ["rekindle", "other"]
    with pytest.raises(StartupError, match="no such server"):
        find_contenders(llama_server=None, remotes=[], without=["olama"])
    with pytest.raises(StartupError, match="another server"):
        find_contenders(
            llama_server=None, remotes=[RemoteServer("rekindle", "http://x")], without=[]
        )


@pytest.fixture
def vllm(tmp_path: Path) -> Vllm:
    """Return a Python that shows how it was started, and weights without weights."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho 0.32.0 "$@"\necho LD_PRELOAD $LD_PRELOAD\n')
    python.chmod(0o755)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    weights = tmp_path / "SmolLM2"
    weights.mkdir()
    config = {"num_key_value_heads": 3, "num_attention_heads": 9, "num_hidden_layers": 30}
    (weights / "config.json").write_text(json.dumps({**config, "hidden_size": 576}))
    return Vllm(python, weights)


def test_vllm_has_one_pool_of_rows_for_the_context_and_the_cache(
    vllm: Vllm, tmp_path: Path
) -> None:
    found = find_contenders(llama_server=None, remotes=[], without=PEERS, vllm=vllm)
    [_, program] = found
    assert isinstance(program, Program)
    assert program.version.startswith("0.32.0")
    settings = replace(flags(tmp_path), ctx_size=4096, cache_ram_mib=48)
    command = [*program.command(settings, tmp_path), "--host", "127.0.0.1", "--port", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row_bytes = 30 * 3 * 64 * 2 * 2  # layers, heads, width, keys and values, bfloat16
    assert f"--kv-cache-memory-bytes {4096 * row_bytes + 48 * 2**20} " in shown
    assert "--enable-prefix-caching" in shown
    assert "--max-model-len 4096 " in shown
    assert f"{tmp_path}/lib/libiomp5.so" in shown


def test_weights_for_vllm_without_a_config_are_an_error(vllm: Vllm, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"there is no config\.json"):
        find_contenders(
            llama_server=None, remotes=[], without=PEERS, vllm=replace(vllm, weights=tmp_path)
        )


def test_a_variant_of_this_server_does_not_draft(tmp_path: Path) -> None:
    contenders = find_contenders(llama_server=None, remotes=[], without=PEERS)
    [plain] = find_variants(contenders, llama_server=None, without=())
    assert plain.name == "rekindle-no-drafts"
    command = plain.command(flags(tmp_path), tmp_path)
    assert command[-2:] == ["--speculate", "off"]
    assert find_variants(contenders, llama_server=None, without=[plain.name]) == []


def test_llama_server_is_measured_with_each_of_its_draft_settings(tmp_path: Path) -> None:
    script = tmp_path / "llama-server"
    script.write_text("#!/bin/sh\necho 'version: 1'\necho --spec-type --spec-ngram-mod-n-match\n")
    script.chmod(0o755)
    others = [name for name in PEERS if name != "llama-server"]
    contenders = find_contenders(llama_server=script, remotes=[], without=others)
    variants = find_variants(contenders, llama_server=script, without=["rekindle-no-drafts"])
    assert [each.name for each in variants] == [f"llama-server-{name}" for name in DRAFTS]
    for variant in variants:
        command = variant.command(flags(tmp_path), tmp_path)
        assert command[0] == str(script)
        assert "--spec-type" in command


def test_each_server_keeps_its_own_ubatch_size_unless_one_is_given(tmp_path: Path) -> None:
    script = tmp_path / "llama-server"
    script.write_text("#!/bin/sh\necho 'version: 1'\n")
    script.chmod(0o755)
    contenders = find_contenders(llama_server=script, remotes=[], without=[])
    for program in contenders:
        assert isinstance(program, Program)
        own = program.command(flags(tmp_path), tmp_path)
        given = program.command(replace(flags(tmp_path), ubatch_size=77), tmp_path)
        assert "77" not in own
        assert given[given.index("77") - 1] in ("--ubatch-size", "--n_ubatch")


def test_draft_flags_are_those_of_the_version_of_llama_server() -> None:
    new = llama_server_drafts("--spec-type --spec-ngram-mod-n-match\n--draft-max: removed")
    old = llama_server_drafts("--spec-type --draft-max N")
    assert new.keys() == old.keys() == DRAFTS.keys()
    assert "--draft-max" not in {flag for arguments in new.values() for flag in arguments}
    assert "--draft-max" in old["ngram-mod"]
    assert not llama_server_drafts("--model FNAME")


@pytest.mark.skipif(sys.platform != "linux", reason="from /proc")
def test_the_memory_of_processes_that_a_server_started_counts() -> None:
    child = "b = bytearray(b'x') * 2**27; print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = peak_memory_bytes(process.pid)
        process.communicate(b"\n")
    assert peak is not None
    assert peak > 2**27
