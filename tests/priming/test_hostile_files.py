"""Files that would hang or fill the memory are refused in one sentence."""

import gzip
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rekindle import bounded_file
from rekindle.errors import PrimeError, StartupError, UnreadableFile
from rekindle.explain.trace_file import read_trace
from rekindle.priming import files
from rekindle.priming.files import parse_prime_file, read_prime_file
from rekindle.replay import recorded_file
from rekindle.replay.traffic import read_traffic

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{one}: &{one} [{','.join([f'*{before}'] * 9)}]\n"
    for before, one in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.yaml", f"{ALIASES}system: [*i]\n", "a.yaml:2: not valid YAML: aliases are not read."),
        ("a.yaml", "[" * 100_000, "a.yaml:1: not valid YAML: values are nested more than 100 deep"),
        ("a.yaml", "\n".join(" " * i + "a:" for i in range(300)), "nested more than 100 deep"),
        ("a.yaml", "system: 1" + ":1" * 100_000, "a.yaml:1: not valid YAML: a number is too long"),
        ("a.yaml", "system: 2001-99-99", "month must be in"),
        ("a.yaml", "system: " + "x" * 2**20, "YAML is read up to 1 MiB"),
        ("a.toml", "a" + ".a" * 30_000 + " = 1", "a key has more than 32 parts"),
        ("a.toml", 'a = {"a"' + " . 'a'" * 30_000 + " = 1}", "a key has more than 32 parts"),
        ("a.toml", "a = " + "[" * 100_000, "not valid TOML: maximum recursion depth"),
        ("a.toml", "a = " + "1" * 5_000, "not valid TOML: Exceeds the limit"),
        ("a.json", '{"system": ' + "1" * 5_000 + "}", "a.json:1: not valid JSON: Exceeds"),
        ("a.json", "[" * 100_000, "a.json:1: the JSON is nested too deep"),
        ("a.json", '{"tools": [' + "{}," * 200_000 + "{}]}", "a.json:1: the JSON has more values"),
        ("a.jsonl", "[" + "0," * 1_000_001 + "0]", "a.jsonl:1: the JSON has more values"),
        ("a.json", '{"prompt": ["x"' + ',"x"' * 100_000 + "]}", "more than 100,000 prompts"),
    ],
)
def test_a_file_that_would_take_for_ever_is_refused(name: str, content: str, why: str) -> None:
    with pytest.raises(PrimeError) as caught:
        parse_prime_file(Path(name), content.encode())
    assert why in caught.value.message
    assert "\n" not in caught.value.message


def test_a_text_with_dots_is_no_long_key() -> None:
    text = "system = '''\n" + "Wait. " * 1_000 + "." * 1_000 + "\n'''\n"
    assert len(parse_prime_file(Path("a.toml"), text.encode())) == 1


def test_a_small_file_does_not_unpack_to_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 2**20)
    bomb = gzip.compress(bytes(2**20)) * 100
    with pytest.raises(UnreadableFile, match=r"a\.json\.gz has more than 1 MiB of content"):
        parse_prime_file(Path("a.json.gz"), bomb)


def test_a_recorded_file_has_a_size_and_its_lines_have_a_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "trace.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"x" * 2**20) * 4)
    monkeypatch.setattr(bounded_file, "MAX_LINE_BYTES", 2**20)
    with pytest.raises(StartupError, match="a line is longer than 1 MiB"):
        read_trace([bomb])
    monkeypatch.setattr(recorded_file, "MAX_BYTES", 2**21)
    with pytest.raises(StartupError, match="has more than 2 MiB of content"):
        read_traffic([bomb])
    bomb.write_bytes(gzip.compress((b"x" * 1023 + b"\n") * 2**10) * 4)
    with pytest.raises(StartupError, match="has more than 2 MiB of content"):
        read_trace([bomb])


@pytest.mark.parametrize("read", [read_prime_file, lambda path: read_traffic([path]).requests])
def test_a_pipe_that_the_user_names_is_read_to_its_end(
    read: Callable[[Path], Sequence[object]], tmp_path: Path
) -> None:
    pipe = tmp_path / "a.jsonl"
    os.mkfifo(pipe)
    line = b'{"prompt": "x"}\n'
    with ThreadPoolExecutor() as threads:
        threads.submit(pipe.write_bytes, line * 10_000)  # more than a pipe holds at once
        assert len(read(pipe)) == 10_000


def test_the_output_of_a_command_can_be_replayed() -> None:
    """As `rekindle replay <(zcat a.gz)`: an end of a pipe that nobody writes to any more."""
    reader, writer = os.pipe()
    os.write(writer, gzip.compress(b'{"prompt": "x"}\n' * 3))
    os.close(writer)
    try:
        assert len(read_traffic([Path(f"/dev/fd/{reader}")]).requests) == 3
    finally:
        os.close(reader)


@pytest.mark.parametrize("value", ["Infinity", "NaN", "1e999", "1" + "0" * 400])
def test_a_number_that_is_no_time_does_not_stop_a_replay_or_an_explanation(
    value: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    line = '{"path": "/v1/completions", "body": {"prompt": "x"}, "t": VALUE}\n'
    file.write_text(line.replace("VALUE", value) + line.replace("VALUE", "1"))
    assert len(read_traffic([file]).requests) == 2
    with pytest.raises(StartupError, match="is not a trace"):
        read_trace([file])
