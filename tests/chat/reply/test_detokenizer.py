"""Whole characters and stop strings, however the tokens cut them."""

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.reply.detokenizer import StopScanner, Utf8Assembler

ALPHABET = st.text(alphabet="abc\u00e9\U0001f600", max_size=30)


@given(ALPHABET, st.lists(st.integers(1, 3), max_size=200))
def test_characters_come_out_whole_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    assembler, data, shown = Utf8Assembler(), text.encode(), ""
    for size in cuts:
        shown += assembler.feed(data[:size])
        data = data[size:]
        assert text.startswith(shown)
        assert "\ufffd" not in shown
    assert shown + assembler.feed(data) + assembler.flush() == text


def test_a_character_that_never_ends_is_shown_as_replacement_at_the_end() -> None:
    assembler = Utf8Assembler()
    assert assembler.feed(b"\xf0\x9f") == ""
    assert assembler.flush() == "\ufffd"


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
