"""Texts that are known as tokens: how many, in bytes."""

import gc
import tracemalloc

import pytest

from rekindle.chat.prompt import token_run
from rekindle.chat.prompt.token_run import PieceTokenizer
from rekindle.chat.template.guard import PromptPiece
from tests.chat.test_responder import ByteTokenizer


@pytest.mark.parametrize("n_chars", [4, 2000])
def test_known_pieces_are_bounded_by_what_they_take_however_short_they_are(
    n_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = 500_000
    monkeypatch.setattr(token_run, "MAX_KNOWN_BYTES", limit_bytes)
    tokenize = PieceTokenizer(ByteTokenizer())
    gc.collect()
    tracemalloc.start()
    for number in range(20 * limit_bytes // (token_run.PIECE_BYTES + 5 * n_chars)):
        tokenize(PromptPiece(f"{number:0{n_chars}}", parse_special=False))
    n_taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_taken == pytest.approx(limit_bytes, rel=0.2)
