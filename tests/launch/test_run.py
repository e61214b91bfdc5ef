"""The variables and files of an agent."""

import json
import tempfile
from pathlib import Path

import pytest

from rekindle.launch.overlay import FolderOverlay
from rekindle.launch.plan import LaunchPlan
from rekindle.launch.run import environment_of, run_folder, write_files

LOCAL = "http://127.0.0.1:8080"


def test_variables_are_set_removed_and_prepended() -> None:
    plan = LaunchPlan(environment={"A": "new"}, removed=("B",), prepended={"P": "/ours", "Q": "/q"})
    found = environment_of(plan, LOCAL, {"A": "old", "B": "x", "C": "kept", "P": "/theirs"})
    assert {name: found.get(name) for name in "ABCPQ"} == {
        "A": "new",
        "B": None,
        "C": "kept",
        "P": "/ours:/theirs",
        "Q": "/q",
    }


def test_no_proxy_stands_between_an_agent_and_a_server_on_this_machine() -> None:
    found = environment_of(LaunchPlan(), LOCAL, {"NO_PROXY": "intern.example"})
    assert found["NO_PROXY"] == "intern.example,127.0.0.1,localhost,::1"
    assert found["no_proxy"] == "127.0.0.1,localhost,::1"
    assert environment_of(LaunchPlan(), "http://server.example:80", {}) == {}


def test_files_can_be_read_by_nobody_else(tmp_path: Path) -> None:
    write_files(LaunchPlan(files={"a/b.json": "{}", "c": "x"}), tmp_path, {})
    assert (tmp_path / "a/b.json").read_text() == "{}"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()} == {
        0o600
    }


def test_an_overlay_has_the_agents_entries_and_changed_settings(tmp_path: Path) -> None:
    theirs = tmp_path / "home/.agent"
    (theirs / "sessions").mkdir(parents=True)
    before = {"auth": {"kind": "account", "hint": 1}, "theme": "dark"}
    (theirs / "settings.json").write_text(json.dumps(before))
    overlay = FolderOverlay(
        variable="AGENT_HOME",
        folder=".agent",
        file="settings.json",
        settings={"auth": {"kind": "key"}},
    )
    write_files(
        LaunchPlan(overlay=overlay), tmp_path / "run", {"AGENT_HOME": str(tmp_path / "home")}
    )
    ours = tmp_path / "run/.agent"
    (ours / "sessions/new").write_text("kept")
    assert (theirs / "sessions/new").read_text() == "kept"
    changed = json.loads((ours / "settings.json").read_text())
    assert changed == {"auth": {"kind": "key", "hint": 1}, "theme": "dark"}
    assert json.loads((theirs / "settings.json").read_text()) == before


def test_an_overlay_of_a_folder_that_does_not_exist_has_our_settings(tmp_path: Path) -> None:
    overlay = FolderOverlay(variable="X", folder=".agent", file="s.json", settings={"a": 1})
    write_files(LaunchPlan(overlay=overlay), tmp_path / "run", {"X": str(tmp_path / "none")})
    assert json.loads((tmp_path / "run/.agent/s.json").read_text()) == {"a": 1}


def test_the_next_run_has_the_same_folder_and_one_at_the_same_time_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as first, run_folder() as second:
        (first / "file").touch()
        assert first != second
        assert first.stat().st_mode & 0o777 == 0o700
    with run_folder() as third:
        assert third == first
        assert list(third.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
