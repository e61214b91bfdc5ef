"""The variables and files of an agent."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from rekindle.launch.overlay import FolderOverlay
from rekindle.launch.plan import LaunchPlan
from rekindle.launch.run import environment_of, files_for, run_folder, write_files

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


def overlaid(folder: Path) -> tuple[LaunchPlan, Mapping[str, str], Path]:
    """Return a plan, variables, and the folder of the agent, which is not there."""
    overlay = FolderOverlay(variable="HOME_OF", folder=".agent", file="s.json", settings={"a": 1})
    home = folder / "home"
    return LaunchPlan(overlay=overlay), {"HOME_OF": str(home)}, home / ".agent"


def test_what_an_agent_makes_or_replaces_in_its_folder_is_the_users_afterwards(
    tmp_path: Path,
) -> None:
    plan, variables, theirs = overlaid(tmp_path)
    (theirs / "cache").mkdir(parents=True)
    for name, text in {"s.json": "{}", "login": "old", "memory": "same", "cache/a": "a"}.items():
        (theirs / name).write_text(text)
    (tmp_path / "dotfiles").write_text("old")
    (theirs / "linked").symlink_to(tmp_path / "dotfiles")
    with files_for(plan, tmp_path / "run", variables) as kept:
        ours = tmp_path / "run/.agent"
        (ours / "tmp/sessions").mkdir(parents=True)
        (ours / "tmp/sessions/1.json").write_text("first")
        (ours / "tmp/link").symlink_to("sessions")
        for name in ("login", "linked"):  # as programs do that never leave half a file
            (ours / "part").write_text("new")
            (ours / "part").chmod(0o600)
            (ours / "part").replace(ours / name)
        (ours / "cache").unlink()
        (ours / "cache").mkdir()
        (ours / "cache/b").write_text("b")
        (theirs / "tmp").mkdir()  # by another run at the same time
        (theirs / "tmp/other").write_text("other")
    assert kept == []
    assert (theirs / "tmp/sessions/1.json").read_text() == "first"
    assert (theirs / "tmp/link").readlink() == Path("sessions")
    assert (theirs / "tmp/other").read_text() == "other"
    assert (theirs / "login").read_text() == "new"
    assert (theirs / "login").stat().st_mode & 0o777 == 0o600
    assert (theirs / "linked").is_symlink()
    assert (tmp_path / "dotfiles").read_text() == "new"
    assert {path.name for path in (theirs / "cache").iterdir()} == {"a", "b"}
    assert (theirs / "s.json").read_text() == "{}"
    names = {"s.json", "login", "memory", "cache", "linked", "tmp"}
    assert {path.name for path in theirs.iterdir()} == names


def test_the_first_run_makes_the_folder_of_the_agent(tmp_path: Path) -> None:
    plan, variables, theirs = overlaid(tmp_path)
    with files_for(plan, tmp_path / "run", variables):
        (tmp_path / "run/.agent/memory").write_text("new")
    assert {path.name for path in theirs.iterdir()} == {"memory"}


def test_a_file_that_somebody_else_wrote_later_stays(tmp_path: Path) -> None:
    plan, variables, theirs = overlaid(tmp_path)
    theirs.mkdir(parents=True)
    with files_for(plan, tmp_path / "run", variables):
        for folder, seconds in ((theirs, 2000), (tmp_path / "run/.agent", 1000)):
            (folder / "projects").write_text(str(seconds))
            os.utime(folder / "projects", (seconds, seconds))
    assert (theirs / "projects").read_text() == "2000"


def test_a_file_that_cannot_be_moved_to_the_user_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plan, variables, theirs = overlaid(tmp_path)
    theirs.mkdir(parents=True)
    with run_folder() as run, files_for(plan, run / "agent", variables) as kept:
        ours = run / "agent/.agent"
        (ours / "memory").write_text("new")
        (ours / "clash").write_text("a file")
        (theirs / "clash").mkdir()
    assert not run.exists()
    assert (theirs / "memory").read_text() == "new"
    [folder] = kept
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()} == {
        "clash": "a file"
    }


def test_a_run_folder_that_cannot_be_removed_does_not_hide_how_the_agent_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as run:
        run.rmdir()  # so that removing it fails


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
