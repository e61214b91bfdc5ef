"""Who else can change a cache directory. Its files hold prompts, and state that llama.cpp loads."""

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def trouble_with(directory: Path) -> str | None:
    """Say in one sentence who else can write the directory, and how to mend it. None: nobody.

    Root can change every folder anyway. A parent counts too if anybody may rename what is in it.
    The group of a parent does not count: on many systems each user has a group of their own,
    which may write to the home.
    """
    own_uid = os.geteuid()
    for folder in (directory, directory / "entries", directory / "quarantine"):
        status = _status(folder)
        if status is None:
            continue
        if status.st_uid not in (own_uid, 0):
            return f"{folder} belongs to another user (uid {status.st_uid}). Choose another folder."
        if status.st_mode & _OTHERS:
            mode = stat.S_IMODE(status.st_mode)
            return f"Other users can write to {folder} (mode {mode:04o}). Run: chmod 700 {folder}"
    for parent in directory.absolute().parents:
        status = _status(parent)
        if status is None:
            continue
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"Other users can rename what is in {parent}. Run: chmod o-w {parent}"
        if status.st_uid not in (own_uid, 0):
            return f"{parent} belongs to another user (uid {status.st_uid}). Choose another folder."
    return None


def _status(folder: Path) -> os.stat_result | None:
    try:
        return folder.stat()
    except OSError:
        return None  # it will be created, or its use fails with a reason
