"""Paths and commands that README and docs name: the files exist, the keys are those of the schema."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("condensegrpo", "condensers", "rewards", "cli", "configs", "benchmarks", "docs", "tests")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`")
HISTORY = ROOT / "docs" / "explanation" / "architecture.md"  # its last section names former modules


def named(page: Path) -> set[str]:
    """The paths of the repository that a page names between backquotes."""
    return set(PATH.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert {path for path in named(page) if not list(ROOT.glob(path.rstrip("/")))} == set()


def test_the_table_of_where_to_change_what_has_a_path_in_every_row() -> None:
    page = ROOT / "docs" / "how-to" / "change-the-code.md"
    table = page.read_text(encoding="utf-8").split("## Where to change what", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    assert [row for row in rows if not PATH.search(row)] == []


def test_the_readme_is_short_and_leads_to_the_table_in_one_hop() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 120
    assert "](docs/how-to/change-the-code.md" in readme


def test_every_file_that_the_readme_links_exists() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", readme)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
