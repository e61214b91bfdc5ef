"""Marks around reasoning, and headers around text that are never shown."""

import re
from dataclasses import dataclass

from rekindle.chat.conversation import Reasoning, Text
from rekindle.chat.dialects.base import ReasoningMarks
from rekindle.chat.dialects.derive.calls import Calls
from rekindle.chat.dialects.derive.locate import (
    before_call,
    behind,
    end_of_turn,
    n_header_atoms,
    text_tail,
)
from rekindle.chat.dialects.derive.pieces import (
    Atoms,
    atoms,
    common_end,
    common_start,
    find,
    is_mark,
    literal,
    n_common_start,
    without_leading_space,
    without_trailing_space,
)
from rekindle.chat.dialects.derive.probes import PAIR, TEXT, THOUGHT, Probes, call

_SPLITS = re.compile(r"""(?:split\(|\(|if|and|or)\s*(['"])([^'"\n]{2,60}?)\1\s*(?:\)|in\b)""")
_MAX_SPLITS = 12  # strings of the template that are tried as marks; picked


@dataclass(frozen=True, slots=True)
class Surroundings:
    reasoning: ReasoningMarks | None
    hidden: tuple[str, ...] = ()
    hidden_at_edges: tuple[str, ...] = ()


NO_MARKS = Surroundings(None)


def derive_surroundings(probes: Probes, calls: Calls | None = None) -> Surroundings:
    """Find the marks of reasoning and of text. `calls`: None if they are unknown."""
    marks, before_text = _shown_marks(probes, calls)
    if marks is None:
        marks = _cut_marks(probes) or _prompt_marks(probes)
        before_text = _text_header(probes)
    edges: tuple[str, ...] = ()
    if marks is not None:
        text_header = literal(_text_header(probes)).strip()
        is_opened = probes.generation_prompt.rstrip().endswith(marks.opening)
        if text_header.startswith(marks.closing) and not is_opened:
            edges = (marks.closing,)  # a turn without reasoning only closes it
        closing = atoms(marks.closing)
        at = find(before_text, closing)
        before_text = before_text[at + len(closing) :] if at >= 0 else before_text
    own, _ = text_tail(probes)
    end = calls.end if calls is not None and calls.end else end_of_turn(probes, own)
    behind_text = own[: len(own) - len(end)]
    before_calls = _before_calls(probes, calls, behind_text)
    # A template that splits text and calls writes the header of a second message.
    if probes.splits_calls and not (marks and literal(before_calls).strip() == marks.closing):
        before_calls = ()
    headers = [before_text, behind_text, before_calls, _end_header(end)]
    texts = list(dict.fromkeys(literal(h) for h in headers if without_leading_space(h)))
    return Surroundings(
        marks,
        hidden=tuple(text.strip() for text in texts if is_mark(text)),
        hidden_at_edges=(*edges, *(text for text in texts if not is_mark(text))),
    )


def _end_header(end: Atoms) -> Atoms:
    """Return what ends a turn besides its last mark, if there are words in it."""
    marks = [i for i, atom in enumerate(end) if is_mark(str(atom))]
    header = end[: marks[-1]] if marks else ()
    has_words = any(not is_mark(str(atom)) and not str(atom).isspace() for atom in header)
    return header if has_words else ()


def _shown_marks(probes: Probes, calls: Calls | None) -> tuple[ReasoningMarks | None, Atoms]:
    """Return the marks around reasoning that the template writes, and the header of the text."""
    turn = probes.turn(Reasoning(THOUGHT), Text(TEXT))
    found = atoms(turn.text) if turn is not None else ()
    with_call = _before_call(probes, calls, Reasoning(THOUGHT))
    if THOUGHT not in found or TEXT not in found or found.index(THOUGHT) > found.index(TEXT):
        if THOUGHT not in with_call:
            return None, ()
        closing = _without_lead((behind(with_call, THOUGHT) or ()), calls)
        opening = _opening(probes, with_call[: with_call.index(THOUGHT)], closing)
        return _marks(opening, closing), _text_header(probes)
    between = found[found.index(THOUGHT) + 1 : found.index(TEXT)]
    opening = _opening(probes, found[: found.index(THOUGHT)], between)
    closing = between
    before_calls = behind(with_call, THOUGHT)
    if before_calls is not None:
        closing = common_start(between, _without_lead(before_calls, calls))
    last = without_trailing_space(opening)[-1:]
    if last and last[0] in closing:
        closing = closing[: closing.index(last[0]) + 1]
    header = common_end(between[len(closing) :], _text_header(probes))
    return _marks(opening, closing), header


def _marks(opening: Atoms, closing: Atoms) -> ReasoningMarks | None:
    before, after = literal(opening).strip(), literal(closing).strip()
    # A header of several parts does not occur in an answer by accident.
    anywhere = is_mark(before) and len(atoms(before)) > 1
    return ReasoningMarks(before, after, anywhere) if before and after else None


def _opening(probes: Probes, before: Atoms, behind_thought: Atoms) -> Atoms:
    """Return the end of `before` that only reasoning has."""
    prompt = atoms(probes.generation_prompt)
    others = [prompt]
    for parts in ((Text(TEXT),), (call(PAIR),)):
        if (turn := probes.turn(*parts)) is not None:
            others.append(atoms(turn.text))
    n_shared = min(n_common_start(before, other) for other in others)
    opening = before[n_shared:]
    if without_leading_space(opening):
        return opening
    # The prompt may open reasoning with words that no earlier turn keeps.
    n_before = len(without_trailing_space(before))
    more = without_leading_space(prompt[n_before:])
    is_closing = more[:1] == without_leading_space(behind_thought)[:1]
    if prompt[:n_before] == before[:n_before] and more and not is_closing:
        return more
    return _behind_role(probes, before)


def _behind_role(probes: Probes, before: Atoms) -> Atoms:
    """Return what follows the header of the turn: the header ends as that of a user's does."""
    turn = probes.turn(Text(TEXT))
    tail = atoms(turn.text + turn.later) if turn is not None else ()
    most, header_end = 0, 0
    for n in range(len(without_trailing_space(before))):
        n_common = len(common_end(before[:n], tail))
        if n_common >= max(most, 1):
            most, header_end = n_common, n
    if most:
        return before[header_end:]
    last_mark = max((i for i, atom in enumerate(before) if is_mark(str(atom))), default=0)
    return before[last_mark:]


def _cut_marks(probes: Probes) -> ReasoningMarks | None:
    """Return marks whose reasoning the template cuts from the text of earlier turns."""
    strings = dict.fromkeys(match[2] for match in _SPLITS.finditer(probes.source))
    tried = [text for text in strings if is_mark(text)][:_MAX_SPLITS]
    for closing in tried:
        turn = probes.turn_saying(THOUGHT + closing + TEXT)
        if turn is None or TEXT not in turn or THOUGHT in turn:
            continue
        opened, _, _ = literal(_prompt_tail(probes)).partition(closing)
        others = [closing.replace("/", "", 1), *tried]
        opening = opened.strip() or next((text for text in others if text != closing), "")
        if opening:
            return ReasoningMarks(opening.strip(), closing.strip())
    return None


def _prompt_marks(probes: Probes) -> ReasoningMarks | None:
    """Return two marks that end the generation prompt: they hold an empty reasoning."""
    tail = [atom for atom in _prompt_tail(probes) if not str(atom).isspace()]
    if len(tail) == 2 and all(is_mark(str(atom)) for atom in tail):
        return ReasoningMarks(str(tail[0]), str(tail[1]))
    return None


def _prompt_tail(probes: Probes) -> Atoms:
    """Return the end of the generation prompt that is not part of a turn with text."""
    header = atoms(probes.generation_prompt)
    turn = probes.turn(Text(TEXT))
    return header[n_common_start(header, atoms(turn.text)) :] if turn is not None else ()


def _text_header(probes: Probes) -> Atoms:
    """Return what a turn has between the generation prompt and its text."""
    turn = probes.turn(Text(TEXT))
    found = atoms(turn.text) if turn is not None else ()
    if TEXT not in found:
        return ()
    return found[n_header_atoms(probes, found) : found.index(TEXT)]


def _before_calls(probes: Probes, calls: Calls | None, behind_text: Atoms) -> Atoms:
    """Return what stands between text and calls besides the end of the text."""
    found = behind(_before_call(probes, calls, Text(TEXT)), TEXT)
    if found is None:
        return ()
    free = _without_lead(found, calls)
    separator = calls.format.separator if calls is not None else ""
    return () if free == behind_text or literal(free) == separator else free


def _before_call(probes: Probes, calls: Calls | None, part: Reasoning | Text) -> Atoms:
    return before_call(probes, part, calls.members) if calls is not None else ()


def _without_lead(found: Atoms, calls: Calls | None) -> Atoms:
    return found[: len(found) - len(common_end(found, calls.lead))] if calls else found
