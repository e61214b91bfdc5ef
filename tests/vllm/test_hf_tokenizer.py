"""HfTokenizer: against llama.cpp's own reading of the same vocabulary, and on other kinds."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import StartupError
from rekindle.llama.model import GgufModel
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from rekindle.vllm.hf_folder import read_folder
from rekindle.vllm.hf_tokenizer import HfTokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces,\ttabs\n\n\nand   lines \r\n",
    "1234567890 3.14159 0x1F",
    "It's they'll we've I'm DON'T",
    "def f(x):\n    return {'a': [1, 2, 3]}\n",
    '{"name": "read_file", "arguments": {"path": "/etc/passwd"}}',
    "Gr\u00fc\u00dfe, \u4f60\u597d, \u3053\u3093\u306b\u3061\u306f",
    "\u043f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0000 \u007f \ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|<|im_end|>|im_end|>",
    "half a pair: \ud83d.",
]


@pytest.fixture(scope="module")
def hf(hf_folder: Path) -> HfTokenizer:
    return HfTokenizer(read_folder(hf_folder))


@pytest.fixture(scope="module")
def vocabulary(embedded_model: Path) -> Iterator[Vocabulary]:
    model = GgufModel(embedded_model, gpu_layers=0)
    yield model.vocabulary
    model.close()


def many_texts() -> list[str]:
    rng = random.Random(8)
    alphabets = [
        "abcdefghij ,.\n",
        "<|im_start|>end ",
        "0123456789 -+",
        "\u00e4\u4f60\U0001f600 x\u0301",
    ]
    return ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(1, 60))) for _ in range(400)]


@pytest.mark.parametrize("parse_special", [True, False])
def test_texts_become_the_tokens_that_llama_cpp_makes_of_them(
    hf: HfTokenizer,
    vocabulary: Vocabulary,
    parse_special: bool,  # noqa: FBT001
) -> None:
    for text in TEXTS + many_texts():
        expected = vocabulary.tokenize(text, parse_special=parse_special)
        assert hf.tokenize(text, parse_special=parse_special) == expected, text


def test_every_token_has_the_bytes_that_it_has_in_llama_cpp(
    hf: HfTokenizer, vocabulary: Vocabulary
) -> None:
    assert hf.n_vocab == vocabulary.n_vocab
    for token in range(hf.n_vocab):
        assert hf.piece(token) == vocabulary.piece(token), token
        rendered = hf.detokenize([token], render_special=True)
        assert rendered == vocabulary.detokenize([token], render_special=True), token


def test_control_strings_and_ends_are_those_of_the_model(
    hf: HfTokenizer, vocabulary: Vocabulary
) -> None:
    assert hf.special_strings == vocabulary.special_strings
    assert set(hf.end_strings) <= set(vocabulary.end_strings)
    assert hf.eos_text == "<|im_end|>"
    assert hf.bos_text == vocabulary.bos_text
    assert hf.bos_token == vocabulary.bos_token
    assert hf.end_tokens <= vocabulary.eog_tokens


def test_text_comes_back_byte_by_byte(hf: HfTokenizer) -> None:
    for text in TEXTS[:-1] + many_texts():
        tokens = hf.tokenize(text, parse_special=False)
        assert b"".join(map(hf.piece, tokens)) == text.encode()


def test_plain_text_never_becomes_a_control_token(hf: HfTokenizer) -> None:
    controls = {hf.tokenize(text, parse_special=True)[0] for text in hf.special_strings}
    assert len(controls) == len(hf.special_strings)
    for text in hf.special_strings:
        tokens = hf.tokenize(f"a{text}{text}b", parse_special=False)
        assert controls.isdisjoint(tokens)


def write(folder: Path, tokenizer: dict[str, Any], **files: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def added(token: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": special, **flags}


def sentencepiece(tmp_path: Path) -> Path:
    """A unigram model with bytes to fall back on, as Gemma's and Llama 2's descendants are."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["\u2581", "\u2581hello", "\u2581wor", "ld", "<", "s", ">", "/", "a"]
    scores = [0.0] * 3 + [-20.0] * 256 + [-1.0 * n for n in range(1, 10)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": True,
            "vocab": list(zip(texts, scores, strict=True)),
        },
    }
    return write(
        tmp_path / "sp",
        tokenizer,
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        generation_config={"eos_token_id": [2, 263], "temperature": 0.6, "top_k": 20},
        config={"vocab_size": 300, "model_type": "gemma"},
    )


def test_a_sentencepiece_vocabulary_has_spaces_and_bytes_and_a_first_token(
    tmp_path: Path,
) -> None:
    folder = read_folder(sentencepiece(tmp_path))
    hf = HfTokenizer(folder)
    tokens = hf.tokenize(" hello world\u00fc", parse_special=False)
    assert hf.detokenize(tokens, render_special=False) == " hello world\u00fc".encode()
    assert [hf.piece(token) for token in tokens[-2:]] == [b"\xc3", b"\xbc"]
    assert hf.bos_token == 1
    assert hf.end_tokens == {2, 263}
    assert hf.n_vocab == 300  # the model's, with rows that no token names
    assert hf.piece(299) == b""
    assert hf.piece(0) == b""
    assert folder.default_sampling.temperature == 0.6
    assert folder.default_sampling.top_k == 20


def test_a_vocabulary_that_has_control_strings_as_words_still_reads_them_as_text(
    tmp_path: Path,
) -> None:
    hf = HfTokenizer(read_folder(sentencepiece(tmp_path)))
    assert hf.tokenize("<s>", parse_special=True) == [1]
    for text in ("<s>", "a</s>a<s>"):
        tokens = hf.tokenize(text, parse_special=False)
        assert {1, 2}.isdisjoint(tokens)
        assert hf.detokenize(tokens, render_special=False) == text.encode()


def test_tokens_that_are_marked_as_no_control_tokens_are_visible(tmp_path: Path) -> None:
    tokenizer = json.loads((sentencepiece(tmp_path) / "tokenizer.json").read_text("utf-8"))
    tokenizer["added_tokens"].append(added(268, "<tool_call>", special=False))
    hf = HfTokenizer(read_folder(write(tmp_path / "sp", tokenizer)))
    assert "<tool_call>" not in hf.special_strings
    assert hf.tokenize("<tool_call>", parse_special=False) == [268]
    assert hf.piece(268) == b"<tool_call>"


def test_a_template_is_a_file_a_text_or_one_of_several(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    assert read_folder(folder).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}), "utf-8")
    assert read_folder(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", "utf-8")
    assert read_folder(folder).chat_template == "J"


def test_other_tokenizers_and_other_models_have_other_digests(
    tmp_path: Path, hf_folder: Path
) -> None:
    one, other = read_folder(hf_folder), read_folder(sentencepiece(tmp_path))
    digests = {one.digest("a"), one.digest("b"), other.digest("a")}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("["), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
    ],
)
def test_a_folder_that_cannot_be_read_says_which_file(
    tmp_path: Path, break_it: Any, words: str
) -> None:
    folder = sentencepiece(tmp_path)
    break_it(folder)
    with pytest.raises(StartupError, match=words):
        HfTokenizer(read_folder(folder))


def test_a_folder_without_an_end_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(StartupError, match="WordPiece"):
        HfTokenizer(read_folder(write(tmp_path / "wordpiece", tokenizer)))
    tokenizer["decoder"] = {"type": "ByteFallback"}
    with pytest.raises(StartupError, match="ends a turn"):
        HfTokenizer(read_folder(write(tmp_path / "endless", tokenizer)))
    with pytest.raises(StartupError, match="not a folder"):
        read_folder(tmp_path / "nowhere")
