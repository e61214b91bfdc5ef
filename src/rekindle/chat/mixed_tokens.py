"""Tokens of prompts that mix texts with token ids, as llama-server takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import InvalidRequest
from rekindle.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Mixed:
    """One prompt of texts and token ids."""

    parts: Sequence[int | str]


def mixed_tokens(
    parts: str | Sequence[int | str], tokenizer: Tokenizer, *, parse_special: bool, path: str
) -> list[int]:
    """Return the tokens of a text, or of a list of texts and token ids. Adds no token.

    Raise InvalidRequest with the path of the part that is wrong; `path` is that of the list.
    """
    if isinstance(parts, str):
        return _tokenize(parts, tokenizer, parse_special=parse_special, path=path)
    tokens: list[int] = []
    for index, part in enumerate(parts):
        where = f"{path}.{index}"
        if isinstance(part, str):
            tokens += _tokenize(part, tokenizer, parse_special=parse_special, path=where)
        elif 0 <= part < tokenizer.n_vocab:
            tokens.append(part)
        else:
            last = tokenizer.n_vocab - 1
            message = f"{part} is not a token of this model: ids go from 0 to {last}."
            raise InvalidRequest(message, where)
    return tokens


def with_bos(parts: Sequence[int | str], tokenizer: Tokenizer) -> Sequence[int | str]:
    """Put the first token of prompts before a list that begins with a text without it."""
    first, bos = parts[0], tokenizer.bos_token
    if bos is None or not isinstance(first, str) or first.startswith(tokenizer.bos_text):
        return parts
    return [bos, *parts]


def _tokenize(text: str, tokenizer: Tokenizer, *, parse_special: bool, path: str) -> list[int]:
    try:
        return tokenizer.tokenize(text, parse_special=parse_special)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, path) from error
