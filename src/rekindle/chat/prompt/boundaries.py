"""Where messages end in a prompt: positions where a later prompt is likely to diverge."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.chat.conversation import Conversation, Role
from rekindle.chat.prompt.splicer import Spliced
from rekindle.chat.prompt.token_run import PieceTokenizer
from rekindle.chat.template.guard import PromptPiece
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest
from rekindle.generation.tokenizer import Tokenizer

# Clients drop or rewrite the last message or a whole tool loop, not much older messages.
MAX_USER_BOUNDARIES = 2


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Finds a message's end by rendering the conversation up to that message."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tokenize: PieceTokenizer

    def prefix_lengths(self, conversation: Conversation, text: str) -> tuple[int, list[int]]:
        """Return where the history ends in the text, and the lengths of its prefixes."""
        messages = conversation.messages
        users = [i for i, message in enumerate(messages) if message.role is Role.USER and i > 0]
        cuts = {*users[:1], *users[-MAX_USER_BOUNDARIES:], len(messages)}
        history_end = len(text)
        lengths = []
        for cut in sorted(cuts):
            length = self._prefix_length(conversation, cut, text)
            if length is not None:
                lengths.append(length)
                if cut == len(messages) and not conversation.continue_last:
                    history_end = length
        return history_end, lengths

    def _prefix_length(self, conversation: Conversation, n_messages: int, text: str) -> int | None:
        """Return where the first messages end; None: alone they are rendered differently."""
        messages = conversation.messages[:n_messages]
        shorter = replace(conversation, messages=messages, continue_last=False)
        try:
            pieces = self.template.render(shorter, add_generation_prompt=False)
        except InvalidRequest:
            return None  # some templates refuse a conversation that ends here
        prefix = "".join(piece.text for piece in pieces)
        is_inside = prefix and len(prefix) < len(text) and text.startswith(prefix)
        return len(prefix) if is_inside else None

    def locate(
        self, conversation: Conversation, text: str, spliced: Spliced, n_messages: int
    ) -> int | None:
        """Return the token position where the first messages end; None: unknown."""
        length = self._prefix_length(conversation, n_messages, text)
        positions = () if length is None else self.boundaries(spliced, [length])
        return positions[0] if positions else None

    def boundaries(self, spliced: Spliced, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the token positions of character offsets. Offsets inside a token are dropped."""
        found = set()
        wanted = sorted(set(lengths), reverse=True)
        for offset, position, piece in reversed(spliced.marks):
            while wanted and wanted[0] >= offset + len(piece.text):
                wanted.pop(0)  # the offset lies in a spliced turn
            while wanted and wanted[0] >= offset:
                inner = self._position_in(piece, wanted.pop(0) - offset)
                if inner is not None and position + inner > 0:
                    found.add(position + inner)
        return tuple(sorted(found))

    def _position_in(self, piece: PromptPiece, n_chars: int) -> int | None:
        n_bytes = len(piece.text[:n_chars].encode("utf-8", "replace"))
        for position, token in enumerate(self.tokenize(piece)):
            if n_bytes <= 0:
                return position if n_bytes == 0 else None
            n_bytes -= len(self.tokenizer.detokenize((token,), render_special=True))
        return None
