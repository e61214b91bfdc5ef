"""Prompts for filling in the middle of a text, token by token as llama-server builds them.

With tokens for repositories and files:

    [REPO]myproject
    [SEP]{file name of a chunk}
    {its text}
    ...
    [SEP]filename
    [PREFIX]{before the gap}[SUFFIX]{after the gap}[MIDDLE]

Without them, a line between dashes divides the chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rekindle.chat.mixed_tokens import mixed_tokens
from rekindle.errors import NotSupported
from rekindle.generation.tokenizer import Tokenizer

REPOSITORY = "myproject\n"
CURRENT_FILE = "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"
N_MARKS = 8  # tokens of the prompt that are no text of the client's, at most
DEFAULT_N_PREDICT = 64  # room for a reply without a limit; picked


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Text from elsewhere, such as another file of the editor."""

    text: str
    file_name: str = "tmp"  # llama-server's


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """A gap in a text. Texts may contain token ids, as a list of both."""

    prefix: str | Sequence[int | str]
    suffix: str | Sequence[int | str]
    chunks: Sequence[FileChunk] = ()
    prompt: str = ""  # the beginning of the gap's text
    n_predict: int | None = None  # None: no limit
    prefix_path: str = "input_prefix"  # of the fields in the request, for errors
    suffix_path: str = "input_suffix"


class InfillTokens(NamedTuple):
    tokens: list[int]
    boundaries: tuple[int, ...]  # after each chunk


def infill_tokens(
    infill: Infill, tokenizer: Tokenizer, *, n_ctx: int, batch_size: int
) -> InfillTokens:
    """Build the prompt. Raise NotSupported for a model without these tokens.

    The text around the gap fills at most a batch: three quarters before it, a quarter behind it.
    The chunks get the rest of the context, the last ones first.
    """
    marks = tokenizer.infill
    if marks.prefix is None or marks.suffix is None or marks.middle is None:
        missing = [name for name in ("prefix", "suffix", "middle") if getattr(marks, name) is None]
        told = " ".join(f"{name} token is missing." for name in missing)
        raise NotSupported(f"Infill is not supported by this model: {told}")
    n_batch = min(batch_size, n_ctx // 2)  # of a short context, half is for the chunks
    begun = mixed_tokens(infill.prompt, tokenizer, parse_special=True, path="prompt")
    prefix = mixed_tokens(infill.prefix, tokenizer, parse_special=False, path=infill.prefix_path)
    suffix = mixed_tokens(infill.suffix, tokenizer, parse_special=False, path=infill.suffix_path)
    n_prefix = min(len(prefix), 3 * (n_batch // 4))
    n_suffix = min(len(suffix), max(0, n_batch // 4 - 2 - len(begun)))
    extra, ends = _extra_tokens(infill.chunks, tokenizer)
    n_predict = DEFAULT_N_PREDICT if infill.n_predict is None else infill.n_predict
    n_room = n_ctx - n_batch - N_MARKS - min(2 * n_predict, n_ctx // 4)
    n_cut = len(extra) - min(len(extra), max(0, n_room))
    bos = tokenizer.bos_token
    tokens = [
        *extra[n_cut:],
        *([] if bos is None else [bos]),
        marks.prefix,
        *prefix[len(prefix) - n_prefix :],
        *begun,
        marks.suffix,
        *suffix[:n_suffix],
        marks.middle,
    ]
    return InfillTokens(tokens, tuple(end - n_cut for end in ends if end > n_cut))


def _extra_tokens(chunks: Sequence[FileChunk], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before the text around the gap, and where each chunk ends."""
    marks = tokenizer.infill

    def plain(text: str) -> list[int]:
        return mixed_tokens(text, tokenizer, parse_special=False, path="input_extra")

    extra: list[int] = []
    ends: list[int] = []
    if marks.repository is not None:
        extra += [marks.repository, *plain(REPOSITORY)]
    for chunk in chunks:
        if marks.separator is not None:
            extra += [marks.separator, *plain(f"{chunk.file_name}\n")]
        else:
            extra += plain(SNIPPET)
        extra += plain(chunk.text)
        ends.append(len(extra))
    if marks.separator is not None:
        extra += [marks.separator, *plain(CURRENT_FILE)]
    return extra, ends
