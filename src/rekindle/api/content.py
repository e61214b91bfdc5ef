"""Parts of a message's content, as OpenAI's two APIs send them."""

from rekindle.errors import InvalidRequest

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


def part_text(kind: str, text: str | None, refusal: str | None, path: str) -> str:
    """Raises InvalidRequest for anything but text."""
    if kind == "refusal":
        return refusal or ""
    if kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"`{path}.type`: content of type `{kind}` is not supported, only text is.",
            f"{path}.type",
        )
    if text is None:
        raise InvalidRequest(f"`{path}.text` is required.", f"{path}.text")
    return text
