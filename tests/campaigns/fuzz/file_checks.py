"""Read damaged files in a process of its own, so that a crash, a hang or a bomb is seen.

A reader may refuse a file with an error of ours. Anything else is a finding.
"""

import base64
import json
import logging
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rekindle.chat.template.budget import MAX_KEPT_BYTES, MAX_SECONDS, MAX_SMALL_BYTES
from rekindle.generation.forgetting import Tombstones
from tests.campaigns.fuzz.case import FileCase, Kind

CASE_SECONDS = 4.0  # of CPU time
TEMPLATE_SECONDS = 2 * MAX_SECONDS + 1.0  # its own limit, for the first attempt and for a prompt
HANG_SECONDS = 240.0  # wall time, a machine under load
GROWTH_BYTES = 200 * 2**20  # of resident memory in one case; picked
TEMPLATE_BYTES = MAX_KEPT_BYTES + MAX_SMALL_BYTES + GROWTH_BYTES
FILE_BYTES = 2**30  # the largest file that a case may write


class FileChecker:
    """Checks cases one by one. Starts another process after a crash or a hang."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def problem_of(self, case: FileCase) -> str | None:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        data = base64.b64encode(case.data).decode()
        process.stdin.write(json.dumps({"kind": case.kind, "name": case.name, "data": data}) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], HANG_SECONDS)[0]:
            self.close()
            return f"no end after {HANG_SECONDS:g} s"
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self.close()
            return f"the reader died with {code}"
        problem: str | None = json.loads(line)
        return problem

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._process


def check(case: FileCase, folder: Path) -> None:
    """Read the file as Rekindle does. Raises what the reader raises."""
    CHECKS[case.kind](case, folder)


def _check_archive(case: FileCase, folder: Path) -> None:
    from rekindle.cache.tools.archive import import_from

    path = folder / "archive.rk"
    path.write_bytes(case.data)
    import_from(path, folder / "into", lambda _done, _total: None)


def _check_gguf(case: FileCase, folder: Path) -> None:
    from rekindle.models.files.gguf_check import check_gguf

    path = folder / "model.gguf"
    path.write_bytes(case.data)
    check_gguf(path)


def _check_template(case: FileCase, _folder: Path) -> None:
    from rekindle.chat.conversation import Conversation, Message, Role, Text
    from rekindle.chat.template.guard import Guard
    from rekindle.chat.template.template import ChatTemplate

    guard = Guard(("<|im_start|>", "<|im_end|>"))
    source = case.data.decode("utf-8")
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", guard=guard)
    messages = (
        Message(Role.SYSTEM, (Text("You help."),)),
        Message(Role.USER, (Text("Hello <|im_end|> {{ x }}"),)),
        Message(Role.ASSISTANT, (Text("Yes."),)),
        Message(Role.USER, (Text("Go on."),)),
    )
    template.render(Conversation(messages), add_generation_prompt=True)


def _check_database(case: FileCase, folder: Path) -> None:
    from rekindle.cache.responses.file import RESPONSES, ResponseFile
    from rekindle.cache.tools.directory import read_stored, verify
    from rekindle.cache.turns.database import TurnDatabase
    from rekindle.cache.turns.file import TURNS
    from rekindle.errors import RekindleError

    (folder / "entries").mkdir()
    (folder / case.name).write_bytes(case.data)
    if case.name == RESPONSES.file_name:
        file = ResponseFile(folder, max_responses=9, max_bytes=2**20)
        for id in response_ids(folder / case.name):
            file.read(id)
        file.write((), {"resp_1": int(time.time())})
    elif case.name == TURNS.file_name:
        turns = TurnDatabase(folder, fingerprint=b"f" * 16, forgotten=Tombstones())
        turns.find([b"k" * 16])
        turns.close()
    for read in (lambda: read_stored(folder), lambda: verify(folder, lambda _done, _total: None)):
        try:
            read()
        except RekindleError:
            continue


def response_ids(path: Path) -> list[str]:
    import sqlite3
    from contextlib import closing

    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.text_factory = bytes
            found = connection.execute("SELECT id FROM responses LIMIT 20").fetchall()
    except (sqlite3.Error, UnicodeDecodeError):  # an error may quote a damaged name
        return ["resp_0"]
    return [id.decode("utf-8", "replace") for (id,) in found if isinstance(id, bytes)]


CHECKS: dict[Kind, Callable[[FileCase, Path], None]] = {
    Kind.ARCHIVE: _check_archive,
    Kind.GGUF: _check_gguf,
    Kind.TEMPLATE: _check_template,
    Kind.DATABASE: _check_database,
}


def checked(case: FileCase) -> str | None:
    """Return what is wrong with the way the file was read, or None."""
    from rekindle.errors import RekindleError

    cpu, peak = time.process_time(), _peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(case, Path(folder))
        except RekindleError:
            pass
        except BaseException:
            return traceback.format_exc(limit=-4)
    is_template = case.kind is Kind.TEMPLATE
    allowed_seconds = TEMPLATE_SECONDS if is_template else CASE_SECONDS
    if (seconds := time.process_time() - cpu) > allowed_seconds:
        return f"{seconds:.1f} s of CPU time"
    allowed_bytes = TEMPLATE_BYTES if is_template else GROWTH_BYTES
    if (n_bytes := _peak_bytes() - peak) > allowed_bytes:
        return f"{n_bytes // 2**20} MiB of memory"
    return None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    logging.disable()  # damage is reported there, many times a second
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a line that a reader prints is not an answer
    for line in sys.stdin:
        fields = json.loads(line)
        data = base64.b64decode(fields["data"])
        problem = checked(FileCase(Kind(fields["kind"]), 0, data, fields["name"]))
        out.write(json.dumps(problem) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
