"""Archives: export prompts from one directory, import them into another, whole or not at all."""

import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.entry import (
    BLOCK_TOKENS,
    Entry,
    Retention,
    decode_preamble,
    encode_preamble,
)
from rekindle.cache.names import Named
from rekindle.cache.tools.archive import Exported, Imported, export_to, import_from
from rekindle.cache.tools.archive_format import (
    MAX_MANIFEST_BYTES,
    ArchiveDamaged,
    read_manifest,
)
from rekindle.cache.tools.directory import read_stored
from rekindle.errors import EntryCorrupt, StartupError
from rekindle.generation.request import Rank
from tests.cache.entries import (
    MODEL,
    OTHER_MODEL,
    assert_catalogue_is_true,
    file_of,
    make_entry,
    open_tier,
)

SECRET = Retention(Rank.BACKGROUND, "ann", 4_000_000_000.0)


@dataclass(frozen=True)
class Source:
    """Two blocks and a tail, under a name; and another conversation behind the first block."""

    directory: Path
    prompt: list[Entry]
    other: Entry
    named: Named


def quiet(_done: int, _total: int) -> None:
    pass


def follow(parent: Entry | None, seed: int, *, n_tokens: int = BLOCK_TOKENS) -> Entry:
    key, start = (parent.header.key, parent.header.stop) if parent else (None, 0)
    made = make_entry(seed, parent=key, n_tokens=n_tokens, payload_bytes=300)
    return replace(made, header=replace(made.header, start=start), retention=SECRET)


def make_source(directory: Path) -> Source:
    first = follow(None, 1)
    second = follow(first, 2)
    tail = follow(second, 3, n_tokens=9)
    other = follow(first, 4, n_tokens=5)
    prompt = [first, second, tail]
    tokens = b"".join(entry.header.tokens for entry in prompt)
    named = Named(root=MODEL, name="docs/v1", tokens=tokens, session="ann", named_at=1000.0)
    with closing(open_tier(directory)) as tier:
        for entry in (*prompt, other):
            tier.put(entry)
        tier.give_name(named)
    return Source(directory, prompt, other, named)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return make_source(tmp_path / "source")


def pack(source: Source, path: Path) -> Exported:
    stored = read_stored(source.directory)
    lineage = stored.of_name(source.named)
    return export_to(path, source.directory, stored, [lineage], quiet)


def take_in(path: Path, directory: Path) -> Imported:
    return import_from(path, directory, quiet)


def keys_in(directory: Path) -> set[str]:
    assert_catalogue_is_true(directory)
    return {path.stem for path in directory.glob("entries/*/*.kv")}


def hex_keys(entries: list[Entry]) -> set[str]:
    return {entry.header.key.hex() for entry in entries}


def test_imported_entries_equal_the_exported_ones_byte_for_byte(
    source: Source, tmp_path: Path
) -> None:
    exported = pack(source, tmp_path / "a.rekindle")
    assert exported.n_tokens == 2 * BLOCK_TOKENS + 9
    assert exported.n_bytes == (tmp_path / "a.rekindle").stat().st_size
    imported = take_in(tmp_path / "a.rekindle", tmp_path / "target")
    assert {key.hex() for key in imported.added} == hex_keys(source.prompt)
    assert keys_in(tmp_path / "target") == hex_keys(source.prompt)
    for entry in source.prompt:
        key = entry.header.key
        there, here = file_of(tmp_path / "target", key), file_of(source.directory, key)
        assert there.read_bytes() == here.read_bytes()
        assert there.read_bytes() in (tmp_path / "a.rekindle").read_bytes()


def test_a_server_of_the_other_directory_finds_entries_and_name(
    source: Source, tmp_path: Path
) -> None:
    pack(source, tmp_path / "a.rekindle")
    imported = take_in(tmp_path / "a.rekindle", tmp_path / "target")
    assert imported.names_added == ("docs/v1",)
    assert imported.is_new_model
    with closing(open_tier(tmp_path / "target")) as tier:
        assert tier.names() == [source.named]
        for entry in source.prompt:
            assert tier.get(entry.header.key).payload == entry.payload


def test_class_and_session_travel_and_a_pin_does_not(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "a.rekindle")
    take_in(tmp_path / "a.rekindle", tmp_path / "target")
    rows = [entry.row for entry in read_stored(tmp_path / "target").inventory.entries]
    assert {row.retention._replace(asked_at=0.0) for row in rows} == {replace_pin(SECRET)}


def replace_pin(retention: Retention) -> Retention:
    return retention._replace(pinned_until=0.0)


def test_importing_twice_adds_nothing_and_changes_nothing(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "a.rekindle")
    take_in(tmp_path / "a.rekindle", tmp_path / "target")
    before = read_stored(tmp_path / "target")
    again = take_in(tmp_path / "a.rekindle", tmp_path / "target")
    after = read_stored(tmp_path / "target")
    assert (again.added, again.names_added, again.names_kept) == ((), (), ())
    assert not again.is_new_model
    assert after.inventory.entries == before.inventory.entries
    assert after.names == before.names


def test_an_import_keeps_a_name_that_exists_for_another_prompt(
    source: Source, tmp_path: Path
) -> None:
    pack(source, tmp_path / "a.rekindle")
    theirs = replace(source.named, tokens=b"\0\0\0\1")
    with closing(open_tier(tmp_path / "target")) as tier:
        tier.give_name(theirs)
    imported = take_in(tmp_path / "a.rekindle", tmp_path / "target")
    assert (imported.names_added, imported.names_kept) == ((), ("docs/v1",))
    with closing(open_tier(tmp_path / "target")) as tier:
        assert tier.names() == [theirs]


def test_a_key_alone_takes_the_names_of_prompts_it_begins_with(
    source: Source, tmp_path: Path
) -> None:
    start = replace(source.named, name="start", tokens=source.prompt[0].header.tokens)
    with closing(open_tier(source.directory)) as tier:
        tier.give_name(start)
    stored = read_stored(source.directory)
    [tip] = stored.inventory.find(source.other.header.key.hex())
    exported = export_to(tmp_path / "a", source.directory, stored, [stored.of_entry(tip)], quiet)
    assert [named.name for named in exported.manifest.names] == ["start"]
    keys = [packed.key for packed in exported.manifest.entries]
    assert keys == [source.prompt[0].header.key, source.other.header.key]


def test_the_file_is_private_and_nothing_else_is_left(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    pack(source, folder / "a.rekindle")
    pack(source, folder / "a.rekindle")
    assert [path.name for path in folder.iterdir()] == ["a.rekindle"]
    assert stat.S_IMODE((folder / "a.rekindle").stat().st_mode) == 0o600


def test_a_damaged_entry_is_not_exported(source: Source, tmp_path: Path) -> None:
    path = file_of(source.directory, source.prompt[1].header.key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(StartupError, match=r"is damaged \(its payload .*verify"):
        pack(source, tmp_path / "out" / "a")
    path.unlink()
    with pytest.raises(StartupError, match="was deleted while it was exported"):
        pack(source, tmp_path / "out" / "a")
    assert not list((tmp_path / "out").iterdir())


def test_prompts_of_two_models_do_not_go_into_one_file(source: Source, tmp_path: Path) -> None:
    with closing(open_tier(source.directory, model=OTHER_MODEL)) as tier:
        tier.put(make_entry(9, model=OTHER_MODEL))
    stored = read_stored(source.directory)
    both = [stored.of_entry(entry) for entry in stored.inventory.tips()]
    with pytest.raises(StartupError, match="several models"):
        export_to(tmp_path / "a", source.directory, stored, both, quiet)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("archive")
    pack(make_source(folder / "source"), folder / "a")
    return (folder / "a").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


def assert_refused(data: bytes, folder: Path) -> None:
    path, target = folder / "damaged.rekindle", folder / "target"
    path.write_bytes(data)
    with pytest.raises(StartupError) as refusal:
        take_in(path, target)
    assert str(path) in refusal.value.message
    assert "nothing was added" in refusal.value.message
    assert not target.exists()


@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed_before_anything_is_added(
    archive: bytes, folder: Path, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(archive) - 1))
    damaged = bytearray(archive)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    assert_refused(bytes(damaged), folder)


@given(st.data())
def test_a_cut_or_an_addition_anywhere_is_noticed(
    archive: bytes, folder: Path, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(archive) - 1))
    assert_refused(archive[:place], folder)
    assert_refused(archive[:place] + b"\0" + archive[place:], folder)
    assert_refused(archive[:place] + archive[place + 1 :], folder)


def with_manifest(archive: bytes, change: dict[str, object]) -> bytes:
    """As somebody would write it who knows the format, and means harm."""
    magic, version, n_bytes = struct.unpack_from("<8sII", archive)
    manifest = json.loads(archive[24 : 24 + n_bytes]) | change
    encoded = json.dumps(manifest).encode()
    fixed = struct.pack("<8sII", magic, version, len(encoded))
    check = struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed + encoded))
    return fixed + check + encoded + archive[24 + n_bytes :]


NAME = {"root": "00" * 16, "name": "n", "tokens": "", "session": "ann", "named_at": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"entries": []},
        {"entries": [{"key": "00" * 16, "n_bytes": -1, "rank": 0, "session": ""}]},
        {"entries": 5},
        {"fingerprint": "00" * 16},
        {"fingerprint": "00"},
        {"fingerprint": None},
        {"names": [{"root": "00" * 16, "name": 5, "tokens": "", "session": "", "named_at": 0}]},
        {"names": [{"root": "00" * 16, "name": "\ud800", "tokens": "", "session": ""}]},
        {"names": [{}]},
        {"names": [NAME | {"name": "\x1b[2J"}]},
        {"names": [NAME | {"name": "../../etc"}, NAME | {"name": "a" * 129}]},
        {"names": [NAME | {"session": "ann\x1b]0;x\x07"}]},
        {"names": [NAME | {"session": "a" * 129}]},
        {"names": [NAME | {"named_at": float("inf")}]},
        {"names": [NAME | {"named_at": float("nan")}]},
        {"names": [NAME | {"named_at": 10**400}]},
        {"names": [NAME] * 1025},
        {"entries": {"key": 1}},
    ],
)
def test_a_list_of_contents_that_makes_no_sense_is_refused(
    archive: bytes, folder: Path, change: dict[str, object]
) -> None:
    assert_refused(with_manifest(archive, change), folder)


def test_a_session_with_escapes_is_refused(archive: bytes, folder: Path) -> None:
    (n_bytes,) = struct.unpack_from("<I", archive, 12)
    entries = json.loads(archive[24 : 24 + n_bytes])["entries"]
    entries[0]["session"] = "\x1b[31mann"
    assert_refused(with_manifest(archive, {"entries": entries}), folder)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_an_entry_with_a_number_that_is_not_finite_is_refused(number: float) -> None:
    entry = make_entry(1)
    wrong = replace(entry, header=replace(entry.header, compute_seconds=number))
    with pytest.raises(EntryCorrupt, match="not finite"):
        decode_preamble(encode_preamble(wrong))


def test_an_entry_that_claims_more_than_memory_is_refused_before_it_is_read(
    archive: bytes, folder: Path
) -> None:
    """A sparse file of a terabyte takes no room on disk."""
    entry = make_entry(1)
    huge = replace(entry.header, payload_bytes=2**40)
    (n_bytes,) = struct.unpack_from("<I", archive, 12)
    manifest = json.loads(archive[24 : 24 + n_bytes])
    packed = manifest["entries"][0] | {"key": huge.key.hex(), "n_bytes": huge.file_bytes}
    change: dict[str, object] = {
        "entries": [packed],
        "fingerprint": huge.fingerprint.hex(),
        "names": [],
    }
    head = with_manifest(archive[: 24 + n_bytes], change)
    path = folder / "huge"
    path.write_bytes(head + encode_preamble(replace(entry, header=huge)))
    os.truncate(path, len(head) + huge.file_bytes)
    with pytest.raises(StartupError, match="more than 4 GiB"):
        import_from(path, folder / "target", quiet)


def test_entries_without_what_they_follow_are_refused(archive: bytes, folder: Path) -> None:
    (n_bytes,) = struct.unpack_from("<I", archive, 12)
    entries = json.loads(archive[24 : 24 + n_bytes])["entries"]
    headless = with_manifest(archive, {"entries": entries[1:]})
    n_cut = entries[0]["n_bytes"]
    (n_head,) = struct.unpack_from("<I", headless, 12)
    assert_refused(headless[: 24 + n_head] + headless[24 + n_head + n_cut :], folder)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: None, "cannot be read: No such file or directory."),
        (lambda path: path.mkdir(), "is not a plain file."),
        (lambda path: os.mkfifo(path), "is not a plain file."),
        (lambda path: path.write_bytes(b""), "it is not an archive of `rekindle cache export`."),
    ],
)
def test_what_is_no_archive_is_refused_in_a_sentence(
    tmp_path: Path, make: Callable[[Path], object], complaint: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(StartupError) as refusal:
        take_in(tmp_path / "file", tmp_path / "target")
    assert refusal.value.message.endswith(complaint)
    assert not (tmp_path / "target").exists()


def test_a_device_or_a_pipe_is_not_replaced_by_an_export(source: Source, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match="is not a plain file"):
        pack(source, tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_folder_of_something_else_does_not_become_a_cache(source: Source, tmp_path: Path) -> None:
    pack(source, tmp_path / "a.rekindle")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(StartupError, match="is not a cache of Rekindle"):
        take_in(tmp_path / "a.rekindle", tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that stores entries in the target, and evicts them again."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.cache.disk.writer", str(tmp_path / "target")),
            *("--budget-bytes", "4000000", "--seed", "5000"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    with process:
        yield process
        process.kill()


def test_an_import_beside_a_process_that_stores_and_evicts_leaves_all_sound(
    source: Source, tmp_path: Path, writer: "subprocess.Popen[str]"
) -> None:
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    pack(source, tmp_path / "a.rekindle")
    n_written = 0
    for _ in range(5):
        imported = take_in(tmp_path / "a.rekindle", tmp_path / "target")
        assert len(imported.manifest.entries) == 3
        n_written += bool(writer.stdout.readline())
    assert n_written == 5  # it went on
    writer.kill()
    writer.wait()
    take_in(tmp_path / "a.rekindle", tmp_path / "target")
    assert hex_keys(source.prompt) <= keys_in(tmp_path / "target")


def test_a_server_that_is_running_makes_room_for_its_next_put(
    source: Source, tmp_path: Path
) -> None:
    with closing(open_tier(tmp_path / "target", budget_bytes=2_000_000)) as tier:
        tier.put(make_entry(70, payload_bytes=1_500_000))
        big = make_source_of_size(tmp_path / "big", payload_bytes=900_000)
        pack(big, tmp_path / "a.rekindle")
        take_in(tmp_path / "a.rekindle", tmp_path / "target")
        newest = make_entry(71, payload_bytes=1_000_000)
        assert tier.put(newest)  # what had to go
        assert tier.get(newest.header.key) == newest
        assert tier.n_bytes <= 2_000_000
    assert_catalogue_is_true(tmp_path / "target")


def make_source_of_size(directory: Path, *, payload_bytes: int) -> Source:
    entry = make_entry(60, payload_bytes=payload_bytes)
    tokens = entry.header.tokens
    named = Named(root=MODEL, name="big", tokens=tokens, session="ann", named_at=1000.0)
    with closing(open_tier(directory)) as tier:
        tier.put(entry)
        tier.give_name(named)
    return Source(directory, [entry], entry, named)


@pytest.mark.parametrize("n_bytes", [MAX_MANIFEST_BYTES + 100, 100])
def test_a_manifest_longer_than_the_file_or_than_any_is_not_read(
    n_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "archive"
    path.write_bytes(struct.pack("<8sIIQ", b"RKNDPACK", 1, MAX_MANIFEST_BYTES + 1, 0))
    os.truncate(path, n_bytes)  # sparse
    with path.open("rb") as file, pytest.raises(ArchiveDamaged, match="cut off"):
        read_manifest(file)
