"""A vocabulary with the control tokens of a chat template for another model."""

import re
from collections.abc import Sequence

from rekindle.generation.tokenizer import NO_INFILL, Tokenizer

# Control tokens of published templates, by their look: the vocabularies are not at hand. Tags such
# as <think> or <tool_call> are left out: in most vocabularies they are no control tokens.
CONTROL_STRING = re.compile(
    r"<[|\uff5c][^<>'\"\s]+?[|\uff5c]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Z_]{3,}\]"
    r"|</?s>|<SPECIAL_\d+>|<(?:start|end)_of_turn>|\[e~\[|\]~b\]|\]~!b\["
    r"|<sep>|<seed:[be]os>|<(?:beginning|end)_of_sentence>|</?(?:assistant|user)>"
)
# Those that end a turn.
END_STRINGS = (
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|observation|>", "<|END_OF_TURN_TOKEN|>", "<SPECIAL_12>", "[e~["),
    *("<sep>", "<seed:eos>", "<end_of_sentence>", "</assistant>", "<|role_end|>", "<|calls|>"),
    *("<|message_sep|>", "<|end_of_msg|>", "<|assistant_end|>", "<|eot|>", "<|eom|>"),
    "<|tools_suffix|>",
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5chy_eos:opensource\uff5c>"),
    "<|START_OF_TURN_TOKEN|>",  # Command R+ does not end a turn with calls
)
CHANNEL = "<|channel|>"  # where it is used, <|end|> ends a part of a turn


class ExtendedTokenizer:
    """A vocabulary with other control tokens than its own."""

    def __init__(self, base: Tokenizer, source: str) -> None:
        self._base = base
        found = {"<s>", "</s>", *CONTROL_STRING.findall(source)}
        if CHANNEL in found:
            found |= {"<|return|>", "<|call|>"}
        self.special_strings = tuple(sorted(found))
        self.end_strings = tuple(
            end
            for end in END_STRINGS
            if end in found and not (end == "<|end|>" and CHANNEL in found)
        )
        self.infill = NO_INFILL
        self.bos_text, self.eos_text, self.bos_token = "<s>", "</s>", None
        longest_first = sorted(found, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._ids = {text: base.n_vocab + i for i, text in enumerate(self.special_strings)}
        self.n_vocab = base.n_vocab + len(found)

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        tokens: list[int] = []
        for part in self._control.split(text) if parse_special else [text]:
            if parse_special and part in self._ids:
                tokens.append(self._ids[part])
            else:
                tokens += self._base.tokenize(part, parse_special=False)
        return tokens

    def piece(self, token: int) -> bytes:
        return self._base.piece(token) if token < self._base.n_vocab else b""

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        return b"".join(self._text(token, render_special=render_special) for token in tokens)

    def _text(self, token: int, *, render_special: bool) -> bytes:
        if token < self._base.n_vocab:
            return self._base.detokenize((token,), render_special=render_special)
        return self.special_strings[token - self._base.n_vocab].encode() if render_special else b""
