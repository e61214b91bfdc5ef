"""The documents say what the code does: settings, metrics, log fields, files, layers, links."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rekindle.chat.dialects import NAMES
from rekindle.chat.prompt.prompt import Prompt
from rekindle.cli import app
from rekindle.config import CONFIG_VARIABLE, SECTIONS, Setting, all_settings
from rekindle.config_sources import resolve
from rekindle.generation.events import CacheSource
from rekindle.generation.status import CacheCounters, CacheStatus, EngineStatus, TierStatus
from rekindle.observe.telemetry import Telemetry
from tests.chat.test_responder import ByteTokenizer, script
from tests.support.chat import reply_stream
from tests.test_architecture import LEAVES, MAY_IMPORT

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rekindle"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]

Row = list[str]
VLLM_FLAGS = {"--enable-prompt-tokens-details", "--enable-scale-out"}


def rows(document: str, heading: str) -> list[Row]:
    """The cells of the tables under a heading, without their head lines."""
    _, found, after = document.partition(f"\n{heading}\n")
    assert found, f"there is no {heading}"
    section = re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^\| (`.+) \|$", section, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def default_of(setting: Setting, cell: str) -> object:
    """What the server would make of the documented default if someone wrote it as a flag."""
    if cell == "-":
        return () if setting.type == tuple[str, ...] else None
    section = getattr(resolve({setting.name: cell}, {}, {}).settings, setting.section)
    value: object = getattr(section, setting.name)
    return value


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_documented_with_flag_variable_and_default(section: str) -> None:
    settings = [setting for setting in all_settings() if setting.section == section]
    documented = {row[0]: row[1:] for row in rows(OPERATIONS, f"### `[{section}]`")}
    assert list(documented) == [f"`{setting.name}`" for setting in settings]
    for setting in settings:
        flags, variable, default, meaning = documented[f"`{setting.name}`"]
        assert quoted(flags) == [setting.flag, *setting.about.more_flags]
        assert quoted(variable) == [setting.variable]
        assert default_of(setting, *quoted(default)) == setting.default, setting.name
        assert meaning
        assert setting.about.off_flag in (None, *quoted(meaning))


def test_no_section_of_settings_is_left_out() -> None:
    documented = set(re.findall(r"^### `\[(\w+)\]`$", OPERATIONS, re.MULTILINE))
    assert documented == {setting.section for setting in all_settings()}


def test_every_flag_that_is_named_exists() -> None:
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()  # of a group
    parameters = [parameter for command in commands for parameter in command.params]
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", OPERATIONS))
    assert named - known == VLLM_FLAGS


def test_every_variable_that_is_named_exists() -> None:
    named = set(re.findall(r"\bREKINDLE_[A-Z_]+", OPERATIONS))
    assert named == {setting.variable for setting in all_settings()} | {CONFIG_VARIABLE}


def test_every_metric_is_documented_with_type_and_labels() -> None:
    telemetry = Telemetry()
    tiers = tuple(
        TierStatus(name=name, n_entries=0, n_bytes=0, budget_bytes=1)
        for name in (CacheSource.DISK, CacheSource.SHARED)
    )
    cache = CacheStatus(
        model_class="dense", off_because=None, tiers=tiers, counters=CacheCounters()
    )
    telemetry.watch(lambda: EngineStatus(1, 0, 0, 1, 1, 1, 0, cache))
    # Metrics with labels have no sample, and so show no label, until something is counted.
    telemetry.watch_trace(lambda: (0, 0))
    telemetry.request_began()
    telemetry.request_ended(route="/health", status=200)
    telemetry.count_ignored_field("unknown")
    text = telemetry.render().decode()
    types = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    served = {
        name: [kind, *re.findall(r"(\w+)=", _labels(text, name))]
        for name, kind in types.items()
        if not name.endswith("_created")
    }
    documented = {
        quoted(name)[0]: [kind, *quoted(labels)]
        for name, kind, labels, _ in rows(OPERATIONS, "## Health and metrics")
    }
    assert documented == served


def _labels(text: str, name: str) -> str:
    sample = re.search(rf"^{name}(?:_count)?(\{{.*\}})? ", text, re.MULTILINE)
    assert sample, f"{name} has no sample"
    return sample[1] or ""


def test_every_metric_that_is_named_anywhere_is_in_the_table() -> None:
    table = {quoted(row[0])[0] for row in rows(OPERATIONS, "## Health and metrics")}
    for path in DOCUMENTS:
        named = set(re.findall(r"`(rekindle_\w+)`", path.read_text("utf-8")))
        assert named <= table, path.name


def test_every_field_of_the_log_line_is_documented_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle.request"):
        reply_stream(Prompt((1,), (), ""), script(""), ByteTokenizer()).close()
    logged = re.findall(r"(\w+)=", caplog.messages[-1])
    assert [quoted(row[0])[0] for row in rows(OPERATIONS, "## The log")] == logged
    [example] = re.findall(r"INFO (request=.+)", OPERATIONS)
    assert re.findall(r"(\w+)=", example) == logged


def test_the_source_tree_names_every_file_with_what_it_is_for() -> None:
    drawn = dict(_tree(ARCHITECTURE))
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    unnamed = {name for name in files if not name.endswith(("__init__.py", "__main__.py"))}
    assert unnamed - drawn.keys() == set()
    assert drawn.keys() - files == set()
    assert [name for name, purpose in drawn.items() if not purpose] == []


def _tree(document: str) -> Iterator[tuple[str, str]]:
    """The files in the drawing of the tree; a folder's line ends its name in a slash."""
    drawing = re.search(r"^src/rekindle/\n((?:  .+\n)+)", document, re.MULTILINE)
    assert drawing
    folders: list[str] = []
    for line in drawing[1].splitlines():
        name, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
        else:
            yield "".join(folders) + name, purpose.strip()


def test_files_named_elsewhere_in_the_architecture_exist() -> None:
    places = (SOURCE, ROOT)
    named = re.findall(r"(?:^ ?\d+ |`)([\w/]+\.py)\b", ARCHITECTURE, re.MULTILINE)
    assert len(named) > 20, "the trace of a request is not read"
    assert [name for name in named if not any((each / name).is_file() for each in places)] == []


def test_the_import_rule_is_the_one_that_is_tested() -> None:
    documented = {}
    for unit, imported in rows(ARCHITECTURE, "## The import rule"):
        leaves = LEAVES if "leaves" in imported else set()
        documented[quoted(unit)[0]] = leaves | set(quoted(imported))
    assert documented == {unit: MAY_IMPORT[unit] for unit in MAY_IMPORT.keys() - {"__main__"}}


def test_every_make_command_that_is_named_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"serve", "test", "check", "bench"} <= targets
    for path in DOCUMENTS:
        # At the start of a piece of code, or behind a variable: prose makes things too.
        code = r"(?:^|`|\" )make ([a-z-]+)"
        named = {
            target
            for block in _code(path.read_text("utf-8"))
            for target in re.findall(code, block, re.MULTILINE)
        }
        assert named <= targets, path.name


def _code(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [*blocks, *re.findall(r"`[^`\n]+`", text)]


def test_internal_links_lead_to_files() -> None:
    links = [
        (path, target)
        for path in DOCUMENTS
        for target in re.findall(r"\[[^\]]+\]\(([^)\s]+)\)", path.read_text("utf-8"))
        if not re.match(r"[a-z]+:", target)
    ]
    assert links, "no link was found at all"
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path, target in links
        if not (path.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


def test_every_tool_dialect_is_named_in_the_documentation() -> None:
    text = (ROOT / "docs" / "wire-apis.md").read_text("utf-8")
    section = text.split("### Dialects", 1)[1].split("\n#", 1)[0]
    assert set(quoted(section)) - {"--tool-dialect"} == set(NAMES)
