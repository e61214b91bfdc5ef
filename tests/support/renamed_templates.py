"""Templates with other marks: every word around calls, reasoning and results is renamed.

Only literal text changes: between the tags of Jinja and in string literals. The renamed template
renders the same as the original, with new words for the old ones.
"""

import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field

from jinja2 import Environment

from rekindle.chat.conversation import Message, Role, ToolResult
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest, StartupError
from tests.support.call_probes import EVERYTHING, OTHER_CALL, QUESTION, SIMPLE, TOOLBOXES, Probe
from tests.support.template_oracle import SAID, THOUGHT, WORD, loaded, shown, toolbox_of

# A word is part of a mark if it touches one of these. `\` escapes a line break.
BESIDE = set("<>|\uff5c[]/=:\"'{}#.`~\\\n")
# Not marks: roles, JSON's words, and what the probes say.
KEPT = {"assistant", "user", "system", "tool", "model", "json", "true", "false", "null"}
KEPT |= {"True", "False", "None", "string", "number", "integer", "boolean", "array", "object"}
KEPT |= {
    word
    for call in (EVERYTHING.call, SIMPLE.call, OTHER_CALL)
    for word in WORD.findall(f"{call.id} {call.name} {call.arguments_json}")
}


def _turns(probe: Probe) -> tuple[tuple[Message, ...], ...]:
    results = [
        Message(Role.TOOL, (ToolResult(call.id, call.name, "Wresult"),))
        for call in (probe.call, OTHER_CALL)
    ]
    call = Message(Role.ASSISTANT, (probe.call,))
    thought = Message(Role.ASSISTANT, (THOUGHT, probe.call))
    both = Message(Role.ASSISTANT, (THOUGHT, SAID, probe.call, OTHER_CALL))
    answer = Message(Role.ASSISTANT, (THOUGHT, SAID))
    return (
        (),
        (answer,),
        (call, results[0]),
        (thought, results[0]),
        (both, *results),
        (call, results[0], answer, QUESTION),
    )


@dataclass(frozen=True)
class Renamed:
    source: str
    marks: dict[str, str] = field(default_factory=dict)  # old words to new ones
    literals: dict[str, str] = field(default_factory=dict)  # the same, also where they stand alone

    @property
    def words(self) -> dict[str, str]:
        return self.marks | self.literals

    @property
    def text(self) -> str:
        """The source with the new words."""
        pieces = []
        for part in _parts(self.source):
            end = 0
            for match in _words_in(part):
                word = self.marks.get(match[0], match[0]) if _is_mark(match, part) else match[0]
                pieces += [part.text[end : match.start()], self.literals.get(match[0], word)]
                end = match.end()
            pieces.append(part.text[end:])
        return "".join(pieces)


def renamed(source: str, seed: int) -> Renamed:
    """Rename the words of the marks. A word whose renaming breaks the template is kept."""
    dice = random.Random(seed)
    texts = renderings(loaded(source))
    fresh = {word: _fresh(word, dice) for word in written_words(source, texts)}
    marks = {word for part in _parts(source) for word in _marks_in(part)}
    in_marks = {old: new for old, new in fresh.items() if old in marks}
    alone = {old: new for old, new in fresh.items() if old not in marks}
    best = Renamed(source)
    for attempt in (Renamed(source, in_marks, alone), Renamed(source, in_marks)):
        if renders_the_same(attempt, texts):
            best = attempt
            break
    for old in fresh.keys() - best.words.keys():
        for attempt in (
            Renamed(source, {**best.marks, old: fresh[old]}, best.literals),
            Renamed(source, best.marks, {**best.literals, old: fresh[old]}),
        ):
            if old not in best.words and renders_the_same(attempt, texts):
                best = attempt
    return best


def renderings(template: ChatTemplate) -> list[str]:
    """Return turns of every kind. "": refused."""
    texts = []
    box = toolbox_of(template)
    probe = EVERYTHING if box == TOOLBOXES[0] else SIMPLE
    for messages in _turns(probe):
        try:
            text = shown(template, box, *messages, add_generation_prompt=True)
        except InvalidRequest:
            text = ""
        texts.append(text)
    return texts


def written_words(source: str, texts: list[str]) -> list[str]:
    """Return the words of the marks in turns, if they are literal in the template's source."""
    turns = "\n".join(text.partition(QUESTION.text)[2] for text in texts)
    literal = {match[0] for part in _parts(source) for match in _words_in(part)}
    marks = dict.fromkeys(_marks_in(Part(turns, is_literal=True)))
    return [word for word in marks if word in literal and len(word) > 1 and word not in KEPT]


def renders_the_same(attempt: Renamed, texts: list[str]) -> bool:
    try:
        again = renderings(loaded(attempt.text))
    except StartupError:
        return False
    for old, new in attempt.words.items():
        again = [text.replace(new, old) for text in again]
    return again == texts


@dataclass(frozen=True)
class Part:
    """A piece of a template's source."""

    text: str
    is_literal: bool = False
    is_key: bool = False  # of a mapping


def _parts(source: str) -> Iterator[Part]:
    tokens = list(Environment().lex(source))
    end = 0
    for number, (_, kind, text) in enumerate(tokens):
        start = source.index(text, end)
        yield Part(source[end:start])  # white space that Jinja drops
        end = start + len(text)
        match kind:
            case "data":
                yield Part(text, is_literal=True)
            case "string":
                behind = (each[2] for each in tokens[number + 1 :] if each[1] != "whitespace")
                yield Part(text[0])
                yield Part(text[1:-1], is_literal=True, is_key=next(behind, "") == ":")
                yield Part(text[-1])
            case _:
                yield Part(text)
    yield Part(source[end:])


def _words_in(part: Part) -> Iterator[re.Match[str]]:
    for match in WORD.finditer(part.text) if part.is_literal else ():
        if not match[0].startswith("\\"):
            yield match


def _marks_in(part: Part) -> Iterator[str]:
    return (match[0] for match in _words_in(part) if _is_mark(match, part))


def _is_mark(match: re.Match[str], part: Part) -> bool:
    before, behind = part.text[: match.start()][-2:], part.text[match.end() :][:1]
    is_beside = before[-1:] in BESIDE or before[:1] == "\\" or behind in BESIDE
    return part.is_key or is_beside


def _fresh(word: str, dice: random.Random) -> str:
    """Return a random word that looks the same: case, joints and digits."""
    return re.sub("[A-Za-z]+", lambda match: _letters(match[0], dice), word)


def _letters(word: str, dice: random.Random) -> str:
    letters = "".join(dice.choices(string.ascii_lowercase, k=dice.randint(4, 9)))
    if word.isupper():
        return letters.upper()
    return letters.capitalize() if word[0].isupper() else letters
