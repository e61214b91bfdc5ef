"""An agent's own folder with other settings: links to its entries, and one changed file.

For agents that take the settings that matter here from a file in their folder only. The agent
reads and writes its own files through the links; the changed file is a copy. Files that the agent
makes, or puts in the place of a link, are moved to its own folder afterwards.
"""

import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOverlay:
    variable: str  # names the folder that has the agent's folder; without it: the home folder
    folder: str  # the agent's folder
    file: str  # of its settings, as JSON
    settings: Mapping[str, Any]  # that win over those in the file

    def source(self, environment: Mapping[str, str]) -> Path:
        return Path(environment.get(self.variable) or Path.home()) / self.folder

    def write(self, parent: Path, environment: Mapping[str, str]) -> None:
        source, target = self.source(environment), parent / self.folder
        target.mkdir(parents=True)
        for entry in source.iterdir() if source.is_dir() else ():
            if entry.name != self.file:
                (target / entry.name).symlink_to(entry.absolute())
        text = json.dumps(_merged(_read(source / self.file), self.settings), indent=2)
        changed = target / self.file
        changed.touch(mode=0o600)
        changed.write_text(text, "utf-8")

    def give_back(self, parent: Path, environment: Mapping[str, str]) -> bool:
        """Move what the agent made to its own folder. Return False if a file had to stay here."""
        source, ours = self.source(environment), parent / self.folder
        if not ours.is_dir():
            return True
        (ours / self.file).unlink(missing_ok=True)
        for entry in list(ours.iterdir()):
            if entry.is_symlink():
                entry.unlink()
        return not any(ours.iterdir()) or _moved(ours, source)


def _moved(entry: Path, target: Path) -> bool:
    """Move a file or a folder, into the folder that is there if there is one. See `give_back`."""
    try:
        if entry.is_symlink() or not entry.is_dir():
            _move_file(entry, target)
            return True
        mode = stat.S_IMODE(entry.stat().st_mode)
        target.mkdir(mode=mode, parents=True, exist_ok=True)
        moved = [_moved(child, target / child.name) for child in list(entry.iterdir())]
        return all(moved)
    except OSError:
        return False


def _move_file(entry: Path, target: Path) -> None:
    """Replace the target, unless it is newer: then another run of the agent wrote it."""
    target = target.resolve()  # a link of the user stays
    if target.is_dir():
        raise IsADirectoryError(target)
    if target.exists() and target.stat().st_mtime_ns > entry.lstat().st_mtime_ns:
        entry.unlink()
        return
    part = target.with_name(f".{target.name}.rekindle-{os.getpid()}")
    shutil.move(entry, part)  # perhaps to another disk: not in one step
    part.replace(target)


def _read(path: Path) -> Mapping[str, Any]:
    """Return the settings, or nothing if the file is not plain JSON."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _merged(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(theirs)
    for name, value in ours.items():
        before = merged.get(name)
        if isinstance(before, dict) and isinstance(value, Mapping):
            merged[name] = _merged(before, value)
        else:
            merged[name] = value
    return merged
