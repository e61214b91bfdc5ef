"""The tokens of a vocabulary for filling in the middle of a text (FIM)."""

from rekindle.llama.library import lib
from rekindle.llama.tokenizer.vocabulary import Vocabulary

_NAMES = {
    "prefix": "pre",
    "suffix": "suf",
    "middle": "mid",
    "pad": "pad",
    "repository": "rep",
    "file": "sep",
}


def fim_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the tokens that the vocabulary has, by purpose."""
    found = {
        name: getattr(lib, f"llama_vocab_fim_{short}")(vocabulary.handle)
        for name, short in _NAMES.items()
    }
    return {name: token for name, token in found.items() if token >= 0}
