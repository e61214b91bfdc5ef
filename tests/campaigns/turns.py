"""Play a chat with tools on every published template in a folder, with remembered replies.

    python -m tests.campaigns.turns FOLDER [--history auto|keep|template] [--verbose]

One line per template and way of sending replies back. A letter for each turn says how the prompt
behind it begins: `=` with the prompt before and the sampled reply, `r` not so, since the template
rewrites what it rendered before, `d` not so, since the client dropped the reasoning of a tool loop
that is over, `M` not so for no such reason. Then the tokens that have to be computed again.
Exits with 1 if anything broke: an error of ours, or tokens that are neither computed nor plain.
"""
# ruff: noqa: T201

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from os.path import commonprefix
from pathlib import Path

from rekindle.chat.conversation import (
    Conversation,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.reply.parser import ParsedReply, parse
from rekindle.common_prefix import n_common
from rekindle.config.choices import ReasoningHistory
from rekindle.errors import InvalidRequest, StartupError
from rekindle.generation.tokenizer import Tokenizer
from rekindle.llama.model import GgufModel
from rekindle.models.source import resolve_model
from tests.campaigns.templates import SYSTEM, TOOL, user
from tests.support.extended_tokenizer import CHANNEL, ExtendedTokenizer
from tests.support.template_oracle import chosen, loaded
from tests.support.turn_bench import Exchange, TurnBench, extended, message_of

MAX_CLOSING_CHARS = 20  # of marks that end reasoning


def call(number: int) -> ToolCall:
    arguments = {"city": f"M\u00fcnchen {number}", "days": number}
    return ToolCall(f"call_{number:04}", "weather", json.dumps(arguments, ensure_ascii=False))


class Way(StrEnum):
    """How the client treats reasoning."""

    NONE = "no reasoning"  # the model writes none
    DROPPED = "reasoning dropped"
    SENT = "reasoning sent"


@dataclass(frozen=True)
class Step:
    """A reply of the model, and the next message of the client."""

    reasoning: str
    parts: tuple[Text | ToolCall, ...]
    then: Message

    @property
    def message(self) -> Message:
        thought = (Reasoning(self.reasoning),) if self.reasoning else ()
        return Message(Role.ASSISTANT, (*thought, *self.parts))


def result(number: int) -> Message:
    return Message(Role.TOOL, (ToolResult(f"call_{number:04}", None, f"Rain, {number} degrees."),))


STEPS = (
    Step("The user wants it exactly.", (call(1),), result(1)),
    Step("One more is missing.", (Text("And the other one."), call(2)), result(2)),
    Step("Now I know both.", (Text("It rains in both, 1 and 2 degrees."),), user("Why?")),
    Step("Clouds, probably.", (Text("Because of the clouds."),), user("And tomorrow?")),
    Step("I have to look again.", (call(3),), result(3)),
    Step("Also rain.", (Text("Rain again: 3 degrees."),), user("Thanks.")),
)
START = Conversation(
    (SYSTEM, user("How is the weather there?")),
    (TOOL,),
    template_kwargs={"enable_thinking": True, "thinking": True},
)


@dataclass
class TurnOutcome:
    letters: str = ""
    n_again: int = 0
    n_prompt: int = 0


class Broken(Exception):
    pass


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--history", type=ReasoningHistory, default=ReasoningHistory.AUTO)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    model = GgufModel(resolve_model(None).path, gpu_layers=0)
    totals: Counter[str] = Counter()
    for path in sorted(arguments.folder.glob("*.jinja")):
        for way in Way:
            notes: list[str] = []
            try:
                chat = Chat(path.read_text(), model.vocabulary, arguments.history, notes)
                outcome = chat.play(way)
            except (Broken, InvalidRequest, StartupError, AssertionError) as error:
                outcome = TurnOutcome("broken")
                notes.append(f"{type(error).__name__}: {error}")
            totals.update("broken" if outcome.letters == "broken" else outcome.letters)
            totals["broken"] += outcome.letters == "broken"
            again = f"{outcome.n_again:5} of {outcome.n_prompt} again" if outcome.n_again else ""
            print(f"{outcome.letters:7} {path.stem[:44]:44} {way:18} {again}")
            for note in (
                notes
                if arguments.verbose or "M" in outcome.letters or outcome.letters == "broken"
                else ()
            ):
                print(f"          {note}")
    kept, rewritten, dropped, missed = (totals[letter] for letter in "=rdM")
    print(f"{kept} turns kept, {rewritten} rewritten by the template, ", end="")
    print(f"{dropped} dropped by the client, {missed} missed, {totals['broken']} broken")
    return 1 if totals["broken"] else 0


class Chat:
    def __init__(
        self, source: str, base: Tokenizer, history: ReasoningHistory, notes: list[str]
    ) -> None:
        # Some templates put control strings together from parts.
        answered = extended(START, Message(Role.ASSISTANT, STEPS[3].parts), START.messages[-1])
        pieces = loaded(source).render(answered, add_generation_prompt=True)
        self._tokenizer = ExtendedTokenizer(base, source + "".join(text for text, _ in pieces))
        self._bench = TurnBench(source, self._tokenizer, history=history)
        self._bench.dialect = chosen(self._bench.template).dialect
        self._bench.forget()
        self._notes = notes

    def play(self, way: Way, steps: Sequence[Step] = STEPS) -> TurnOutcome:
        outcome = TurnOutcome()
        sent = whole = START  # `whole` with all that was said
        for number, step in enumerate(steps, start=1):
            if way is Way.NONE:
                step = replace(step, reasoning="")
            text, self._bench.end_text = self._written(whole, step)
            exchange = self._bench.reply(sent, text)
            if exchange.said.calls != () and not step.message.calls:
                raise Broken(f"turn {number} reads as {exchange.said}")
            before = self._text(whole)
            ids = [call.id for call in exchange.message.calls]
            then = step.then
            if ids and isinstance(then.parts[0], ToolResult):
                then = replace(then, parts=(replace(then.parts[0], call_id=ids[0]),))
            message = sent_back(exchange, ids, with_reasoning=way is Way.SENT)
            everything = message_of(exchange.said, ids, with_reasoning=True)
            sent, whole = extended(sent, message, then), extended(whole, everything, then)
            self._judge(outcome, number, sent, exchange, before, whole)
        return outcome

    def _judge(
        self,
        outcome: TurnOutcome,
        number: int,
        sent: Conversation,
        exchange: Exchange,
        before: str,
        whole: Conversation,
    ) -> None:
        prompt = self._bench.prompts.from_conversation(sent)
        if not prompt.remembered and prompt.tokens != self._bench.plain(sent):
            raise Broken(f"turn {number}: tokens that are neither computed nor plain")
        known = exchange.all_tokens
        outcome.n_prompt += len(prompt.tokens)
        if prompt.tokens[: len(known)] == known:
            outcome.letters += "="
            return
        n_same = len(commonprefix([known, prompt.tokens]))  # noqa: RUF071
        outcome.n_again += len(known) - n_same
        after = self._text(whole)
        shown = commonprefix([before, after])  # noqa: RUF071
        thought = exchange.said.reasoning
        follows = after.find(sent.messages[-1].text or "degrees.", len(before))
        moves = after.find(exchange.said.text.strip(), len(before), follows) < 0
        rewrites = len(shown) < len(before) or thought.strip() not in after or moves
        *_, answer, then = sent.messages
        is_dropped = bool(thought) and not answer.reasoning and then.role is Role.USER
        outcome.letters += "r" if rewrites else "d" if is_dropped else "M"
        self._notes.append(
            f"turn {number}: the template {'rewrites' if rewrites else 'keeps'} it, "
            f"{len(known) - n_same} tokens again; wrote {before[len(shown) - 20 :]!r}, "
            f"now {after[len(shown) - 20 : len(shown) + 60]!r}, "
            f"reply {self._shown(exchange.tokens)!r}"
        )

    def _written(self, whole: Conversation, step: Step) -> tuple[str, str]:
        """The reply as the model would write it, and what ends it."""
        marks = self._bench.dialect.reasoning
        assert marks is not None
        prompt = self._text(whole)
        begins = prompt.rstrip().endswith(marks.opening.rstrip())
        # A prompt that closes the thoughts of the turn leaves none to the model.
        reasoning = "" if prompt.rstrip().endswith(marks.closing) else step.reasoning
        for body, end in self._bodies(whole, step, prompt, reasoning):
            for text in self._with_thoughts(body, reasoning, begins=begins):
                said = parse(
                    self._bench.dialect, schemas_of(START.tools), text, begins_in_reasoning=begins
                )
                if _says(said, step, reasoning):
                    return text, end
        raise Broken(f"no way to write {step.message} behind {prompt[-60:]!r}")

    def _bodies(
        self, whole: Conversation, step: Step, prompt: str, reasoning: str
    ) -> Iterator[tuple[str, str]]:
        """Return the turn as the template renders it, with its end."""
        thought = (Reasoning(reasoning),) if reasoning else ()
        message = Message(Role.ASSISTANT, (*thought, *step.parts))
        for body, end in self._shown_bodies(whole, message, prompt):
            is_in_order = not message.calls or body.find(message.text) <= body.find("weather")
            if is_in_order:
                yield body, end
        if message.calls and message.text:
            alone = replace(message, parts=(*thought, *message.calls))
            for body, end in self._shown_bodies(whole, alone, prompt):
                channel = f"{CHANNEL}commentary<|message|>{message.text}<|end|><|start|>assistant"
                for text in (f"{message.text}\n{body}", f"{channel}{body}", body):
                    yield text, end

    def _shown_bodies(
        self, whole: Conversation, message: Message, prompt: str
    ) -> Iterator[tuple[str, str]]:
        marks = self._bench.dialect.reasoning
        assert marks is not None
        asked = extended(whole, message)
        pieces = self._bench.template.render(asked, add_generation_prompt=False)
        shown = "".join(piece.text for piece in pieces)
        start = _end_of_prompt(prompt, marks.opening, shown, self._tokenizer)
        ends = "|".join(map(re.escape, self._tokenizer.end_strings))
        for end in re.finditer(ends, shown[start:]):
            yield shown[start : start + end.start()], end[0]
        if not re.search(ends, shown[start:]):  # the template writes nothing that ends a turn
            yield shown[start:].rstrip(), self._tokenizer.eos_text
        for implied in ("<|observation|>", "<|tool_response>") if message.calls else ("<|user|>",):
            if implied in self._tokenizer.end_strings:
                yield shown[start:], implied

    def _with_thoughts(self, body: str, reasoning: str, *, begins: bool) -> Iterator[str]:
        marks = self._bench.dialect.reasoning
        assert marks is not None
        if not reasoning:
            if begins and body.lstrip().startswith(marks.closing):
                yield body
            yield f"\n{marks.closing}\n\n{body.removeprefix(marks.closing)}" if begins else body
            return
        bare = body
        for space in ("", "\n", "\n\n"):
            bare = bare.replace(f"{marks.opening}{space}{marks.closing}", "")
        bare = bare.removeprefix(marks.closing)
        if begins:
            yield body.lstrip().removeprefix(marks.opening) if reasoning in body else body
            yield f"{reasoning}\n{marks.closing}\n\n{bare.lstrip()}"
            return
        yield body
        start = "<|start|>assistant" if CHANNEL in marks.opening else ""
        yield f"{marks.opening}{reasoning}{marks.closing}{start}{bare}"
        yield f"{marks.opening}\n{reasoning}\n{marks.closing}\n\n{bare}"

    def _text(self, conversation: Conversation) -> str:
        pieces = self._bench.template.render(conversation, add_generation_prompt=True)
        return "".join(piece.text for piece in pieces)

    def _shown(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.detokenize(tokens, render_special=True).decode()


def _end_of_prompt(prompt: str, opening: str, shown: str, tokenizer: ExtendedTokenizer) -> int:
    """Where the turn itself begins in what the template shows with it."""
    header, _, rest = prompt.rpartition(opening)
    heads = [prompt, header] if header and len(rest.strip()) < MAX_CLOSING_CHARS else [prompt]
    for text in heads:
        if shown.startswith(text):
            return len(text)
    for text in heads:
        tail = text[max(text.rfind(control) for control in tokenizer.special_strings) :]
        n_same = n_common(text, shown)
        if n_same >= len(text) - len(tail):  # an earlier turn has no header there
            return n_same
    for text in heads:  # the template has rewritten what comes before
        tail = text[max(text.rfind(control) for control in tokenizer.special_strings) :]
        if tail in shown:
            return shown.rindex(tail) + len(tail)
    return len(shown)


def _says(said: ParsedReply, step: Step, reasoning: str) -> bool:
    """Text beside calls may be lost: some models have no way to write it."""
    calls = [json.loads(each.arguments_json) for each in said.calls]
    wanted = [json.loads(each.arguments_json) for each in step.message.calls]
    has_text = said.text.strip() == step.message.text or (wanted and not said.text.strip())
    return bool(calls == wanted and has_text and said.reasoning.strip() == reasoning)


def sent_back(exchange: Exchange, ids: Sequence[str], *, with_reasoning: bool) -> Message:
    """As clients do: stripped, and the arguments written by another JSON library."""
    message = message_of(exchange.said, ids, with_reasoning=with_reasoning)
    parts = []
    for part in message.parts:
        match part:
            case Text(text):
                part = Text(text.strip())
            case Reasoning(text):
                part = Reasoning(text.strip())
            case ToolCall(_, _, arguments):
                compact = json.dumps(json.loads(arguments), separators=(",", ":"), sort_keys=True)
                part = replace(part, arguments_json=compact)
        parts.append(part)
    return replace(message, parts=tuple(parts))


if __name__ == "__main__":
    sys.exit(main())
