"""Runs an agent with its plan, and ends as the agent ended."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from rekindle.launch.plan import LaunchPlan
from rekindle.local_hosts import LOOPBACK, without_proxy

_FOLDER = "rekindle-launch-"
_KEPT = "rekindle-kept-"
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
            # A process that the agent left behind may still write here.
            shutil.rmtree(path, ignore_errors=True)
        return


def environment_of(plan: LaunchPlan, url: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the agent: those of this shell, with the changes of the plan."""
    variables = {name: value for name, value in current.items() if name not in plan.removed}
    variables |= plan.environment
    for name, path in plan.prepended.items():
        variables[name] = os.pathsep.join(filter(None, (path, variables.get(name))))
    return without_proxy(variables) if urlsplit(url).hostname in LOOPBACK else variables


@contextmanager
def files_for(
    plan: LaunchPlan, folder: Path, current: Mapping[str, str]
) -> Iterator[Sequence[Path]]:
    """Write the files of the plan; afterwards, move what the agent made to its own folder.

    Yields a list. Afterwards it has the folder of the files that could not be moved, if any.
    """
    write_files(plan, folder, current)
    kept: list[Path] = []
    try:
        yield kept
    finally:
        with _handled_by(dict.fromkeys((*_FROM_TERMINAL, *_FORWARDED), _ignore)):
            if plan.overlay is not None and not plan.overlay.give_back(folder, current):
                kept.append(Path(tempfile.mkdtemp(prefix=_KEPT)))
                shutil.move(folder / plan.overlay.folder, kept[0])


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
    with subprocess.Popen(command, env=dict(environment)) as process:

        def forward(number: int, _frame: FrameType | None) -> None:
            process.send_signal(number)

        handlers = dict.fromkeys(_FROM_TERMINAL, _ignore) | dict.fromkeys(_FORWARDED, forward)
        with _handled_by(handlers):
            return process.wait()


@contextmanager
def _handled_by(
    handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]],
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
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
