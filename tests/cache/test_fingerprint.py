import json
import os
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rekindle.cache.fingerprint import (
    MAX_DIGESTS,
    DigestFile,
    Identity,
    fingerprint,
    weights_digest,
)
from rekindle.errors import StartupError

IDENTITY = Identity(
    weights="ab" * 32,
    model_class="dense",
    type_k="f16",
    type_v="q8_0",
    flash_attn="auto",
    swa_full=True,
    rope_n_ctx=4096,
    attn_rot_disable="0",
    state_version="3",
)
STRETCHED = replace(
    IDENTITY,
    rope_scaling="yarn",
    rope_freq_base=10000.0,
    rope_freq_scale=0.25,
    yarn={"orig_ctx": 4096.0},
    adapters=(("cd" * 32, 1.0),),
)


def other(value: object) -> Any:
    match value:
        case bool():
            return not value
        case str():
            return value + "x"
        case int() | float():
            return value + 1
        case dict():
            return {key: number + 1 for key, number in value.items()}
        case tuple():
            return (*value, *value)
    raise AssertionError(f"IDENTITY needs a value where it has {value!r}")


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_every_field_changes_the_fingerprint(field: str) -> None:
    changed = replace(STRETCHED, **{field: other(getattr(STRETCHED, field))})
    assert fingerprint(changed) != fingerprint(STRETCHED)


def test_entries_from_before_rope_settings_and_adapters_existed_are_still_found() -> None:
    assert fingerprint(IDENTITY).hex() == "c091a3f5d1dd9d222f8dabb8af308718"
    assert fingerprint(replace(IDENTITY, yarn={})) == fingerprint(IDENTITY)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (replace(IDENTITY, type_k="q4", type_v="_0"), replace(IDENTITY, type_k="q4_", type_v="0")),
        (replace(IDENTITY, attn_rot_disable=None), replace(IDENTITY, attn_rot_disable="null")),
        (replace(IDENTITY, rope_n_ctx=None), replace(IDENTITY, rope_n_ctx=0)),
        (replace(IDENTITY, type_k='x", "y": "'), replace(IDENTITY, type_k="x")),
        (replace(IDENTITY, rope_scaling="yarn"), IDENTITY),
        (replace(IDENTITY, rope_freq_base=500.0), IDENTITY),
        (replace(IDENTITY, rope_freq_scale=0.5), IDENTITY),
        (replace(IDENTITY, yarn={"ext_factor": 0.0}), IDENTITY),
        (
            replace(IDENTITY, yarn={"beta_fast": 1.0}),
            replace(IDENTITY, yarn={"beta_slow": 1.0}),
        ),
        (replace(IDENTITY, adapters=(("ab", 1.0),)), IDENTITY),
        (replace(IDENTITY, adapters=(("ab", 0.5),)), replace(IDENTITY, adapters=(("ab", 1.0),))),
    ],
)
def test_different_identities_never_share_a_fingerprint(one: Identity, two: Identity) -> None:
    assert fingerprint(one) != fingerprint(two)


def test_what_was_stored_by_an_earlier_release_is_still_found() -> None:
    assert fingerprint(IDENTITY).hex() == "c091a3f5d1dd9d222f8dabb8af308718"


def settled(path: Path, content: bytes) -> Path:
    """A file that was written a while ago."""
    path.write_bytes(content)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def known(tmp_path: Path) -> DigestFile:
    return DigestFile(tmp_path / "cache" / "weights.json")


def digest_of(
    paths: list[Path],
    known: DigestFile | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> str:
    with TemporaryDirectory() as folder:
        nothing_known = DigestFile(Path(folder) / "weights.json")
        return weights_digest(paths, known=known or nothing_known, on_progress=on_progress)


def remembered(tmp_path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads((tmp_path / "cache" / "weights.json").read_bytes())
    return rows


def forge(tmp_path: Path, digest: str) -> None:
    """Makes it visible whether a digest was remembered or computed."""
    rows = [{**row, "sha256": digest} for row in remembered(tmp_path)]
    (tmp_path / "cache" / "weights.json").write_text(json.dumps(rows))


FORGED = "00" * 32
DIGEST_OF_FORGED = sha256(bytes(32)).hexdigest()


def test_the_digest_is_of_the_content_in_order_and_of_where_files_end(tmp_path: Path) -> None:
    a, bc = settled(tmp_path / "1", b"a"), settled(tmp_path / "2", b"bc")
    ab, c = settled(tmp_path / "3", b"ab"), settled(tmp_path / "4", b"c")
    copy = settled(tmp_path / "copy", b"a")
    assert digest_of([a, bc]) == digest_of([copy, bc])
    assert len({digest_of(paths) for paths in ([a, bc], [ab, c], [bc, a], [a])}) == 4


def test_a_file_of_several_chunks_is_read_to_its_end(tmp_path: Path) -> None:
    content = os.urandom(10_000_000)
    path = settled(tmp_path / "model", content)
    progress: list[tuple[int, int]] = []
    digest = digest_of([path], on_progress=lambda *seen: progress.append(seen))
    assert digest == sha256(sha256(content).digest()).hexdigest()
    assert len(progress) > 1
    assert progress == sorted(progress)
    assert progress[-1] == (10_000_000, 10_000_000)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, known: DigestFile) -> None:
    path = settled(tmp_path / "model", b"weights")
    digest_of([path], known)
    forge(tmp_path, FORGED)
    link = tmp_path / "link"
    link.symlink_to(path)
    progress: list[tuple[int, int]] = []
    digest = digest_of([link], known, on_progress=lambda *seen: progress.append(seen))
    assert digest == DIGEST_OF_FORGED
    assert progress == [(7, 7)]


def rewrite_in_place(path: Path) -> None:
    path.write_bytes(b"WEIGHTS")


def rewrite_keeping_the_time(path: Path) -> None:
    settled(path, b"WEIGHTS")


def replace_by_another(path: Path) -> None:
    os.replace(settled(path.with_name("new"), b"WEIGHTS"), path)


def grow(path: Path) -> None:
    settled(path, b"weights and more")


@pytest.mark.parametrize(
    "change", [rewrite_in_place, rewrite_keeping_the_time, replace_by_another, grow]
)
def test_a_changed_file_is_read_again(
    tmp_path: Path, known: DigestFile, change: Callable[[Path], None]
) -> None:
    path = settled(tmp_path / "model", b"weights")
    digest_of([path], known)
    forge(tmp_path, FORGED)
    change(path)
    assert digest_of([path], known) == digest_of([path])


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, known: DigestFile
) -> None:
    path = settled(tmp_path / "model", b"weights")
    with pytest.raises(StartupError, match="was changed while it was read"):
        digest_of([path], known, on_progress=lambda *_: rewrite_in_place(path))
    assert not known.load()


def test_a_file_written_a_moment_ago_is_not_remembered(tmp_path: Path, known: DigestFile) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    digest_of([path], known)
    assert not known.load()


def test_the_least_recently_used_digests_are_forgotten(tmp_path: Path, known: DigestFile) -> None:
    files = [settled(tmp_path / str(number), b"x") for number in range(MAX_DIGESTS)]
    for path in files:
        digest_of([path], known)
    digest_of(files[:2], known)
    digest_of([settled(tmp_path / "one more", b"x")], known)
    kept = [Path(state.path).name for state in known.load()]
    assert kept == [*(str(number) for number in range(3, MAX_DIGESTS)), "0", "1", "one more"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[1]",
        b'{"a": 1}',
        b"null",
        b'[{"file": {"path": "x"}, "sha256": "00"}]',
        b"[" * 100_000,
        json.dumps(
            [
                {
                    "file": dict.fromkeys(
                        ("path", "size", "mtime_ns", "ctime_ns", "inode", "device"), 1
                    ),
                    "sha256": "not hex" * 9 + "x",
                }
            ]
        ).encode(),
    ],
)
def test_a_damaged_file_of_digests_is_an_empty_one(
    tmp_path: Path, known: DigestFile, content: bytes
) -> None:
    path = settled(tmp_path / "model", b"weights")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "weights.json").write_bytes(content)
    assert known.load() == {}
    assert digest_of([path], known) == digest_of([path])
    assert len(remembered(tmp_path)) == 1


def test_digests_are_for_the_owner_alone_and_leave_no_partial_file(
    tmp_path: Path, known: DigestFile
) -> None:
    digest_of([settled(tmp_path / "model", b"weights")], known)
    (file,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_digests_that_cannot_be_kept_are_computed_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = settled(tmp_path / "model", b"weights")
    known = DigestFile(path / "weights.json")
    assert digest_of([path], known) == digest_of([path])
    assert "failed" in caplog.text


def test_a_missing_file_is_the_operators_to_fix(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        digest_of([tmp_path / "no"])
