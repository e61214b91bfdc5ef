"""Runs an agent with its plan, and ends as the agent ended."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from rekindle.launch.plan import LaunchPlan
from rekindle.local_hosts import LOOPBACK, without_proxy

_FOLDER = "rekindle-launch-"
# A terminal sends these to the agent as well: the agent decides what they mean.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a new folder for one run, and remove it afterwards.

    Its name is the first free one: some agents put it into their prompts, and prompts of the next
    run should be the same.
    """
    for number in itertools.count(1):
        path = Path(tempfile.gettempdir()) / f"{_FOLDER}{os.getuid()}-{number}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        try:
            yield path
        finally:
            shutil.rmtree(path)
        return


def environment_of(plan: LaunchPlan, url: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the agent: those of this shell, with the changes of the plan."""
    variables = {name: value for name, value in current.items() if name not in plan.removed}
    variables |= plan.environment
    for name, path in plan.prepended.items():
        variables[name] = os.pathsep.join(filter(None, (path, variables.get(name))))
    return without_proxy(variables) if urlsplit(url).hostname in LOOPBACK else variables


def write_files(plan: LaunchPlan, folder: Path, current: Mapping[str, str]) -> None:
    """Write the files of the plan. They may have a key: nobody else may read them."""
    if plan.overlay is not None:
        plan.overlay.write(folder, current)
    for name, text in plan.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, "utf-8")


def run_agent(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent in the foreground. Return its exit code; negative: the signal that ended it."""
    with subprocess.Popen(command, env=dict(environment)) as process, _signals_for(process):
        return process.wait()


@contextmanager
def _signals_for(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Survive the signals that the agent handles, and pass on those that only we receive."""

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, _ignore) for number in _FROM_TERMINAL}
    before |= {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Not SIG_IGN, which programs that we start would inherit."""


def end_like(code: int) -> int:
    """Return the exit code; if a signal ended the agent, end this process by the same one."""
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
