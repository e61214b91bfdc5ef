"""A plan as lines for a shell that do the same by hand."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.launch.overlay import FolderOverlay
from rekindle.launch.plan import Endpoint, KnownAgent

FOLDER = Path("/tmp/rekindle-launch")


def shell_lines(agent: KnownAgent, server: Endpoint, arguments: Sequence[str]) -> Iterator[str]:
    plan = agent.plan(server, FOLDER)
    files = dict(plan.files)
    if (overlay := plan.overlay) is not None:
        yield from _overlay_lines(overlay)
        files[f"{overlay.folder}/{overlay.file}"] = json.dumps(overlay.settings, indent=2) + "\n"
    for folder in dict.fromkeys((FOLDER / name).parent for name in files):
        yield f"mkdir -p {_quoted(folder)}"
    for name, text in files.items():
        yield f"cat > {_quoted(FOLDER / name)} <<'END'\n{text}END"
    if plan.removed:
        yield f"unset {' '.join(plan.removed)}"
    for name, value in plan.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    for name, value in plan.prepended.items():
        yield f"export {name}={shlex.quote(value)}${{{name}:+:${name}}}"
    yield shlex.join([agent.program, *plan.arguments, *arguments])


def _overlay_lines(overlay: FolderOverlay) -> Iterator[str]:
    target = FOLDER / overlay.folder
    yield f"mkdir -p {_quoted(target)}"
    yield f'ln -sf "${{{overlay.variable}:-$HOME}}"/{overlay.folder}/* {_quoted(target)}/'
    yield f"rm -f {_quoted(target / overlay.file)}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
