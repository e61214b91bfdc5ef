"""Models for the tests: tiny random ones per llama.cpp memory class, and the embedded one."""

import os
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

from rekindle.models.source import resolve_model
from tests.support.tiny_models import TinyArchitecture, write_tiny_model

# The same examples in every run, however slow the machine. HYPOTHESIS_SEARCH=1 looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None)
settings.load_profile("search" if "HYPOTHESIS_SEARCH" in os.environ else "repeatable")

# httpx waits 5 s for an answer, unless a call says otherwise. Every client shares this object.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 60.0)

MAX_WORKERS = 8  # each may have three servers; picked
LONG_SECONDS = 900  # a test marked long that takes more is hanging, also on a busy machine; picked
MAX_LEFT_THREADS = 30  # that a module may leave behind: they slow the tests after it; picked

TinyModels = Callable[[TinyArchitecture], Path]


@pytest.fixture(scope="module", autouse=True)
def threads_end() -> Iterator[None]:
    """Fail if the threads of a module's tests do not end with them."""
    n_before = threading.active_count()
    yield
    names = Counter(thread.name for thread in threading.enumerate())
    assert names.total() - n_before <= MAX_LEFT_THREADS, f"threads left: {names.most_common(10)}"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    folder = tmp_path_factory.mktemp("models")

    def get(architecture: TinyArchitecture) -> Path:
        path = folder / f"{architecture}.gguf"
        return path if path.exists() else write_tiny_model(path, architecture)

    return get


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    return resolve_model(None).path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--may-skip",
        metavar="REGEX",
        help="fail if anything was skipped for another reason than this (CI)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: not in `make test`, but in `make test-long`")
    # A shell's background jobs ignore SIGINT, and so would everything that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, since tests also wait. Their servers have one thread each."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(cores + 1, MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers first: they take longest, and short files at the end keep every core busy."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/server/"))
    for item in items:
        if "long" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))


def skip_reasons(config: pytest.Config) -> Counter[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def pytest_sessionfinish(session: pytest.Session) -> None:
    allowed: str | None = session.config.getoption("--may-skip")
    if allowed is not None and not session.exitstatus:
        is_fine = all(re.search(allowed, reason) for reason in skip_reasons(session.config))
        session.exitstatus = pytest.ExitCode.OK if is_fine else pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    allowed: str | None = config.getoption("--may-skip")
    for reason, n_tests in skip_reasons(config).most_common():
        is_fine = allowed is None or re.search(allowed, reason)
        terminalreporter.write_line(
            f"skipped {n_tests}: {reason}{'' if is_fine else ' (not allowed here)'}"
        )


def pytest_unconfigure() -> None:
    """The binding leaves these open to the very end, where a strict run complains of them."""
    from llama_cpp import _utils

    _utils.outnull_file.close()
    _utils.errnull_file.close()
