"""`python -m rekindle.bench.timeline.serve FOLDER serve MODEL ...`: `rekindle` with probes.

The server and its engine processes write the times of their stages into FOLDER.
"""

import os
import runpy
import sys
from pathlib import Path

from rekindle.observe.timeline import FOLDER_VARIABLE, SERVER_PROBES, install

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(folder)
    install(folder, "server", SERVER_PROBES)
    runpy.run_module("rekindle", run_name="__main__", alter_sys=True)
