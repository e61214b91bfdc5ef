"""The pages of the site: what scripts/site.py hands to MkDocs."""

import re
from pathlib import Path

from scripts.site import ROOT, pages, stage


def test_every_file_that_a_page_links_to_is_on_the_site(tmp_path: Path) -> None:
    stage(tmp_path)
    for page in pages():
        text = (tmp_path / page).read_text("utf-8")
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", text):
            assert ((tmp_path / page).parent / target).exists(), f"{page}: {target}"


def test_fences_have_a_language_and_nothing_else(tmp_path: Path) -> None:
    stage(tmp_path)
    for page in pages():
        assert not re.search(r"^```\w+ ", (tmp_path / page).read_text("utf-8"), re.MULTILINE)


def test_every_page_of_the_navigation_exists_and_every_guide_is_in_it() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    named = set(re.findall(r"[\w/.-]+\.md", navigation))
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    guides = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/guides").glob("*.md")}
    assert guides <= named
