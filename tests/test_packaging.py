"""The wheel: it carries every file the program reads, and serves from a clean environment."""

import subprocess
import sys
import zipfile
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest

import rekindle
from tests.support.server_process import launch, serve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_carries_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert files - packed == set()


def test_the_wheel_has_the_version_that_the_program_tells(wheel: Path) -> None:
    assert wheel.name.split("-")[1] == rekindle.__version__


@pytest.mark.long
@pytest.mark.timeout(600)  # it installs what a user would, from the network
def test_a_clean_environment_with_the_wheel_serves(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    llama = repacked("llama_cpp_python", tmp_path)
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(llama), f"{wheel}[embedded]"], check=True, cwd=tmp_path)
    start = partial(launch, python=python, cwd=tmp_path)
    with serve(start=start) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        message = {"role": "user", "content": "Name three colours."}
        asked = {"messages": [message], "max_tokens": 32}
        reply = client.post("/v1/chat/completions", json=asked)
        assert reply.json()["choices"][0]["message"]["content"]
        assert "<title>" in client.get("/").text
        for name in ("app.js", "style.css", "chat/chat.js"):
            assert client.get(f"/dashboard/{name}").status_code == 200
    code = (
        "from rekindle.bench.workloads.recorded import RECORDED, read_traffic;"
        "from rekindle.bench.workloads.workloads import TEMPLATES;"
        "print(len(read_traffic([RECORDED]).requests), *TEMPLATES.glob('*.jinja'))"
    )
    shown = subprocess.run([python, "-c", code], check=True, capture_output=True, cwd=tmp_path)
    n_requests, *templates = shown.stdout.decode().split()
    assert int(n_requests) > 0
    assert templates
    assert all(template.startswith(str(tmp_path)) for template in templates)


def repacked(name: str, folder: Path) -> Path:
    """The wheel that an installed package came from: building it again would take minutes."""
    package = distribution(name)
    tag = (package.read_text("WHEEL") or "").split("Tag: ")[1].split()[0]
    path = folder / f"{name}-{package.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in package.files or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))
    return path
