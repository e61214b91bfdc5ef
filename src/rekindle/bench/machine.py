"""Names for the machine and the commit of a run, and whether the machine is busy."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

IDLE_LOAD = 0.5  # picked


def machine_label() -> str:
    """Return the processor and its number of cores. The host's own name is left out."""
    name = platform.machine()
    if shutil.which("lscpu"):
        listing = _output("lscpu")
        if found := re.search(r"^Model name:\s*(.+)$", listing, re.MULTILINE):
            name = found[1]
    elif platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or name
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{slug}-{os.cpu_count()}-cores"


def commit_label() -> str:
    """Return the commit of the checkout that this program runs from; empty if it is installed."""
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return ""
    commit = _output("git", "-C", str(source), "rev-parse", "--short", "--verify", "HEAD")
    is_modified = bool(_output("git", "-C", str(source), "status", "--porcelain"))
    return f"{commit}-modified" if commit and is_modified else commit


def load_warning() -> str | None:
    """Return a warning if other work runs on this machine."""
    load = os.getloadavg()[0]
    if load <= IDLE_LOAD:
        return None
    return f"The load average is {load:.1f}: other work will distort the results."


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
