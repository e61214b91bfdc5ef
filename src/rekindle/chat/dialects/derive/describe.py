"""One line about a derived dialect, for the operator."""

from rekindle.chat.dialects.call_format import CallFormat, Strings
from rekindle.chat.dialects.derive.pieces import atoms, is_mark


def describe(call_format: CallFormat) -> str:
    """Say how arguments are written, and between which marks."""
    members = call_format.members
    if members is None:
        how = "JSON"
    elif members.value.strings is Strings.PYTHON:
        how = "Python"
    else:
        how = "arguments one by one"
    first, last = call_format.call[0], call_format.call[-1]
    opening = call_format.opening + (first if isinstance(first, str) else "")
    closing = (last if isinstance(last, str) else "") + call_format.closing
    before, after = _marks(opening), _marks(closing)
    if not before:
        return f"{how} at the beginning of a reply"
    return f"{how} between {before[0]} and {after[-1]}" if after else f"{how} behind {before[0]}"


def _marks(text: str) -> list[str]:
    """Return the marks in a text, or its words if it has none."""
    found = [str(atom) for atom in atoms(text)]
    marks = [atom for atom in found if is_mark(atom)]
    outside = [str(atom) for piece in text.split('"')[::2] for atom in atoms(piece)]
    return marks or [atom for atom in outside if atom.isalnum()]
