"""A plan as lines for a shell that do the same by hand."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.launch.overlay import FolderOverlay
from rekindle.launch.plan import Endpoint, KnownAgent

_FOLDER = Path("\0")  # stands for the folder in words of a plan: no other word can have it
_VARIABLE = '"$folder"'  # of the shell
# Only this user can make it, and read what is in it.
_MAKE_FOLDER = f"""\
folder="${{XDG_RUNTIME_DIR:-$HOME/.cache}}"/rekindle-launch
mkdir -p -m 700 {_VARIABLE}"""


def shell_lines(agent: KnownAgent, server: Endpoint, arguments: Sequence[str]) -> Iterator[str]:
    plan = agent.plan(server, _FOLDER)
    files = dict(plan.files)
    if files or plan.overlay is not None:
        yield _MAKE_FOLDER
    for inner in dict.fromkeys(Path(name).parent for name in files if "/" in name):
        yield f"mkdir -p {_quoted(_FOLDER / inner)}"
    if (overlay := plan.overlay) is not None:
        yield from _overlay_lines(overlay)
        files[f"{overlay.folder}/{overlay.file}"] = json.dumps(overlay.settings, indent=2) + "\n"
    for name, text in files.items():
        yield f"cat > {_quoted(_FOLDER / name)} <<'END'\n{text}END"
    if plan.removed:
        yield f"unset {' '.join(plan.removed)}"
    for name, value in plan.environment.items():
        yield f"export {name}={_quoted(value)}"
    for name, value in plan.prepended.items():
        yield f'export {name}={_quoted(value)}"${{{name}:+:${name}}}"'
    yield " ".join(map(_quoted, (agent.program, *plan.arguments, *arguments)))


def _overlay_lines(overlay: FolderOverlay) -> Iterator[str]:
    target = _FOLDER / overlay.folder
    yield f"mkdir -p {_quoted(target)}"
    yield f'ln -sf "${{{overlay.variable}:-$HOME}}"/{overlay.folder}/* {_quoted(target)}/'
    yield f"rm -f {_quoted(target / overlay.file)}"


def _quoted(word: str | Path) -> str:
    """Return the word as the shell must read it, with the variable for the folder."""
    before, mark, behind = str(word).partition(str(_FOLDER))
    if not mark:
        return shlex.quote(before)
    return f"{before and shlex.quote(before)}{_VARIABLE}{behind and shlex.quote(behind)}"
