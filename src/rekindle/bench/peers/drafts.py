"""The settings of llama-server's own speculative decoding, without a second model.

No setting is the best everywhere, so each is measured: compare with the best of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Flags since llama.cpp has them per type, and the flags before that."""

    arguments: Sequence[str]
    old_arguments: Sequence[str]


DRAFTS = {
    # As its documentation recommends for texts that are rewritten. Dense models take short drafts.
    "ngram-mod": DraftSettings(
        (
            *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "24"),
            *("--spec-ngram-mod-n-min", "8", "--spec-ngram-mod-n-max", "48"),
        ),
        (
            *("--spec-type", "ngram-mod", "--spec-ngram-size-n", "24"),
            *("--draft-min", "8", "--draft-max", "48"),
        ),
    ),
    # Its defaults.
    "ngram-simple": DraftSettings(
        (
            *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "12"),
            *("--spec-ngram-simple-size-m", "48"),
        ),
        (
            *("--spec-type", "ngram-simple", "--spec-ngram-size-n", "12"),
            *("--spec-ngram-size-m", "48", "--draft-max", "48"),
        ),
    ),
    # Short matches and drafts, for texts that change every few tokens; picked.
    "ngram-short": DraftSettings(
        (
            *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
            *("--spec-ngram-simple-size-m", "12"),
        ),
        (
            *("--spec-type", "ngram-simple", "--spec-ngram-size-n", "4"),
            *("--spec-ngram-size-m", "12", "--draft-max", "12"),
        ),
    ),
}


def llama_server_drafts(help_text: str) -> Mapping[str, Sequence[str]]:
    """Return the flags of each setting, in the words of that version. Empty: it has none."""
    # First, because newer versions still name the old flags, as removed ones.
    if "--spec-ngram-mod-n-match" in help_text:
        return {name: each.arguments for name, each in DRAFTS.items()}
    if "--spec-type" in help_text:
        return {name: each.old_arguments for name, each in DRAFTS.items()}
    return {}
