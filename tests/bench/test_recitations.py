"""The prompts for a reciting model allow drafts of a known quality."""

import pytest

from bench.models.drafts import DraftRow, table
from bench.models.recitations import (
    OVERLAP_TOKENS,
    Kind,
    NotEnoughTokens,
    Recitation,
    Recitations,
)
from bench.models.reciter import TINY, recital_of

RECITAL = recital_of(TINY.n_vocab)
N_REPLY = 200


def recited(number: int) -> dict[Kind, Recitation]:
    return {each.kind: each for each in Recitations(RECITAL, N_REPLY).round(number)}


def draft(tokens: list[int], key: list[int], n_draft: int) -> list[int]:
    """Return the tokens behind the last place that holds the key."""
    for place in range(len(tokens) - len(key) - 1, -1, -1):
        if tokens[place : place + len(key)] == key:
            return tokens[place + len(key) : place + len(key) + n_draft]
    return []


@pytest.mark.parametrize("n_key", range(1, OVERLAP_TOKENS + 1))
@pytest.mark.parametrize("n_draft", [1, 8, 16])
def test_a_draft_of_a_rewrite_is_right_about_nine_times_in_ten(n_key: int, n_draft: int) -> None:
    """Draft the reply from the prompt by its last tokens, up to the first wrong token."""
    rewrite = recited(1)[Kind.REWRITE]
    said, n_right, n_wrong = list(rewrite.prompt), 0, 0
    expected = [*rewrite.prompt, *rewrite.reply]
    while len(said) < len(expected):
        drafted = draft(rewrite.prompt, said[-n_key:], n_draft)
        assert drafted  # the drafter never loses its place
        for token in drafted[: len(expected) - len(said)]:
            if token != expected[len(said)]:
                n_wrong += 1
                break
            said.append(token)
            n_right += 1
        said += expected[len(said) : len(said) + 1]  # sampled by the model
    assert 0.85 < n_right / (n_right + n_wrong) < 0.95


def test_a_rewrite_meets_a_wrong_token_every_ten_tokens_of_a_copied_piece() -> None:
    rewrite = recited(1)[Kind.REWRITE]
    n_wrong = sum(
        token in rewrite.reply and following not in (RECITAL.after(token), *rewrite.reply)
        for token, following in zip(rewrite.prompt, rewrite.prompt[1:], strict=False)
    )
    assert N_REPLY / 13 < n_wrong < N_REPLY / 8


def test_the_reply_goes_on_from_the_last_token_of_the_prompt() -> None:
    for each in recited(2).values():
        assert each.reply[0] == RECITAL.after(each.prompt[-1])
        assert each.reply == RECITAL.stretch(RECITAL.tokens.index(each.reply[0]), N_REPLY)
        assert each.reply_text.startswith("filler")


def test_again_is_the_prompt_of_the_rewrite() -> None:
    one = recited(1)
    assert one[Kind.AGAIN].prompt == one[Kind.REWRITE].prompt


def test_no_token_of_prose_stands_in_any_other_prompt_or_reply() -> None:
    rounds = [recited(number) for number in range(4)]
    prose = [token for each in rounds for token in each[Kind.PROSE].reply]
    assert len(set(prose)) == len(prose)
    others = {
        token
        for each in rounds
        for recitation in each.values()
        for token in (*recitation.prompt, *recitation.reply * (recitation.kind is not Kind.PROSE))
    }
    assert not others & set(prose)


def test_too_many_rounds_are_refused() -> None:
    with pytest.raises(NotEnoughTokens):
        recited(20)


def test_the_ratio_is_to_this_server_without_drafts() -> None:
    def row(server: str, rate: float) -> DraftRow:
        return DraftRow(Kind.PROSE, server, 1, rate, 256, 10, 9, is_right=True)

    lines = table([row("rekindle", 300.0), row("rekindle-no-drafts", 100.0)]).splitlines()
    assert lines[2:] == [
        "| prose | rekindle | 300.0 | 3.00 | 9 | 10 | 0 |",
        "| prose | rekindle-no-drafts | 100.0 | 1.00 | 9 | 10 | 0 |",
    ]
