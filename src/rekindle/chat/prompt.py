"""From a conversation, a text or token ids to the prompt: token ids, and the boundaries in them.

A boundary is a position that a later request is likely to share and then leave: after system
and tools, before each of the last user messages, before the generation prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle.chat.conversation import Conversation, Role
from rekindle.chat.guard import Piece
from rekindle.chat.template import ChatTemplate
from rekindle.errors import InvalidRequest
from rekindle.generation import Tokenizer

# Clients drop or rewrite the last message, or a whole tool loop, not what came long before.
MAX_USER_BOUNDARIES = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    text: str


class PromptBuilder:
    """Blocking: rendering and tokenising a long history takes tens of milliseconds."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def from_conversation(self, conversation: Conversation) -> Prompt:
        pieces = self.render(conversation)
        text = "".join(piece.text for piece in pieces)
        tokens = self._with_bos(self._tokenize(pieces), text)
        lengths = self._prefix_lengths(conversation, text)
        return Prompt(tuple(tokens), self._boundaries(tokens, text, lengths), text)

    def from_text(self, text: str) -> Prompt:
        tokens = self._tokenizer.tokenize(text, parse_special=True)
        return self._plain(self._with_bos(tokens, text), text)

    def from_tokens(self, tokens: Sequence[int]) -> Prompt:
        n_vocab = self._tokenizer.n_vocab
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:
            for index, token in enumerate(tokens):
                if 0 <= token < n_vocab:
                    continue
                raise InvalidRequest(
                    f"{token} is not a token of this model: ids go from 0 to {n_vocab - 1}.",
                    param=f"prompt.{index}",
                )
        text = self._tokenizer.detokenize(tokens, render_special=True).decode("utf-8", "replace")
        return self._plain(list(tokens), text)

    def render(self, conversation: Conversation) -> tuple[Piece, ...]:
        return self._template.render(
            conversation, add_generation_prompt=not conversation.continue_last
        )

    def _plain(self, tokens: list[int], text: str) -> Prompt:
        if not tokens:
            raise InvalidRequest("The prompt is empty.", param="prompt")
        return Prompt(tuple(tokens), (), text)

    def _tokenize(self, pieces: Iterable[Piece]) -> list[int]:
        tokens: list[int] = []
        for piece in pieces:
            tokens += self._tokenizer.tokenize(piece.text, parse_special=piece.parse_special)
        return tokens

    def _with_bos(self, tokens: list[int], text: str) -> list[int]:
        bos = self._tokenizer.bos_token
        if bos is None or text.startswith(self._tokenizer.bos_text):
            return tokens
        return [bos, *tokens]

    def _prefix_lengths(self, conversation: Conversation, text: str) -> list[int]:
        """Where the prompt of an earlier cut of the conversation ends in this one's text."""
        messages = conversation.messages
        users = [i for i, message in enumerate(messages) if message.role is Role.USER and i > 0]
        cuts = {*users[:1], *users[-MAX_USER_BOUNDARIES:], len(messages)}
        lengths = []
        for cut in sorted(cuts):
            shorter = replace(conversation, messages=messages[:cut], continue_last=False)
            try:
                pieces = self._template.render(shorter, add_generation_prompt=False)
            except InvalidRequest:
                continue  # some templates refuse a conversation that ends here
            prefix = "".join(piece.text for piece in pieces)
            if prefix and len(prefix) < len(text) and text.startswith(prefix):
                lengths.append(len(prefix))
        return lengths

    def _boundaries(self, tokens: list[int], text: str, lengths: list[int]) -> tuple[int, ...]:
        """Character offsets become token positions; an offset inside a token is none."""
        wanted = {len(text[:length].encode()): length for length in lengths}
        found = []
        n_bytes = 0
        bos = self._tokenizer.bos_token
        has_added_bos = bos is not None and not text.startswith(self._tokenizer.bos_text)
        for position, token in enumerate(tokens):
            if n_bytes in wanted and position > 0:
                found.append(position)
                del wanted[n_bytes]
            if not wanted:
                break
            if not (position == 0 and has_added_bos):
                n_bytes += len(self._tokenizer.detokenize((token,), render_special=True))
        return tuple(found)
