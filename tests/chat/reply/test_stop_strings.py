"""Whole characters and stop strings, however the tokens cut them."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.prompt.prompt import Prompt
from rekindle.chat.reply.assembler import ReplyAssembler
from rekindle.chat.reply.events import ReplyPart, ReplyText
from rekindle.chat.reply.stop_strings import StopScanner
from rekindle.generation.events import TokenSampled
from tests.chat.test_responder import ByteTokenizer

ALPHABET = st.text(alphabet="abc\u00e9\U0001f600", max_size=30)


@given(ALPHABET, st.lists(st.integers(1, 3), max_size=200))
def test_characters_come_out_whole_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    edges = [0, *accumulate(cuts), len(text.encode())]
    tokenizer = FixedPieces([text.encode()[i:j] for i, j in pairwise(edges)])
    reply = ReplyAssembler(Prompt((1,), (), ""), tokenizer, None, ())
    shown = ""
    for token in range(len(tokenizer.pieces)):
        shown += text_of(reply.feed(TokenSampled(token)))
        assert text.startswith(shown)
        assert "\ufffd" not in shown
    assert shown + text_of(reply.finish()) == text


def test_a_character_that_never_ends_is_shown_as_replacement_at_the_end() -> None:
    reply = ReplyAssembler(Prompt((1,), (), ""), FixedPieces([b"\xf0\x9f"]), None, ())
    assert text_of(reply.feed(TokenSampled(0))) == ""
    assert text_of(reply.finish()) == "\ufffd"


class FixedPieces(ByteTokenizer):
    """Token n is the n-th piece."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


def text_of(parts: list[ReplyPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReplyText))


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet="abc", max_size=40), STOPS, st.lists(st.integers(1, 5), max_size=60))
def test_text_before_the_first_stop_string_and_nothing_else(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner, rest, shown, stopped = StopScanner(tuple(stops)), text, "", False
    for size in [*cuts, len(text)]:
        scan = scanner.feed(rest[:size])
        rest = rest[size:]
        shown += scan.text
        if scan.stop is not None:
            stopped = True
            assert text[len(shown) :].startswith(scan.stop)
            break
    if not stopped:
        shown += scanner.flush()
    # Which stop wins may depend on the cut when they overlap; what may never happen is a leak.
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
    if stopped:
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
    else:
        assert shown == text


def test_text_that_cannot_be_a_stop_string_is_not_held_back() -> None:
    scanner = StopScanner(("</end>",))
    assert scanner.feed("hello <").text == "hello "
    assert scanner.feed("b>").text == "<b>"
