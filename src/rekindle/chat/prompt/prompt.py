"""Builds prompts from conversations, texts or token ids: token ids, and the boundaries in them.

A boundary is a position where a later prompt is likely to diverge: after system and tools,
before each of the last user messages, before the generation prompt.

A reply that comes back with the same meaning keeps the tokens that were sampled for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Lock

from rekindle.bounded_cache import BoundedCache
from rekindle.chat.conversation import (
    Conversation,
    Message,
    Role,
    StickyTools,
    Text,
    n_leading_systems,
)
from rekindle.chat.dialects.base import Dialect
from rekindle.chat.prompt.boundaries import Boundaries
from rekindle.chat.prompt.canonical_tools import schemas_of
from rekindle.chat.prompt.continuation import pieces_after_reply
from rekindle.chat.prompt.layout import Layout
from rekindle.chat.prompt.meaning import (
    call_keys,
    history_keys,
    means_the_same,
    next_key,
    split_reasoning,
)
from rekindle.chat.prompt.overflow import FULL_SHARE, head_size, message_size, trim
from rekindle.chat.prompt.reasoning_policy import ReasoningPolicy, other_reasoning, with_reasoning
from rekindle.chat.prompt.splicer import Candidate, Spliced, Splicer
from rekindle.chat.prompt.text_splicer import TextSplicer
from rekindle.chat.prompt.token_run import PieceTokenizer, TokenRun
from rekindle.chat.prompt.turn_memory import Turn, TurnMemory
from rekindle.chat.prompt.volatile import Neutralised, VolatileRules
from rekindle.chat.reply.parser import ParsedReply
from rekindle.chat.template.template import ChatTemplate
from rekindle.config.choices import ReasoningHistory
from rekindle.errors import InvalidRequest
from rekindle.generation.forgetting import Owner
from rekindle.generation.tokenizer import Tokenizer

TRIMMED_SHARES = (1.0, 0.85, 0.7, 0.5)  # of the context, tried until the prompt fits; picked
MAX_TURNS_TRIED = 16  # candidates for one message; picked
MAX_LOOKS = 4  # attempts to find the end of a message; picked
MAX_NAMESPACES = 64  # that have a builder at the same time; picked
MAX_NAMESPACES_BYTES = 256_000_000  # of all these builders; picked

_NEXT = "the next message"

Remember = Callable[[Sequence[int], str, ParsedReply, Sequence[str], Owner], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    text: str
    conversation: Conversation | None = None  # None: raw text or token ids
    begins_in_reasoning: bool = False
    remembered: tuple[tuple[int, int], ...] = ()  # token ranges of the spliced turns
    n_before: int = 0  # tokens of the client's, before the conversation
    max_plain: int = 0  # tokens without spliced turns, at most
    n_dropped: int = 0  # messages left out because the context is too short
    neutralised: tuple[Neutralised, ...] = ()  # text that was replaced by a constant
    sticky: StickyTools | None = None  # tools that the client did not send, or in another order
    namespace: str = ""
    build_seconds: float = field(default=0.0, compare=False)
    # Returns the position where a number of messages ends; None: unknown.
    locate: Callable[[int], int | None] = field(default=lambda _: None, compare=False, repr=False)
    # Takes the reply's tokens, the text of its end token, the parsed reply, call ids, the owner.
    remember: Remember = field(default=lambda *_: None, compare=False, repr=False)

    def position_of(self, n_messages: int) -> int:
        """Return where that many messages end, or the last boundary before; 0: unknown.

        For 0 messages, return where tools and system messages end.
        """
        if self.conversation is None:
            return 0
        messages = self.conversation.messages
        n_messages = n_messages or n_leading_systems(messages)
        if n_messages >= len(messages):
            return len(self.tokens)
        # Each attempt renders the history. After a few failures, assume that all would fail.
        for n in range(n_messages, max(n_messages - MAX_LOOKS, -1), -1):
            if (position := self.locate(n)) is not None:
                return position
        return self.boundaries[0] if self.boundaries and n_messages else 0


class PromptBuilder:
    """Builds prompts of one namespace. Blocks for tens of milliseconds with a long history."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        dialect: Dialect,
        memory: TurnMemory,
        reasoning_history: ReasoningHistory,
        *,
        volatile: VolatileRules,
        namespace: str = "",
    ) -> None:
        self._namespace = namespace
        self.volatile = volatile
        self._others = BoundedCache[str, PromptBuilder](max_items=MAX_NAMESPACES)
        self._others_lock = Lock()
        self._template = template
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._memory = memory
        self._reasoning_history = reasoning_history
        self._tokenize = PieceTokenizer(tokenizer)
        self._bounds = Boundaries(template, tokenizer, self._tokenize)
        self._texts = TextSplicer(memory, tokenizer, self._tokenize)
        self._reasoning = ReasoningPolicy(reasoning_history, template.source)

    def within(self, namespace: str) -> "PromptBuilder":
        """Return the builder of a namespace. Builders share no turns and no known texts."""
        if namespace == self._namespace:
            return self
        with self._others_lock:
            other = self._others.peek(namespace) or PromptBuilder(
                self._template,
                self._tokenizer,
                self._dialect,
                self._memory.within(namespace),
                self._reasoning_history,
                volatile=self.volatile,
                namespace=namespace,
            )
            self._others.put(namespace, other)
            # Builders grow while they are used, so their sizes are added up each time.
            while len(self._others) > 1 and self._n_bytes_of_others() > MAX_NAMESPACES_BYTES:
                self._others.pop_oldest()
        return other

    @property
    def n_bytes(self) -> int:
        """Return the size of the texts and turns that this namespace knows as tokens."""
        return self._tokenize.n_bytes + self._memory.n_bytes

    def clear(self, namespace: str | None) -> None:
        """Drop what is known of the texts of one namespace; None: of every namespace."""
        if namespace in (None, self._namespace):
            self._tokenize.clear()
            self._memory.clear()
        with self._others_lock:
            for each in list(self._others) if namespace is None else [namespace]:
                self._others.pop(each)

    def _n_bytes_of_others(self) -> int:
        return sum(other.n_bytes for other in self._others.values())

    def from_conversation(self, conversation: Conversation, *, recalls: bool = True) -> Prompt:
        """Build the prompt. Without `recalls`, no remembered turn is spliced in."""
        conversation, neutralised = self.volatile.neutralise(conversation)
        keys = history_keys(conversation.messages, self._dialect.reasoning)
        candidates = self._candidates(conversation, keys) if recalls else {}
        switched = self._reasoning.switched_on(conversation)
        shown, layout, spliced = self._spliced(switched, candidates)
        self._memory.note_use(list(spliced.turns.values()))
        history_end, lengths = self._bounds.prefix_lengths(shown, layout.text)
        tokens = tuple(spliced.run.tokens)
        opening = layout.text[history_end:]
        begins_in_reasoning = self._begins_in_reasoning(layout.text)

        def remember(
            reply: Sequence[int],
            end_text: str,
            said: ParsedReply,
            call_ids: Sequence[str],
            owner: Owner,
        ) -> None:
            answered = conversation.with_reply(said.text, said.tool_calls(call_ids))
            *before, answer = answered.messages
            turn = Turn(
                prompt_key=spliced.run.key(),
                n_replies_before=sum(m.role is Role.ASSISTANT for m in before),
                gap_chars=history_end - spliced.end,
                generation_prompt=opening,
                begins_in_reasoning=begins_in_reasoning,
                tokens=tuple(reply),
                end_text=end_text,
                said=said,
            )
            opened = spliced.turns.get(len(before))  # the message that the reply continues
            if opened and not said.reasoning:
                turn = opened.continued(turn)
            key = next_key([b"", *keys][len(before)], answer, self._dialect.reasoning)
            self._memory.remember(turn, [key, *call_keys(call_ids)], owner)

        return Prompt(
            tokens,
            self._bounds.boundaries(spliced, lengths),
            layout.text,
            conversation=conversation,
            begins_in_reasoning=begins_in_reasoning,
            remembered=tuple(spliced.run.remembered),
            # A token has at least one byte.
            max_plain=len(tokens)
            - sum(end - start for start, end in spliced.run.remembered)
            + spliced.n_replaced,
            neutralised=neutralised,
            namespace=self._namespace,
            locate=cache(partial(self._bounds.locate, shown, layout.text, spliced)),
            remember=remember,
        )

    def from_trimmed(
        self, conversation: Conversation, *, n_ctx: int, recalls: bool = True
    ) -> Prompt:
        """Build the prompt, and drop the oldest turns if it leaves no room for a reply.

        The size without remembered turns decides: memory must not change what is dropped. If only
        the remembered turns make the prompt too long, they are not spliced in.
        """
        limit = n_ctx * FULL_SHARE
        prompt = self.from_conversation(conversation, recalls=recalls)
        if max(len(prompt.tokens), prompt.max_plain) <= limit:
            return prompt
        shorter, n_head = conversation, head_size(conversation, self._tokenize)
        size_of = partial(message_size, tokenize=self._tokenize)
        plain = self.from_conversation(conversation, recalls=False)
        for share in TRIMMED_SHARES:  # sizes are estimates; the first share nearly always fits
            if len(plain.tokens) <= limit:
                break
            shorter = trim(conversation, n_ctx=int(n_ctx * share), n_head=n_head, size_of=size_of)
            plain = self.from_conversation(shorter, recalls=False)
        prompt = self.from_conversation(shorter) if recalls else plain
        if len(plain.tokens) <= limit < len(prompt.tokens):
            prompt = plain
        return replace(prompt, n_dropped=len(conversation.messages) - len(shorter.messages))

    def after_reply(self, prompt: Prompt, said: ParsedReply) -> tuple[int, ...]:
        """Return the tokens that begin the next turn's prompt, up to its user message.

        A client that has sent no reasoning so far is expected to drop this reply's as well.
        """
        assert prompt.conversation is not None
        marks = self._dialect.reasoning
        sends = any(split_reasoning(m, marks)[0].strip() for m in prompt.conversation.messages)
        reasoning = said.reasoning if sends else ""
        answered = prompt.conversation.with_reply(said.text, (), reasoning=reasoning)
        next_message = Message(Role.USER, (Text(_NEXT),))
        asked = replace(answered, messages=(*answered.messages, next_message))
        try:
            keys = history_keys(asked.messages, self._dialect.reasoning)
            candidates = self._candidates(asked, keys)
            _, layout, spliced = self._spliced(self._reasoning.switched_on(asked), candidates)
        except InvalidRequest:
            return ()  # some templates refuse the next turn's conversation
        place = layout.text.rfind(_NEXT)
        before = [position for offset, position, _ in spliced.marks if offset <= place]
        return tuple(spliced.run.tokens[: before[-1]]) if before else ()

    def from_text(self, text: str, *, recalls: bool = True) -> Prompt:
        run = TokenRun(self._bos_before(text))
        self._memory.note_use(self._texts.splice(run, text, recalls=recalls))
        return self._plain(run, text)

    def from_tokens(self, tokens: Sequence[int]) -> Prompt:
        n_vocab = self._tokenizer.n_vocab
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
            wrong = (i for i, token in enumerate(tokens) if not 0 <= token < n_vocab)
            index = next(wrong)
            raise InvalidRequest(
                f"{tokens[index]} is not a token of this model: ids go from 0 to {n_vocab - 1}.",
                param=f"prompt.{index}",
            )
        text = self._tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")
        return self._plain(TokenRun(tokens), text)

    def after_tokens(self, tokens: Sequence[int], conversation: Conversation) -> Prompt:
        """Build a prompt of ids that end in a reply, and of the messages that follow it."""
        earlier = self.from_tokens(tokens)
        pieces = pieces_after_reply(self._template, self._reasoning.switched_on(conversation))
        text = "".join(piece.text for piece in pieces)
        return Prompt(
            (*earlier.tokens, *(token for piece in pieces for token in self._tokenize(piece))),
            (),
            earlier.text + text,
            conversation=conversation,
            begins_in_reasoning=self._begins_in_reasoning(text),
            n_before=len(tokens),
            namespace=self._namespace,
        )

    def _plain(self, run: TokenRun, text: str) -> Prompt:
        if not run.tokens:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return Prompt(
            tuple(run.tokens),
            (),
            text,
            remembered=tuple(run.remembered),
            namespace=self._namespace,
            remember=lambda reply, _end, _said, _ids, owner: self._texts.remember(
                run.key(), text, reply, owner
            ),
        )

    def _candidates(
        self, conversation: Conversation, keys: Sequence[bytes]
    ) -> dict[int, Candidate]:
        """Find the turns that mean the same, for each assistant message."""
        wanted = {
            index: [*call_keys(call.id for call in message.calls), keys[index]]
            for index, message in enumerate(conversation.messages)
            if message.role is Role.ASSISTANT
        }
        found = self._memory.find([key for each in wanted.values() for key in each])
        first_restored = self._reasoning.first_restored(conversation)
        candidates = {}
        for n_before, (index, its_keys) in enumerate(wanted.items()):
            message = conversation.messages[index]
            # A copy of an earlier message, ids included, must not get the tokens of that one.
            turns = {
                turn.id: turn
                for key in its_keys
                for turn in found[key]
                if turn.n_replies_before == n_before
            }
            fitting = [
                turn
                for turn in turns.values()
                if means_the_same(message, turn.said, self._dialect.reasoning)
                or (turn in found[keys[index]] and self._continues(message, turn.said))
            ]
            is_open = conversation.continue_last and message is conversation.messages[-1]
            if is_open:
                piece = self._tokenizer.piece
                fitting = [turn for turn in fitting if turn.ends_like(message.text, piece)]
            if fitting:
                best, restores = fitting[:MAX_TURNS_TRIED], index >= first_restored
                candidates[index] = Candidate(best, restores, is_open)
        return candidates

    def _continues(self, message: Message, said: ParsedReply) -> bool:
        """Return whether the message ends with this reply, which continued an open message."""
        reasoning, text = split_reasoning(message, self._dialect.reasoning)
        return not reasoning and not said.reasoning and text.strip().endswith(said.text.strip())

    def _spliced(
        self, conversation: Conversation, candidates: Mapping[int, Candidate]
    ) -> tuple[Conversation, Layout, Spliced]:
        """Render the conversation and splice turns in.

        Reasoning is restored before rendering. If that turn was not spliced, its reasoning is
        replaced by another turn's or removed, and the rendering is retried.
        """
        marks = self._dialect.reasoning
        restored = {
            index: candidate.turns[0].said.reasoning
            for index, candidate in candidates.items()
            if candidate.restores_reasoning
            and not split_reasoning(conversation.messages[index], marks)[0]
        }
        schemas = schemas_of(conversation.callable_tools)
        layout: Layout | None = None
        changed: set[int] = set()
        while True:
            shown = with_reasoning(conversation, restored)
            pieces = self._template.render(shown, add_generation_prompt=True)
            before, layout = layout, Layout(pieces, self._template.guard)
            if before is None or before.text != layout.text:
                splicer = Splicer(
                    layout, self._tokenize, self._dialect, schemas, self._tokenizer.end_strings
                )
                run = TokenRun(self._bos_before(layout.text))
                spliced = splicer.splice(run, candidates)
            others = {
                index: other_reasoning(spliced.rendered_differently.get(index), reasoning)
                for index, reasoning in restored.items()
                if index not in spliced.turns
            }
            others |= dict.fromkeys(changed & others.keys(), "")
            changed |= {index for index, reasoning in others.items() if reasoning}
            if all(restored[index] == reasoning for index, reasoning in others.items()):
                return shown, layout, spliced
            restored |= others

    def _bos_before(self, text: str) -> tuple[int, ...]:
        bos = self._tokenizer.bos_token
        return () if bos is None or text.startswith(self._tokenizer.bos_text) else (bos,)

    def _begins_in_reasoning(self, text: str) -> bool:
        marks = self._dialect.reasoning
        return marks is not None and text.rstrip().endswith(marks.opening.rstrip())
