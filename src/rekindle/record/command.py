"""Run a shell command that uses the proxy, and end all its processes with it."""

import asyncio
import os
import signal
import time

from rekindle.local_hosts import without_proxy
from rekindle.record.signals import ENDING, first_signal

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
NO_KEY = "none"
END_SECONDS = 5.0  # for processes that a signal ends, before they are killed; picked
POLL_SECONDS = 0.02
SIGNAL_EXIT = 128  # plus the number of the signal: the exit code, as a shell has it


def environment_for(url: str) -> dict[str, str]:
    """Return this process's variables, with those that name a server to SDKs and agents.

    SDKs refuse to start without a key: a placeholder is given where there is none.
    """
    openai = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1")
    others = dict.fromkeys(
        (
            *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL"),
            *("GEMINI_API_BASE", "OLLAMA_HOST", "OLLAMA_API_BASE"),
        ),
        url,
    )
    return without_proxy({**dict.fromkeys(KEYS, NO_KEY), **os.environ, **openai, **others})


async def run_command(command: str, environment: dict[str, str], output: int | None) -> int:
    """Return the exit code of the command. A signal ends the command, and raises SystemExit.

    The command has a session of its own, so that one signal reaches every process of it.
    """
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by `nohup`
    signalled = first_signal(ENDING if is_hangup_ignored else (*ENDING, signal.SIGHUP))
    process = await asyncio.create_subprocess_shell(
        command, env=environment, stdout=output, start_new_session=True
    )
    ended = asyncio.ensure_future(process.wait())
    number = signal.SIGTERM
    try:
        await asyncio.wait((ended, signalled), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            number = signalled.result()
            raise SystemExit(SIGNAL_EXIT + number)
        return ended.result()
    finally:
        await _end_group(process.pid, number)
        await ended


async def _end_group(leader: int, number: signal.Signals) -> None:
    """Send the signal to all processes of the group, and kill those that stay."""
    deadline = time.monotonic() + END_SECONDS
    try:
        os.killpg(leader, number)
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            os.killpg(leader, 0)  # raises if no process is left
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
