"""Prompts that fill in the middle: llama-server's tokens in llama-server's order."""

from collections.abc import Sequence

import pytest

from rekindle.chat.infill import FileChunk, Infill, infill_tokens
from rekindle.chat.mixed_tokens import mixed_tokens, with_bos
from rekindle.errors import InvalidRequest, NotSupported
from rekindle.generation.tokenizer import NO_INFILL, InfillMarks

PREFIX, SUFFIX, MIDDLE, REPOSITORY, SEPARATOR, BOS = range(256, 262)
NAMES = {
    PREFIX: "<PRE>",
    SUFFIX: "<SUF>",
    MIDDLE: "<MID>",
    REPOSITORY: "<REPO>",
    SEPARATOR: "<SEP>",
}
FILES = InfillMarks(PREFIX, SUFFIX, MIDDLE, REPOSITORY, SEPARATOR)
NO_FILES = InfillMarks(PREFIX, SUFFIX, MIDDLE)


class Bytes:
    """A token is a byte; the marks come after the bytes."""

    n_vocab = 262
    special_strings = end_strings = ()
    bos_text, eos_text = "<s>", ""

    def __init__(self, infill: InfillMarks = FILES, bos_token: int | None = None) -> None:
        self.infill = infill
        self.bos_token = bos_token

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if "\0" in text:
            raise InvalidRequest("No zero bytes.")
        if parse_special and text.startswith("<SUF>"):
            return [SUFFIX, *text.removeprefix("<SUF>").encode()]
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return self.detokenize((token,), render_special=False)

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        texts = {token: bytes((token,)) for token in range(256)}
        texts |= {token: name.encode() for token, name in NAMES.items()} | {BOS: b"<s>"}
        return b"".join(texts[token] for token in tokens)


def text_of(
    infill: Infill, tokenizer: Bytes | None = None, *, n_ctx: int = 4096, batch_size: int = 1024
) -> str:
    tokenizer = tokenizer or Bytes()
    tokens, _ = infill_tokens(infill, tokenizer, n_ctx=n_ctx, batch_size=batch_size)
    return tokenizer.detokenize(tokens, render_special=True).decode()


GAP = Infill(prefix="def f():\n", suffix="\nprint(f())", prompt="    return ")
CHUNKS = (FileChunk("a = 1\n", "a.py"), FileChunk("b = 2\n"))


def test_chunks_of_files_come_before_the_text_around_the_gap() -> None:
    infill = Infill(prefix="x", suffix="y", prompt="z", chunks=CHUNKS)
    assert text_of(infill) == (
        "<REPO>myproject\n<SEP>a.py\na = 1\n<SEP>tmp\nb = 2\n<SEP>filename\n<PRE>xz<SUF>y<MID>"
    )


def test_without_tokens_for_files_a_line_divides_the_chunks() -> None:
    infill = Infill(prefix="x", suffix="y", chunks=CHUNKS)
    text = text_of(infill, Bytes(NO_FILES))
    divider = "\n\n--- snippet ---\n\n"
    assert text == f"{divider}a = 1\n{divider}b = 2\n<PRE>x<SUF>y<MID>"


def test_the_first_token_of_prompts_stands_before_the_prefix() -> None:
    text = text_of(Infill(prefix="x", suffix="y"), Bytes(NO_FILES, BOS))
    assert text == "<s><PRE>x<SUF>y<MID>"


def test_one_more_chunk_keeps_all_tokens_before_it() -> None:
    tokenizer = Bytes()
    one, two = (
        infill_tokens(
            Infill(prefix="x", suffix="y", chunks=CHUNKS[:n]), tokenizer, n_ctx=4096, batch_size=64
        )
        for n in (1, 2)
    )
    (end,) = one.boundaries
    assert tokenizer.detokenize(one.tokens[:end], render_special=True).endswith(b"a = 1\n")
    assert two.tokens[:end] == one.tokens[:end]
    assert two.boundaries[0] == end


def test_the_text_around_the_gap_fits_in_a_batch_with_the_ends_that_touch_the_gap() -> None:
    infill = Infill(prefix="p" * 500 + "P", suffix="S" + "s" * 500, prompt="q")
    text = text_of(infill, Bytes(NO_FILES), batch_size=40)
    assert text == f"<PRE>{'p' * 29}Pq<SUF>S{'s' * 6}<MID>"


@pytest.mark.parametrize("n_ctx", [256, 512, 1024, 4096])
@pytest.mark.parametrize("n_predict", [None, 0, 128, 10**6])
def test_the_last_chunks_fill_the_context_and_leave_room_for_a_reply(
    n_ctx: int, n_predict: int | None
) -> None:
    chunks = [FileChunk(f"{index:04}" * 20) for index in range(200)]
    infill = Infill(prefix="p" * 9000, suffix="s" * 9000, chunks=chunks, n_predict=n_predict)
    tokenizer = Bytes()
    tokens, boundaries = infill_tokens(infill, tokenizer, n_ctx=n_ctx, batch_size=2048)
    room = n_ctx - len(tokens)
    assert room >= min(n_predict or 1, n_ctx // 4)
    assert boundaries == tuple(sorted(boundaries))
    if boundaries:
        text = tokenizer.detokenize(tokens[: boundaries[-1]], render_special=True)
        assert text.endswith(b"0199")


def test_text_of_files_never_becomes_a_control_token_but_the_begun_line_may() -> None:
    quiet = Infill(prefix="<SUF>", suffix="<SUF>", chunks=[FileChunk("<SUF>")])
    tokens, _ = infill_tokens(quiet, Bytes(), n_ctx=4096, batch_size=1024)
    assert tokens.count(SUFFIX) == 1
    begun = Infill(prefix="", suffix="", prompt="<SUF>")
    tokens, _ = infill_tokens(begun, Bytes(), n_ctx=4096, batch_size=1024)
    assert tokens.count(SUFFIX) == 2


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        (NO_INFILL, "prefix token is missing. suffix token is missing. middle token is missing."),
        (InfillMarks(PREFIX, None, MIDDLE), "suffix token is missing."),
    ],
)
def test_a_model_without_the_tokens_is_refused_in_llama_servers_words(
    marks: InfillMarks, told: str
) -> None:
    with pytest.raises(NotSupported) as refused:
        text_of(GAP, Bytes(marks))
    assert refused.value.message == f"Infill is not supported by this model: {told}"


def test_lists_may_mix_texts_and_token_ids() -> None:
    tokens = mixed_tokens([BOS, "ab", 7], Bytes(), parse_special=True, path="prompt")
    assert tokens == [BOS, *b"ab", 7]


@pytest.mark.parametrize("part", [-1, 262, 10**12, "\0"])
def test_a_wrong_part_of_a_list_is_named(part: int | str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mixed_tokens(["ok", part], Bytes(), parse_special=True, path="prompt")
    assert refused.value.param == "prompt.1"


def test_only_a_list_that_begins_with_text_gets_the_first_token() -> None:
    tokenizer = Bytes(bos_token=BOS)
    assert with_bos(["a", 5], tokenizer) == [BOS, "a", 5]
    assert with_bos(["<s>a", 5], tokenizer) == ["<s>a", 5]
    assert with_bos([5, "a"], tokenizer) == [5, "a"]
    assert with_bos(["a"], Bytes()) == ["a"]
