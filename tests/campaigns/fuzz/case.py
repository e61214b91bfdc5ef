"""One case of the campaign, and the file that a failing case is written to.

A case is made from (seed, kind, number), so a campaign can be repeated and resumed. A failing case
is kept with its bytes: ids of stored responses and keys of prefixes come from earlier replies.
"""

import json
import random
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any


class Kind(StrEnum):
    SCHEMA = "schema"  # bodies grown from /openapi.json
    RECORDED = "recorded"  # bodies that agents sent, mutated
    GRAMMAR = "grammar"  # JSON Schemas of tools and reply formats
    RAW = "raw"  # bytes that are not quite HTTP
    ARCHIVE = "archive"  # for `rekindle cache import`
    GGUF = "gguf"
    TEMPLATE = "template"
    DATABASE = "database"  # catalogue, turns, responses
    STATE = "state"  # a whole cache directory in front of a server that restores from it


# How often each kind comes in a thousand cases. Requests are cheap, a state needs a server.
SHARES = {
    Kind.SCHEMA: 619,
    Kind.RECORDED: 110,
    Kind.GRAMMAR: 60,
    Kind.RAW: 150,
    Kind.ARCHIVE: 25,
    Kind.GGUF: 25,
    Kind.TEMPLATE: 5,
    Kind.DATABASE: 5,
    Kind.STATE: 1,
}
WIRE_KINDS = frozenset({Kind.SCHEMA, Kind.RECORDED, Kind.GRAMMAR, Kind.RAW})
FILE_KINDS = frozenset({Kind.ARCHIVE, Kind.GGUF, Kind.TEMPLATE, Kind.DATABASE})


class Leave(StrEnum):
    NEVER = "never"
    IN_REQUEST = "in the request"  # after `leave_bytes` of it
    IN_REPLY = "in the reply"


@dataclass(frozen=True, slots=True)
class WireCase:
    """A request, or `pieces` of bytes to send as they are."""

    kind: Kind
    number: int
    method: str = "GET"
    path: str = "/"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    pieces: tuple[bytes, ...] = ()
    leave: Leave = Leave.NEVER
    leave_bytes: int = 0

    def wire(self) -> bytes:
        """Return the bytes of the request."""
        if self.pieces:
            return b"".join(self.pieces)
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method == "POST":
            lines.append(f"content-length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body


@dataclass(frozen=True, slots=True)
class FileCase:
    kind: Kind
    number: int
    data: bytes
    name: str = ""  # of the file, where a kind has several
    is_sealed: bool = False  # its checksums are right, so its content cannot be doubted


Case = WireCase | FileCase


def noise_of(seed: int, kind: Kind, number: int) -> random.Random:
    return random.Random(f"{seed} {kind} {number}")


def write_failure(folder: Path, case: Case, seed: int, problem: str) -> Path:
    """Write the case where `--replay` finds it. Return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{case.kind}-{seed}-{case.number}.json"
    fields = asdict(case)
    content = {"problem": problem, "seed": seed, "case": fields}
    path.write_text(json.dumps(content, default=_text_of, indent=1), "utf-8")
    return path


def read_failure(path: Path) -> Case:
    fields: dict[str, Any] = json.loads(path.read_text("utf-8"))["case"]
    kind = Kind(fields.pop("kind"))
    if kind not in WIRE_KINDS:
        return FileCase(kind, **{**fields, "data": _bytes_of(fields["data"])})
    case = WireCase(kind, fields["number"], fields["method"], fields["path"])
    return replace(
        case,
        headers=tuple((name, value) for name, value in fields["headers"]),
        body=_bytes_of(fields["body"]),
        pieces=tuple(map(_bytes_of, fields["pieces"])),
        leave=Leave(fields["leave"]),
        leave_bytes=fields["leave_bytes"],
    )


def _text_of(data: bytes) -> str:
    return data.decode("latin-1")  # every byte is one character: readable, and exact


def _bytes_of(text: str) -> bytes:
    return text.encode("latin-1")
