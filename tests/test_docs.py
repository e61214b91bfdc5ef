"""The documents say what the code does: settings, metrics, log fields, files, layers, links."""

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rekindle.chat.dialects.choice import NAMES
from rekindle.chat.prompt.prompt import Prompt
from rekindle.cli import app
from rekindle.config.settings import CONFIG_VARIABLE, SECTIONS, Setting, all_settings
from rekindle.config.sources import resolve
from rekindle.generation.events import CacheSource
from rekindle.generation.status import (
    CacheCounters,
    CacheStatus,
    EngineStatus,
    Stalls,
    TierStatus,
)
from rekindle.observe.telemetry import Telemetry
from rekindle.priming.files import parse_prime_file
from tests.chat.test_responder import ByteTokenizer, script
from tests.support.chat import reply_stream
from tests.test_architecture import BASE, MAY_IMPORT

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rekindle"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
READMES = sorted(SOURCE.rglob("README.md"))
PROMISES = (ROOT / "docs" / "promises.md").read_text("utf-8")
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]

MAX_ARCHITECTURE_WORDS = 1_500  # tables and code included
MIN_PROMISES = 62
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
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
        assert quoted(flags) == list(setting.flags)
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
    telemetry.watch_event_loop(Stalls())
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


def test_every_code_of_an_error_is_in_the_table_of_troubles() -> None:
    codes = {code for path in (SOURCE / "api").rglob("*.py") for code in _codes_in(path)}
    assert len(codes) > 20
    table = OPERATIONS.partition("\n## Troubleshooting\n")[2].partition("\n## ")[0]
    told = {name for line in re.findall(r"^\| .*", table, re.MULTILINE) for name in quoted(line)}
    missing = codes - told
    assert not missing


def _codes_in(path: Path) -> Iterator[str]:
    """The codes of `failure(status, message, code)`, and of tables of messages and codes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="failure"), args=[_, _, ast.Constant(value=str(code))]):
                yield code
            case ast.Tuple(elts=[ast.JoinedStr(), ast.Constant(value=str(code))]):
                yield code


def test_every_module_has_one_purpose_in_a_readme_at_or_above_it() -> None:
    listed = [row for readme in READMES for row in _files(readme)]
    modules = {path for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__")}
    names = [path for path, _ in listed]
    assert _relative(modules - set(names)) == [], "no README lists them"
    assert _relative(set(names) - modules) == [], "a README lists them, but they do not exist"
    assert _relative({path for path in names if names.count(path) > 1}) == []
    assert _relative({path for path, purpose in listed if not purpose}) == []


def _files(readme: Path) -> Iterator[tuple[Path, str]]:
    """The rows of the tables of files in a README: a path below its folder, and its purpose."""
    tables = re.findall(
        r"^\| file \| purpose \|\n\|[-|]+\|\n((?:\|.*\n)+)", readme.read_text("utf-8"), re.MULTILINE
    )
    for line in "".join(tables).splitlines():
        name, purpose = (cell.strip() for cell in line.strip("|").split("|"))
        yield readme.parent / name.strip("`"), purpose


def _relative(paths: set[Path]) -> list[str]:
    return sorted(path.relative_to(SOURCE).as_posix() for path in paths)


def test_a_readme_lists_its_own_folder_and_at_most_one_level_below() -> None:
    for readme in READMES:
        deep = {path for path, _ in _files(readme) if path.parent.parent not in _near(readme)}
        assert _relative(deep) == [], readme


def _near(readme: Path) -> tuple[Path, Path]:
    return readme.parent, readme.parent.parent


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_files_named_in_a_readme_of_the_source_exist(readme: Path) -> None:
    named = re.findall(r"`([\w/]+\.py)`", readme.read_text("utf-8"))
    places = (readme.parent, *readme.parent.glob("*/"), SOURCE, ROOT)
    assert [name for name in named if not any((each / name).is_file() for each in places)] == []


def test_the_architecture_can_be_read_in_ten_minutes() -> None:
    assert len(ARCHITECTURE.split()) <= MAX_ARCHITECTURE_WORDS


def test_files_named_in_the_architecture_exist() -> None:
    places = (SOURCE, ROOT)
    named = re.findall(r"(?:^ ?\d+ +|`)([\w/]+\.py)\b", ARCHITECTURE, re.MULTILINE)
    assert len(named) > 20, "the trace of a request is not read"
    assert [name for name in named if not any((each / name).is_file() for each in places)] == []


def test_the_import_rule_is_the_one_that_is_tested() -> None:
    documented = {}
    for unit, imported in rows(ARCHITECTURE, "## The import rule"):
        base = BASE if "base" in imported else set()
        documented[quoted(unit)[0]] = base | set(quoted(imported))
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
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
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


def test_every_link_to_a_heading_leads_to_one() -> None:
    links = [
        (path, target)
        for path in DOCUMENTS
        for target in re.findall(r"\[[^\]]+\]\(([^)\s]*#[^)\s]+)\)", path.read_text("utf-8"))
        if not re.match(r"[a-z]+:", target)
    ]
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path, target in links
        if target.partition("#")[2] not in _anchors(_linked(path, target))
    ]
    assert broken == []


def _linked(path: Path, target: str) -> Path:
    file = target.partition("#")[0]
    return path.parent / file if file else path


def _anchors(path: Path) -> set[str]:
    """The names that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_promise_names_tests_that_exist() -> None:
    promises = re.findall(r"^- ((?:.+\n)(?:  .+\n)*)", PROMISES, re.MULTILINE)
    assert len(promises) >= MIN_PROMISES
    unproved = [promise for promise in promises if not TEST_NAME.search(promise)]
    assert unproved == []
    missing = [
        f"{file}::{name}"
        for file, name in TEST_NAME.findall(PROMISES)
        if not re.search(rf"def {name}\b", _text_of(ROOT / file))
    ]
    assert missing == []


def _text_of(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def test_the_example_of_a_file_to_prime_can_be_primed() -> None:
    [example] = re.findall(
        r"^```json\n(\{\n  \"system\".*?)^```", OPERATIONS, re.MULTILINE | re.DOTALL
    )
    [request] = parse_prime_file(Path("agent.json"), example.encode())
    assert request.body["tools"]


def test_every_tool_dialect_is_named_in_the_documentation() -> None:
    text = (ROOT / "docs" / "wire-apis.md").read_text("utf-8")
    section = text.split("### Dialects", 1)[1].split("\n#", 1)[0]
    assert set(NAMES) <= set(quoted(section))
