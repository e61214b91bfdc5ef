"""Splices remembered turns into a rendered conversation: sampled tokens replace rendered text.

A turn is spliced only where three things hold. The tokens before it are the prompt it was
sampled after. The rendered text parses, in the model's dialect, to the same reply. The reply
ends where the template ends the turn, or where an open message ends. All other text is tokenised
as rendered.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os.path import commonprefix

from rekindle.chat.dialects.base import Dialect
from rekindle.chat.dialects.syntax.lark import Schemas
from rekindle.chat.prompt.layout import Layout
from rekindle.chat.prompt.meaning import call_meanings
from rekindle.chat.prompt.token_run import PieceTokenizer, TokenRun
from rekindle.chat.prompt.turn_memory import Turn
from rekindle.chat.reply.parser import ParsedReply, parse
from rekindle.chat.template.guard import PromptPiece

MAX_ENDS_TRIED = 32  # for a turn whose own end text is missing; picked


@dataclass(frozen=True, slots=True)
class Candidate:
    """Turns that may be the message, best first."""

    turns: Sequence[Turn]
    restores_reasoning: bool  # also where the client or the template leaves it out
    is_open: bool = False  # the reply continues the message, which ends with the text


@dataclass(slots=True)
class Spliced:
    run: TokenRun
    turns: dict[int, Turn] = field(default_factory=dict)  # by index of the message
    # Turns whose prompt matched, but whose text the template rendered differently.
    rendered_differently: dict[int, Turn] = field(default_factory=dict)
    n_replaced: int = 0  # bytes of text that turns have replaced, at most
    end: int = 0  # offset in the text where the last spliced turn ends
    # Offset in the text and position in the tokens of each piece that was tokenised.
    marks: list[tuple[int, int, PromptPiece]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Splicer:
    layout: Layout
    tokenize: PieceTokenizer
    dialect: Dialect
    schemas: Schemas
    end_strings: Collection[str]

    def splice(self, run: TokenRun, candidates: Mapping[int, Candidate]) -> Spliced:
        """Append the text to `run`, with turns in place of messages where they fit.

        `run` holds the tokens before the text. Keys are indexes of messages, ascending.
        """
        done = Spliced(run)
        for index, candidate in candidates.items():
            for turn in candidate.turns:
                restores = candidate.restores_reasoning
                prompt = self._prompt(done, turn, restores=restores)
                if prompt is None:
                    continue
                end = self._end(done, turn, restores=restores, is_open=candidate.is_open)
                if end is None:
                    done.rendered_differently.setdefault(index, turn)
                    continue
                self._append(done, prompt)
                run.extend_sampled(turn.tokens)
                replaced = self.layout.text[done.end + turn.gap_chars : end]
                done.n_replaced += len(replaced.encode("utf-8", "surrogatepass"))
                done.turns[index], done.end = turn, end
                break
        self._append(done, self.layout.cut(done.end, len(self.layout.text)))
        return done

    def _append(self, done: Spliced, pieces: Sequence[tuple[int, PromptPiece]]) -> None:
        for offset, piece in pieces:
            done.marks.append((offset, len(done.run.tokens), piece))
            done.run.extend(self.tokenize(piece))

    def _prompt(
        self, done: Spliced, turn: Turn, *, restores: bool
    ) -> list[tuple[int, PromptPiece]] | None:
        """Return the pieces between the last spliced turn and this one.

        Return None if the turn was sampled after another prompt.
        """
        text = self.layout.text
        history_end = done.end + turn.gap_chars
        opening = turn.generation_prompt
        if text.startswith(opening, history_end):
            prompt = self.layout.cut(done.end, history_end + len(opening))
        elif history_end <= len(text) and (
            restores or text.startswith(opening.rstrip(), history_end)
        ):
            prompt = self.layout.followed_by(opening, done.end, history_end)
        else:
            return None
        key = done.run.key(self.tokenize(piece) for _, piece in prompt)
        return prompt if key == turn.prompt_key else None

    def _end(self, done: Spliced, turn: Turn, *, restores: bool, is_open: bool) -> int | None:
        """Return the offset where the turn ends; None: the text there parses differently."""
        text = self.layout.text
        history_end = done.end + turn.gap_chars
        is_opened = text.startswith(turn.generation_prompt, history_end)
        for body in _bodies(text, history_end, turn.generation_prompt):
            for end in [len(text)] if is_open else self._ends(body, turn):
                shown = parse(
                    self.dialect,
                    self.schemas,
                    text[body:end],
                    begins_in_reasoning=turn.begins_in_reasoning and is_opened,
                )
                if _is_same(shown, turn.said, restores=restores):
                    return end
                if turn.said.text and turn.said.calls and not shown.calls:
                    later = self._split_end(end, shown, turn, restores=restores)
                    if later is not None:
                        return later
        return None

    def _split_end(self, end: int, shown: ParsedReply, turn: Turn, *, restores: bool) -> int | None:
        """Return the offset where the calls end, if they are in a second message.

        Templates that would omit the text beside calls get two messages for one turn.
        """
        text, opening = self.layout.text, turn.generation_prompt
        [control] = [control for _, control in islice(self.layout.controls(end), 1)] or [""]
        start = text.find(opening, end + len(control))
        if not control or start < 0 or text[end + len(control) : start].strip():
            return None
        body = start + len(opening)
        for later in self._ends(body, turn):
            calls = parse(self.dialect, self.schemas, text[body:later], begins_in_reasoning=False)
            both = ParsedReply(shown.reasoning, shown.text + calls.text, calls.calls)
            if _is_same(both, turn.said, restores=restores):
                return later
        return None

    def _ends(self, body: int, turn: Turn) -> Iterator[int]:
        """Yield the offsets where the turn that begins at `body` may end, likeliest first."""
        likely: list[int] = []
        others: list[int] = []
        for offset, control in self.layout.controls(body):
            if control == turn.end_text:
                likely.insert(0, offset)
                break
            if control in self.end_strings:
                if likely:
                    break  # this one ends the next turn
                likely.append(offset)
                if not turn.end_text:
                    break
            others.append(offset)
            if not turn.said.calls and len(others) == MAX_ENDS_TRIED:
                break
        yield from likely
        # The template may end the turn with a string of its own, after headers of its own.
        if not turn.said.calls:  # the syntax of calls is full of control strings
            yield from (offset for offset in others if offset not in likely)


def _is_same(shown: ParsedReply, said: ParsedReply, *, restores: bool) -> bool:
    if shown.text.strip() != said.text.strip():
        return False
    if call_meanings(shown.calls) != call_meanings(said.calls):
        return False
    # Results refer to the rendered ids, so sampled ids must be equal to them.
    if any(a.id != b.id for a, b in zip(shown.calls, said.calls, strict=True) if b.id):
        return False
    reasoning = shown.reasoning.strip()
    return reasoning == said.reasoning.strip() or (restores and not reasoning)


def _bodies(text: str, history_end: int, opening: str) -> Iterator[int]:
    """Yield the offsets where the turn's text may begin: after the opening, or a part of it."""
    if text.startswith(opening, history_end):
        yield history_end + len(opening)
        return
    shared = commonprefix([opening, text[history_end : history_end + len(opening)]])  # noqa: RUF071
    yield history_end + len(shared)
    if (line := shared.rfind("\n") + 1) and line < len(shared):
        yield history_end + line  # the answer may begin with the same text as the opening's rest
    if (control := shared.rfind(">") + 1) and control < len(shared):
        yield history_end + control
