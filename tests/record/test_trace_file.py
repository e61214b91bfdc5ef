"""The trace file: its lines, its limits and who may read it."""

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from rekindle.record.redaction import Redaction
from rekindle.record.trace_line import MAX_REPLY_BYTES, Exchanged, Headers, line_of
from rekindle.record.trace_writer import TraceWriter

BODY = {"messages": [{"role": "user", "content": "Hello"}]}
PLAIN = json.dumps(BODY).encode()


def exchanged(
    body: bytes = PLAIN, headers: Headers | None = None, *, reply: bytes = b"", encoding: str = ""
) -> Exchanged:
    return Exchanged(
        seq=1,
        method="POST",
        path="/v1/chat/completions",
        query="",
        headers=headers or [],
        body=body,
        started=1.0,
        reply_headers=[("content-encoding", encoding)] if encoding else [],
        reply=bytearray(reply),
    )


def recorded(each: Exchanged) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(line_of(each, Redaction()))
    return line


def raw_deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("identity", PLAIN),
        ("gzip", gzip.compress(PLAIN)),
        ("X-Gzip", gzip.compress(PLAIN)),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
        ("deflate, gzip", gzip.compress(zlib.compress(PLAIN))),
    ],
    ids=["identity", "gzip", "x-gzip", "zlib", "raw deflate", "two"],
)
def test_packed_bodies_and_replies_are_recorded_unpacked(encoding: str, packed: bytes) -> None:
    headers = [("content-encoding", encoding)]
    line = recorded(exchanged(packed, headers, reply=packed, encoding=encoding))
    assert line["body"] == BODY
    assert line["reply"]["text"] == PLAIN.decode()


@pytest.mark.parametrize("encoding", ["zstd", "br", "gz\u00efp", "gzip, zstd"])
def test_what_cannot_be_unpacked_is_left_out(encoding: str) -> None:
    headers = [("content-encoding", encoding)]
    line = recorded(exchanged(PLAIN, headers, reply=PLAIN, encoding=encoding))
    assert line["body"] is None
    assert line["reply"]["text"] == ""


def test_a_packed_reply_that_was_cut_off_is_recorded_up_to_there() -> None:
    text = " ".join(map(str, range(1000)))
    packed = gzip.compress(text.encode())
    line = recorded(exchanged(reply=packed[: len(packed) // 2], encoding="gzip"))
    assert line["reply"]["text"]
    assert text.startswith(line["reply"]["text"])


def test_a_small_reply_that_unpacks_to_much_takes_little_memory() -> None:
    bomb = gzip.compress(b"a" * 2**27, compresslevel=1)
    tracemalloc.start()
    line = recorded(exchanged(reply=bomb, encoding="gzip"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(line["reply"]["text"]) == MAX_REPLY_BYTES
    assert peak < 2**26


def test_a_line_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.put(object.__new__(Exchanged))  # without its fields
    writer.put(exchanged())
    writer.close()
    assert writer.n_written == 1
    assert writer.failure is not None
    assert "AttributeError" in writer.failure


def test_a_file_that_others_could_read_becomes_private(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    trace.chmod(0o644)
    TraceWriter(trace).close()
    assert trace.stat().st_mode & 0o777 == 0o600
    assert trace.read_text() == "{}\n"
