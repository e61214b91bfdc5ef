"""Files as an attacker or a failing disk leaves them: archives, GGUF headers, databases, entries.

Half of the cases keep their checksums right, so that the content behind them is read.
"""

import json
import random
import sqlite3
import struct
import tempfile
import zlib
from contextlib import closing, suppress
from pathlib import Path

import xxhash

from rekindle.cache.entry import HEADER_BYTES, checksum
from rekindle.cache.tools.archive_format import HEAD_BYTES
from tests.campaigns.fuzz.case import FileCase, Kind
from tests.campaigns.fuzz.grow import hostile
from tests.campaigns.fuzz.grow.templates import grown_template
from tests.campaigns.fuzz.samples import Samples

SIZES = (0, 1, 4, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
CHECK_AT = 96  # of an entry's header checksum
PAYLOAD_CHECK_AT = 88
SQL_VALUES = (None, 0, -1, 2**62, 1e308, float("inf"), "text", b"", b"\xff" * 16, "\x1b[2J", b"\0")


def file_case(kind: Kind, number: int, noise: random.Random, samples: Samples) -> FileCase:
    match kind:
        case Kind.ARCHIVE:
            return FileCase(kind, number, _archive(samples.archive, noise))
        case Kind.GGUF:
            return FileCase(kind, number, _gguf(samples.model_header, noise))
        case Kind.TEMPLATE:
            return FileCase(kind, number, grown_template(noise).encode("utf-8", "replace"))
        case _:
            name = noise.choice(sorted(samples.databases))
            return FileCase(kind, number, _database(samples.databases[name], noise), name)


def entry_case(number: int, noise: random.Random, samples: Samples) -> FileCase:
    """Return a damaged file in place of a stored entry."""
    name, other = noise.sample(samples.entries, 2)
    data = (samples.directory / name).read_bytes()
    match noise.randrange(4):
        case 0:
            return FileCase(Kind.STATE, number, hostile.broken(data, noise), name)
        case 1:
            return FileCase(Kind.STATE, number, (samples.directory / other).read_bytes(), name)
        case 2:
            changed = _with_other_header(data, noise)
        case _:
            changed = _with_other_payload(data, noise)
    return FileCase(Kind.STATE, number, changed, name, is_sealed=True)


def _archive(data: bytes, noise: random.Random) -> bytes:
    if noise.random() < 0.4:
        return hostile.broken(data, noise)
    (n_manifest,) = struct.unpack_from("<I", data, 12)
    manifest = json.loads(data[HEAD_BYTES : HEAD_BYTES + n_manifest])
    entries = data[HEAD_BYTES + n_manifest :]
    if noise.random() < 0.7:
        for _ in range(noise.randrange(1, 3)):
            manifest = hostile.mutated(manifest, noise)
    else:
        entries = hostile.broken(entries, noise)
    encoded = hostile.encoded(manifest, noise)
    fixed = data[:12] + struct.pack("<I", len(encoded))
    return fixed + struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + encoded)) + encoded + entries


def _gguf(header: bytes, noise: random.Random) -> bytes:
    if noise.random() < 0.5:
        return hostile.broken(header, noise)
    data = bytearray(header)
    for _ in range(noise.randrange(1, 4)):
        form = noise.choice(("<Q", "<I", "<q"))
        near = noise.choice((64, 4096, len(data)))
        at = noise.choice((8, 16, noise.randrange(max(1, min(near, len(data)) - 8))))
        size = noise.choice(SIZES) % 2 ** (8 * struct.calcsize(form) - 1)
        struct.pack_into(form, data, at, size)
    return bytes(data)


def _database(data: bytes, noise: random.Random) -> bytes:
    if noise.random() < 0.3:
        return hostile.broken(data, noise)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.Error):
            if noise.random() < 0.4:
                _forge(connection, noise)
            else:
                _spoil(connection, noise)
        return path.read_bytes()


def _forge(connection: sqlite3.Connection, noise: random.Random) -> None:
    """Change the records of responses and turns, and make their checksums right again."""
    named = "SELECT name FROM sqlite_master WHERE type = 'table'"
    tables = {name for (name,) in connection.execute(named)}
    if "responses" in tables:
        for id, data in connection.execute("SELECT id, data FROM responses").fetchall():
            record = zlib.compress(_other_record(zlib.decompress(data), noise))
            connection.execute("UPDATE responses SET data = ? WHERE id = ?", (record, id))
    if "turns" in tables:
        query = "SELECT number, id, keys, data FROM turns"
        for number, id, keys, data in connection.execute(query).fetchall():
            record = hostile.broken(data, noise)
            length = len(keys).to_bytes(4, "little")
            check = xxhash.xxh3_64_digest(b"".join((id, length, keys, record)))
            changed = "UPDATE turns SET data = ?, checksum = ? WHERE number = ?"
            connection.execute(changed, (record, check, number))
    connection.commit()


def _other_record(data: bytes, noise: random.Random) -> bytes:
    """Change a stored response: as JSON, as bytes, or into a bomb."""
    chosen = noise.random()
    if chosen < 0.02:
        return b" " * 2**26
    if chosen < 0.3:
        return hostile.broken(data, noise)
    return hostile.encoded(hostile.mutated(json.loads(data), noise), noise)


def _spoil(connection: sqlite3.Connection, noise: random.Random) -> None:
    """Change cells, the header or the tables, as SQL allows it."""
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("PRAGMA journal_mode = DELETE")
    named = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    for _ in range(noise.randrange(1, 5)):
        tables = [name for (name,) in connection.execute(named)]
        if not tables:
            return
        table = noise.choice(tables)
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        match noise.randrange(8):
            case 0:
                connection.execute(f"DROP TABLE {table}")
            case 1:
                connection.execute(f"PRAGMA user_version = {noise.choice((0, 1, 99, 2**31 - 1))}")
            case 2:
                connection.execute("PRAGMA application_id = 7")
            case 3:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN more TEXT")
            case _:
                column = noise.choice(columns)
                where = noise.choice(("1", "rowid % 2", "rowid = 1"))
                invalid = f"UPDATE {table} SET {column} = CAST(x'ff41fe' AS TEXT) WHERE {where}"
                if noise.random() < 0.3:
                    connection.execute(invalid)
                else:
                    changed = f"UPDATE {table} SET {column} = ? WHERE {where}"
                    connection.execute(changed, (noise.choice(SQL_VALUES),))
        connection.commit()


def _with_other_header(data: bytes, noise: random.Random) -> bytes:
    """Change fields of the header, and make its checksum right again."""
    header = bytearray(data[:HEADER_BYTES])
    (n_tokens,) = struct.unpack_from("<I", header, 12)
    at, form = noise.choice(((6, "<B"), (7, "<B"), (8, "<I"), (16, "<Q"), (24, "<Q"), (32, "<Q")))
    size = noise.choice(SIZES) % 2 ** (8 * struct.calcsize(form))
    struct.pack_into(form, header, at, size)
    tokens = data[HEADER_BYTES : HEADER_BYTES + 4 * n_tokens]
    return _sealed(header, tokens) + data[HEADER_BYTES:]


def _with_other_payload(data: bytes, noise: random.Random) -> bytes:
    """Change the state that llama.cpp reads, and make both checksums right again."""
    (n_tokens,) = struct.unpack_from("<I", data, 12)
    start = -(-(HEADER_BYTES + 4 * n_tokens) // 64) * 64
    payload = data[start:]
    near = noise.choice((64, 400, len(payload)))
    changed = hostile.broken(payload[:near], noise) + payload[near:]
    if noise.random() < 0.5:
        changed = changed[: len(payload)].ljust(len(payload), b"\0")
    header = bytearray(data[:HEADER_BYTES])
    struct.pack_into("<Q", header, 16, len(changed))
    struct.pack_into("<Q", header, PAYLOAD_CHECK_AT, checksum(changed))
    tokens = data[HEADER_BYTES : HEADER_BYTES + 4 * n_tokens]
    return _sealed(header, tokens) + data[HEADER_BYTES:start] + changed


def _sealed(header: bytearray, tokens: bytes) -> bytes:
    check = xxhash.xxh3_64_intdigest(bytes(header[:CHECK_AT]) + tokens)
    struct.pack_into("<Q", header, CHECK_AT, check)
    return bytes(header)
