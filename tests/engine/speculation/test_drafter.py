"""A drafter follows a text while it agrees, finds it again after an edit, and forgets."""

from collections.abc import Sequence

from rekindle.engine.speculation.acceptance import engine_rates, reply_rates
from rekindle.engine.speculation.drafter import Draft, Drafter
from rekindle.engine.speculation.own_context import TOKENS_PER_STEP
from rekindle.generation.drafts import DraftSource

END = 0


class Reply:
    """A growing list of tokens and its drafter."""

    def __init__(
        self,
        prompt: Sequence[int],
        earlier: Sequence[int] = (),
        stored: dict[tuple[int, ...], list[int]] | None = None,
    ) -> None:
        self.tokens = list(prompt)
        found = stored or {}
        self.drafter = Drafter(
            self.tokens,
            list(earlier),
            lambda tokens: found.get(tuple(tokens[-4:]), []),
            reply_rates(engine_rates()),
            frozenset({END}),
        )

    def add(self, *tokens: int) -> "Reply":
        for token in tokens:
            self.tokens.append(token)
            self.drafter.note(token)
        return self

    def draft(self, n_most: int = 4, forced: Sequence[int] = ()) -> Draft | None:
        return self.drafter.draft(n_most, forced)


def test_an_earlier_reply_is_drafted_from_its_second_token_on() -> None:
    reply = Reply([1, 2], earlier=[5, 6, 7, 8])
    assert reply.draft() == Draft(DraftSource.REPLY, [5, 6, 7, 8])
    assert reply.add(5).draft(2) == Draft(DraftSource.REPLY, [6, 7])
    assert reply.add(6, 7, 8).draft() is None


def test_what_a_grammar_forces_is_drafted_and_sure() -> None:
    reply = Reply([1, 2])
    draft = reply.draft(3, forced=[5, 6, 7, 8])
    assert draft == Draft(DraftSource.GRAMMAR, [5, 6, 7], 3)
    assert draft is not None
    assert reply.drafter.chances(draft) == [1.0, 1.0, 1.0]
    assert reply.draft(forced=[5, END, 6]) == Draft(DraftSource.GRAMMAR, [5], 1)


def test_a_text_goes_on_behind_forced_tokens_only_if_it_begins_with_them() -> None:
    reply = Reply([1, 2], earlier=[5, 6, 7, 8])
    draft = reply.draft(forced=[5, 6])
    assert draft == Draft(DraftSource.REPLY, [5, 6, 7, 8], 2)
    assert draft is not None
    chances = reply.drafter.chances(draft)
    assert chances[:2] == [1.0, 1.0]
    assert 1.0 > chances[2] > chances[3]
    assert reply.draft(forced=[5, 9]) == Draft(DraftSource.GRAMMAR, [5, 9], 2)


def test_three_tokens_that_were_there_before_are_followed() -> None:
    reply = Reply([*range(10, 60), 1])
    assert reply.add(20, 21).draft() is None
    assert reply.add(22).draft() == Draft(DraftSource.CONTEXT, [23, 24, 25, 26])


def test_the_last_occurrence_is_followed() -> None:
    reply = Reply([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 9])
    assert reply.add(1, 2, 3).draft(2) == Draft(DraftSource.CONTEXT, [6, 7])


def test_the_reply_itself_is_a_source() -> None:
    reply = Reply([100]).add(1, 2, 3, 4, 5, 1, 2, 3)
    assert reply.draft(2) == Draft(DraftSource.CONTEXT, [4, 5])


def test_after_an_edit_the_text_is_found_again_by_two_tokens() -> None:
    text = list(range(10, 80))
    reply = Reply([*text, 1], earlier=text)
    reply.add(*text[:20], 5, 6, 7)
    assert reply.add(text[22], text[23]).draft(3) == Draft(DraftSource.REPLY, text[24:27])


def test_the_store_is_asked_where_nothing_else_is_known() -> None:
    reply = Reply([1, 2, 3], stored={(3, 4, 5, 6): [7, 8, 9]}).add(4, 5, 6)
    assert reply.draft() == Draft(DraftSource.STORE, [7, 8, 9])


def test_a_draft_ends_before_an_end_of_turn() -> None:
    assert Reply([1], earlier=[5, END, 6]).draft() == Draft(DraftSource.REPLY, [5])
    assert Reply([1], earlier=[END, 6]).draft() is None


def test_what_was_deleted_is_not_drafted() -> None:
    reply = Reply([1, 2, 3], earlier=[5, 6, 7, 8]).add(5)
    reply.drafter.forget(is_private=False)
    assert reply.draft() is None
    assert reply.add(6, 7).draft() is None
    lost = Reply([1, 2, 3], earlier=[5, 6, 7, 8]).add(9)
    lost.drafter.forget(is_private=False)
    assert lost.add(6, 7).draft() is None


def test_the_own_tokens_survive_a_deletion_of_others() -> None:
    reply = Reply([*range(10, 60), 1]).add(20, 21, 22)
    reply.drafter.forget(is_private=False)
    assert reply.draft(1) == Draft(DraftSource.CONTEXT, [23])


def test_a_source_that_is_often_wrong_gets_small_chances() -> None:
    good, bad = Reply(list(range(1, 300))), Reply(list(range(1, 300)))
    good.add(*range(50, 90))
    for start in range(50, 90, 4):
        bad.add(start, start + 1, start + 2, 900 + start)
    good.add(600, 150, 151, 152)
    bad.add(600, 150, 151, 152)
    chances = []
    for each in (good, bad):
        draft = each.draft()
        assert draft is not None
        chances.append(each.drafter.chances(draft))
    assert chances[0] > chances[1]
    assert all(0 <= chance <= 1 for each in chances for chance in each)
    assert chances[0] == sorted(chances[0], reverse=True)


def test_a_long_prompt_is_read_over_several_steps() -> None:
    prompt = list(range(1, 3 * TOKENS_PER_STEP))
    reply = Reply(prompt).add(50_000, 50_001, 50_002, 50_003)
    assert reply.add(500, 501, 502).draft(2) == Draft(DraftSource.CONTEXT, [503, 504])
    assert reply.add(50_000, 50_001, 50_002).draft(1) == Draft(DraftSource.CONTEXT, [50_003])


def test_a_reply_that_became_private_asks_for_no_stored_text() -> None:
    reply = Reply([1, 2, 3], stored={(3, 4, 5, 6): [7, 8, 9]})
    reply.drafter.forget(is_private=True)
    assert reply.add(4, 5, 6).draft() is None


def test_a_stored_text_that_goes_on_in_the_next_answer_stays_certain() -> None:
    text = list(range(10, 50))
    stored = {(6, 7, 8, 9): text[:20], tuple(text[16:20]): text[20:]}
    reply = Reply([5], stored=stored).add(6, 7, 8, 9)
    unsure = reply.drafter.chances(Draft(DraftSource.STORE, [1]))
    reply.add(*text[:20])
    assert reply.draft(3) == Draft(DraftSource.STORE, text[20:23])
    assert reply.drafter.chances(Draft(DraftSource.STORE, [1])) > unsure


def test_a_text_that_repeats_nothing_is_looked_up_at_every_eighth_token() -> None:
    asked: list[int] = []
    tokens = [1, 2, 3]

    def find(tokens: Sequence[int]) -> list[int]:
        asked.append(len(tokens))
        return []

    drafter = Drafter(tokens, [], find, reply_rates(engine_rates()), frozenset())
    for token in range(100, 180):
        tokens.append(token)
        drafter.note(token)
    assert asked == [*range(4, 36), *range(36, 84, 8)]


def test_a_text_that_begins_to_repeat_late_is_found() -> None:
    for n_before in range(40, 48):
        text = list(range(10, 60))
        reply = Reply([*text, 1]).add(*range(1000, 1000 + n_before), *text[:20])
        assert reply.draft(2) == Draft(DraftSource.CONTEXT, text[20:22])
