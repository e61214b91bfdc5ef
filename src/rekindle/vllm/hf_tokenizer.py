"""A `generation.Tokenizer` from a tokenizer.json, by the `tokenizers` package.

There are two copies: one reads control strings as tokens, the other as text. Neither changes, so
any thread may use them.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rekindle.errors import StartupError
from rekindle.generation.tokenizer import InfillMarks
from rekindle.vllm.hf_folder import TOKENIZER_NAME, HfFolder

_SPACE_MARK = "\u2581"  # sentencepiece's
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# GPT-2's alphabet: printable bytes stand for themselves, the others start at U+0100.
_PRINTED = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_BYTE_OF = dict(enumerate((byte for byte in range(256) if byte not in _PRINTED), start=0x100))


# Texts of the tokens for filling in the middle, in the order of `InfillMarks`.
INFILL_NAMES = (
    ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>"),
    ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>"),
    ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)


class HfTokenizer:
    def __init__(self, folder: HfFolder) -> None:
        """Build the tokenizer. Raises StartupError."""
        self._parsing = _load(folder)
        self._plain = _load(folder)
        described = json.loads(folder.tokenizer_json)
        self._plain.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self._controls = {token: each.content for token, each in added.items() if each.special}
        vocabulary = self._parsing.get_vocab(with_added_tokens=True)
        self._pieces = [b""] * max(folder.n_vocab, max(vocabulary.values(), default=-1) + 1)
        bytes_of = _spelling(folder, described)
        for text, token in vocabulary.items():
            self._pieces[token] = text.encode() if token in added else bytes_of(text)
        self._visible = list(self._pieces)
        for token in self._controls:
            self._visible[token] = b""
        for unknown in _unknown_tokens(described, vocabulary):
            self._visible[unknown] = b""
        self._ids = {piece: token for token, piece in reversed(list(enumerate(self._visible)))}
        self.bos_text = folder.bos_text
        self.eos_text = folder.eos_text
        self.bos_token = self._leading_token(folder.bos_text)
        eos = self._parsing.token_to_id(folder.eos_text)
        ends = {*folder.end_ids, *([] if eos is None else [eos])}
        self.end_tokens = frozenset(token for token in ends if 0 <= token < self.n_vocab)
        if not self.end_tokens:
            raise StartupError(f"The folder {folder.path} does not say which token ends a turn.")
        self.special_strings = tuple(sorted(set(self._controls.values()) - {""}))
        end_texts = {self._pieces[token].decode("utf-8", "replace") for token in self.end_tokens}
        self.end_strings = tuple(sorted(end_texts - {""}))
        self.infill = InfillMarks(*(_first_of(names, vocabulary) for names in INFILL_NAMES))

    @property
    def n_vocab(self) -> int:
        return len(self._pieces)

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is not valid text
        if parse_special:
            return _encode(self._parsing, text)
        tokens = _encode(self._plain, text)
        if self._controls.keys().isdisjoint(tokens):
            return tokens
        # The vocabulary also holds control strings as ordinary words.
        return [each for token in tokens for each in self._as_text(token)]

    def piece(self, token: int) -> bytes:
        return self._visible[token]

    def detokenize(self, tokens: Sequence[int], *, render_special: bool) -> bytes:
        pieces = self._pieces if render_special else self._visible
        return b"".join([pieces[token] for token in tokens])

    def _as_text(self, token: int) -> Iterator[int]:
        if token not in self._controls:
            yield token
            return
        for character in self._controls[token]:
            data = character.encode()
            parts = [data] if data in self._ids else [bytes([byte]) for byte in data]
            yield from (self._ids[part] for part in parts if part in self._ids)

    def _leading_token(self, bos_text: str) -> int | None:
        """Return the BOS token if the tokenizer itself puts it in front of a text."""
        token: int | None = self._parsing.token_to_id(bos_text)
        first = self._parsing.encode("a", add_special_tokens=True).ids[:1]
        return token if first == [token] else None


def _load(folder: HfFolder) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise StartupError(
            "--engine vllm requires another package: pip install 'rekindle[vllm]'."
        ) from error
    try:
        tokenizer = Tokenizer.from_str(folder.tokenizer_json)
    except Exception as error:  # the package raises nothing more specific
        path = folder.path / TOKENIZER_NAME
        raise StartupError(f"The file {path} cannot be read: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _first_of(names: Sequence[str], vocabulary: dict[str, int]) -> int | None:
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _spelling(folder: HfFolder, described: dict[str, Any]) -> Callable[[str], bytes]:
    """Return how the vocabulary writes bytes, according to its decoder."""
    kinds = set(_types(described.get("decoder")))
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece
    raise StartupError(
        f"The tokenizer in {folder.path} is not supported: its decoder is"
        f" {', '.join(sorted(kinds)) or 'missing'}."
    )


def _types(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _types(part)


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:  # an added word that is not in the byte alphabet
        return text.encode()


def _sentencepiece(text: str) -> bytes:
    if (found := _BYTE_TOKEN.fullmatch(text)) is not None:
        return bytes([int(found[1], 16)])
    return text.replace(_SPACE_MARK, " ").encode()


def _unknown_tokens(described: dict[str, Any], vocabulary: dict[str, int]) -> list[int]:
    """Return the tokens for text that the vocabulary cannot write; they have no text."""
    model = described.get("model") or {}
    if isinstance(model.get("unk_id"), int):  # a unigram model
        return [model["unk_id"]]
    token = vocabulary.get(model.get("unk_token") or "")
    return [] if token is None else [token]
