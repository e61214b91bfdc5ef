"""Writes GGUF files that hold a vocabulary and no weights, for every tokenizer of llama.cpp."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf import GGUFWriter, TokenType

from rekindle.llama.library import lib
from rekindle.llama.tokenizer.pre_tokenizer import PreTokenizer
from rekindle.llama.tokenizer.vocabulary import Vocabulary
from tests.support.tiny_vocabulary import CONTROL_TOKENS, vocabulary

# Every name that `llama_vocab::impl::load` in llama-vocab.cpp compares `tokenizer_pre` with, as
# of this version of the binding:
# grep -o 'tokenizer_pre == "[^"]*"' vendor/llama.cpp/src/llama-vocab.cpp
READ_FROM = "0.3.36"
PRE_TOKENIZERS = (
    *("a.x-4.0", "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chameleon"),
    *("chatglm-bpe", "codeshell", "cohere2moe", "command-r", "dbrx", "deepseek-coder"),
    *("deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "default", "exaone"),
    *("exaone-moe", "exaone4", "f2llmv2", "falcon", "falcon-h1", "falcon3", "gemma4"),
    *("gigachat", "glm4", "glm5", "gpt-2", "gpt-4o", "gpt3-finnish", "granite-docling"),
    *("granite-embed-multi-311m", "granite-embed-multi-97m", "grok-2", "hunyuan"),
    *("hunyuan-dense", "hy_v4", "jais", "jais-2", "jina-de", "jina-es", "jina-v1-en"),
    *("jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "joyai-llm", "kanana2"),
    *("kimi-k2", "kormo", "laguna", "lfm2", "llada-moe", "llama-bpe", "llama-v3"),
    *("llama3", "llama4", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b"),
    *("minicpm5", "minimax-m2", "modern-bert", "mpt", "olmo", "phi-2", "pixtral"),
    *("poro-chat", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe"),
    *("seed-coder", "smaug-bpe", "smollm", "solar-open", "spark2_5", "stablelm2"),
    *("starcoder", "superbpe", "talkie", "tekken", "tiny_aya", "trillion", "ufakzeka"),
    *("viking", "whitespace", "youtu"),
)


def write_bpe_vocabulary(path: Path, pre: str) -> Path:
    words = vocabulary()
    n_text = len(words.tokens) - len(CONTROL_TOKENS)
    writer = GGUFWriter(str(path), "llama")
    # Words of `whitespace` keep their spaces under any other model, and llama.cpp aborts.
    writer.add_tokenizer_model("whitespace" if pre == "whitespace" else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types([TokenType.NORMAL] * n_text + [TokenType.CONTROL] * len(CONTROL_TOKENS))
    writer.add_token_merges(words.merges)
    return _finished(writer, path)


def write_piece_vocabulary(path: Path, model: str, *, user_defined: tuple[str, ...] = ()) -> Path:
    """Of SentencePiece's kind: `llama`, `t5` or `plamo2`. Every byte and a few words."""
    plain = [chr(code) for code in range(33, 127)] + ["\u2581"]
    plain += ["\u2581" * n for n in range(2, 17)] + ["a" * n for n in range(2, 17)]
    plain = [piece for piece in plain if piece not in user_defined]
    special = ["<unk>", "<s>", "</s>"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([*special, *(f"<0x{i:02X}>" for i in range(256)), *plain, *user_defined])
    writer.add_token_types(
        [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        + [TokenType.BYTE] * 256
        + [TokenType.NORMAL] * len(plain)
        + [TokenType.USER_DEFINED] * len(user_defined)
    )
    writer.add_token_scores(
        [0.0] * (3 + 256) + [-float(i) for i in range(len(plain))] + [0.0] * len(user_defined)
    )
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(value=False)
    return _finished(writer, path)


@contextmanager
def opened(path: Path, *, tokenizer: str, pre: str) -> Iterator[Vocabulary]:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    handle = lib.llama_model_load_from_file(str(path).encode(), params)
    assert handle, f"llama.cpp does not load {path.name}"
    pre_tokenizer = PreTokenizer.of(tokenizer=tokenizer, pre=pre)
    yield Vocabulary(lib.llama_model_get_vocab(handle), pre_tokenizer)
    lib.llama_model_free(handle)


def _finished(writer: GGUFWriter, path: Path) -> Path:
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
