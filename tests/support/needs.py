"""Programs that tests run and pip cannot bring. Tests that lack one are skipped."""

import os
import shutil

import pytest

DEBIAN_PACKAGES = {
    "chromium": "chromium",
    "curl": "curl",
    "haproxy": "haproxy",
    "prlimit": "util-linux",
    "redis-server": "redis-server",
    "setpriv": "util-linux",
    "systemd-analyze": "systemd",
}
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # not on every user's PATH


def program(name: str, *other_names: str) -> str:
    """The path of the first that is installed, or the test is skipped."""
    folders = os.pathsep.join((os.environ["PATH"], *SYSTEM_FOLDERS))
    for each in (name, *other_names):
        if path := shutil.which(each, path=folders):
            return path
    pytest.skip(f"{name} is missing (Debian: apt-get install {DEBIAN_PACKAGES[name]})")
