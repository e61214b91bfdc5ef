"""A deletion on a real server: what runs at that moment leaves nothing."""

import random
import time
from contextlib import closing
from pathlib import Path

import httpx

from tests.conftest import TinyModels
from tests.support.cache_traffic import Caller, eventually, random_tokens
from tests.support.server_process import serve
from tests.support.tiny_models import TinyArchitecture


def test_a_request_that_runs_during_a_delete_leaves_no_file(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    model = tiny_models(TinyArchitecture.LLAMA)
    rng = random.Random("deleted")
    secret, kept = random_tokens(rng, 2000), random_tokens(rng, 600)

    def is_stored() -> None:
        assert list(tmp_path.rglob("*.kv"))

    arguments = (str(model), "--parallel", "2", "--ctx-size", "8192", "--threads", "1")
    with (
        serve(*arguments, "--cache-dir", str(tmp_path), "--no-cache-recompute") as server,
        closing(Caller(server.url)) as caller,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        with caller.open_stream(secret, n_tokens=600) as stream:
            stream.read(20)
            eventually(is_stored)
            assert http.delete("/v1/cache").json()["deleted"] > 0
            assert list(tmp_path.rglob("*.kv")) == []
            stream.read(None)
        time.sleep(1.0)  # its rows would be written by now
        assert list(tmp_path.rglob("*.kv")) == []
        assert caller.ask(secret[:1000]).n_cached == 0
        assert http.delete("/v1/cache").status_code == 200
        caller.ask(kept)
        assert caller.ask(kept).n_cached == len(kept)
    # The server has stored the rows of its slots before it stopped.
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"".join(token.to_bytes(4) for token in kept[:50]) in stored
    for first in range(0, 2000, 50):
        piece = b"".join(token.to_bytes(4) for token in secret[first : first + 50])
        assert piece not in stored
