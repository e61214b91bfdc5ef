"""Where messages end in a prompt: positions that a later request is likely to share and leave."""

from collections.abc import Sequence
from dataclasses import replace

from rekindle.chat.conversation import Conversation, Role
from rekindle.chat.prompt.splicer import Spliced
from rekindle.chat.prompt.token_run import PieceTokenizer
from rekindle.chat.template.guard import PromptPiece
from rekindle.chat.template.template import ChatTemplate
from rekindle.errors import InvalidRequest
from rekindle.generation.tokenizer import Tokenizer

# Clients drop or rewrite the last message, or a whole tool loop, not what came long before.
MAX_USER_BOUNDARIES = 2


class Boundaries:
    """A message's end is where the template ends when it renders no more than that."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, tokenize: PieceTokenizer
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._tokenize = tokenize

    def prefix_lengths(self, conversation: Conversation, text: str) -> tuple[int, list[int]]:
        """Where the history ends in the text, and where those of its earlier cuts do."""
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
        """Where the first messages end in the text; None: the template writes them otherwise."""
        messages = conversation.messages[:n_messages]
        shorter = replace(conversation, messages=messages, continue_last=False)
        try:
            pieces = self._template.render(shorter, add_generation_prompt=False)
        except InvalidRequest:
            return None  # some templates refuse a conversation that ends here
        prefix = "".join(piece.text for piece in pieces)
        is_inside = prefix and len(prefix) < len(text) and text.startswith(prefix)
        return len(prefix) if is_inside else None

    def locate(
        self, conversation: Conversation, text: str, spliced: Spliced, n_messages: int
    ) -> int | None:
        length = self._prefix_length(conversation, n_messages, text)
        positions = () if length is None else self.boundaries(spliced, [length])
        return positions[0] if positions else None

    def boundaries(self, spliced: Spliced, lengths: Sequence[int]) -> tuple[int, ...]:
        """Character offsets become token positions; an offset inside a token is none."""
        found = set()
        wanted = sorted(set(lengths), reverse=True)
        for offset, position, piece in reversed(spliced.marks):
            while wanted and wanted[0] >= offset + len(piece.text):
                wanted.pop(0)  # it lies in a spliced turn
            while wanted and wanted[0] >= offset:
                inner = self._position_in(piece, wanted.pop(0) - offset)
                if inner is not None and position + inner > 0:
                    found.add(position + inner)
        return tuple(sorted(found))

    def _position_in(self, piece: PromptPiece, n_chars: int) -> int | None:
        n_bytes = len(piece.text[:n_chars].encode("utf-8", "replace"))
        for position, token in enumerate(self._tokenize(piece)):
            if n_bytes <= 0:
                return position if n_bytes == 0 else None
            n_bytes -= len(self._tokenizer.detokenize((token,), render_special=True))
        return None
