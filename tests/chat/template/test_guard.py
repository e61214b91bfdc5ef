"""The client's text stays plain text, even if a template cuts and joins it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.template.guard import Guard, PromptPiece

SPECIALS = ("<|end|>", "<|start|>", "<tool>", "[X]", "|>a", "~")
GUARD = Guard(SPECIALS)
SENTINEL = GUARD.sentinel()

scraps = st.sampled_from(["<", "|", ">", "<|", "|>", "end", "start", "[", "X]", "a", " ", "~"])
texts = st.lists(scraps | st.sampled_from(SPECIALS), max_size=8).map("".join)
brackets = st.sampled_from(["", "<", "<|", "|>", ">", "[", "]"])


class Rendering:
    """Texts of both origins in a row, and the pieces that the guard makes of them."""

    def __init__(self, *segments: tuple[bool, str]) -> None:
        self.text = "".join(text for _, text in segments)
        self.is_client = [is_client for is_client, text in segments for _ in text]
        self.pieces = GUARD.pieces(
            "".join(
                GUARD.mark(text, SENTINEL) if is_client else text for is_client, text in segments
            ),
            SENTINEL,
        )

    def parsed_specials(self) -> list[list[bool]]:
        """For every special string that would become a token: who wrote its characters."""
        found, offset = [], 0
        for piece in self.pieces:
            end = offset + len(piece.text)
            for start in range(offset, end if piece.parse_special else offset):
                found += [
                    self.is_client[start : start + len(special)]
                    for special in SPECIALS
                    if self.text.startswith(special, start) and start + len(special) <= end
                ]
            offset = end
        return found


@given(st.lists(st.tuples(st.booleans(), texts)))
def test_no_special_string_that_begins_in_client_text_is_parsed(
    segments: list[tuple[bool, str]],
) -> None:
    rendering = Rendering(*segments)

    assert "".join(piece.text for piece in rendering.pieces) == rendering.text
    assert not [origin for origin in rendering.parsed_specials() if origin[0]]


@given(brackets, texts, brackets)
def test_brackets_of_the_template_do_not_complete_client_text(
    opening: str, text: str, closing: str
) -> None:
    rendering = Rendering((False, opening), (True, text), (False, closing))

    assert not [origin for origin in rendering.parsed_specials() if any(origin)]


@given(texts, st.sampled_from(["", " ", "\n\n"]), texts)
def test_trimming_does_not_join_what_was_apart(first: str, space: str, second: str) -> None:
    marked = [GUARD.mark(text, SENTINEL).strip() for text in (first + space, space + second)]
    pieces = GUARD.pieces("".join(marked), SENTINEL)

    parsed = "".join(piece.text for piece in pieces if piece.parse_special)
    assert GUARD.n_special(parsed) == 0


def test_only_the_fragment_with_client_specials_is_taken_as_plain_text() -> None:
    marked = GUARD.mark("a<|end|>b", SENTINEL)

    assert GUARD.pieces(f"<|start|>{marked}<|end|>\n<|start|>", SENTINEL) == (
        PromptPiece("<|start|>", parse_special=True),
        PromptPiece("a<|end|>b", parse_special=False),
        PromptPiece("<|end|>\n", parse_special=True),
        PromptPiece("<|start|>", parse_special=True),
    )


def test_harmless_text_is_left_alone_and_stays_with_what_is_in_front_of_it() -> None:
    text = "if a < b and c > d: print('end')"

    assert GUARD.mark(text, SENTINEL) == text
    assert GUARD.pieces(f"<|start|>{text}<|end|>", SENTINEL) == (
        PromptPiece(f"<|start|>{text}", parse_special=True),
        PromptPiece("<|end|>", parse_special=True),
    )


def test_schema_words_stay_findable_although_a_token_is_named_like_them() -> None:
    guard = Guard(("<function>", "<|object_ref_start|>"))

    assert guard.mark("function", SENTINEL) == "function"
    assert guard.mark("object", SENTINEL) == "object"


def test_sentinel_avoids_characters_hidden_in_nested_values_and_json_escapes() -> None:
    first = GUARD.sentinel()
    escaped = json.dumps(first).upper().replace("U", "u")

    assert GUARD.sentinel({"a": ["x", first]}) != first
    assert GUARD.sentinel(("b", escaped)) != first


def test_vocabulary_without_special_strings_guards_nothing() -> None:
    guard = Guard(("",))

    assert guard.mark("<|im_end|>", SENTINEL) == "<|im_end|>"
    assert guard.pieces("<|im_end|>", SENTINEL) == (PromptPiece("<|im_end|>", parse_special=True),)
