"""What README, docs and the files for contributors name: paths, keys, commands and hooks exist."""

import ast
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from condensegrpo.config.keys import keys
from condensegrpo.config.load import load_config
from condensegrpo.config.schema import RunConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("condensegrpo", "condensers", "rewards", "cli", "configs", "benchmarks", "docs", "notebooks", "tests")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`")
KEY = re.compile(rf"(?<![\w./])((?:{'|'.join(sorted(RunConfig.model_fields))})(?:\.\w+)+)(?=[=`: ])")
FREE = ("options", "variants", "handling", "template_options")  # mappings: any key below them
FILES = ("py", "md", "yaml", "json", "jsonl", "txt")  # train.jsonl is no key of the section train


def named(page: Path) -> set[str]:
    """The paths of the repository that a page names between backquotes."""
    return set(PATH.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert {path for path in named(page) if not list(ROOT.glob(path.rstrip("/")))} == set()


def test_the_table_of_where_to_change_what_has_a_path_in_every_row() -> None:
    page = ROOT / "docs" / "how-to" / "change-the-code.md"
    table = page.read_text(encoding="utf-8").split("## Where to change what", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "| open |" not in line]
    assert len(rows) >= 20
    assert [row for row in rows if not PATH.search(row)] == []


def test_the_readme_is_short_and_leads_to_the_table_in_one_hop() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 120
    assert "](docs/how-to/change-the-code.md" in readme


def test_the_page_of_the_protocols_has_every_interface_and_its_members() -> None:
    page = (ROOT / "docs/reference/protocols.md").read_text(encoding="utf-8")
    paths = [ROOT / "condensegrpo/core/condenser.py", *(ROOT / "condensegrpo/core/protocols").glob("*.py")]
    classes = [node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    own = {"MediaStore", "ExpandsPictures"}  # no plug-in implements them
    data = {"dataclass(frozen=True, slots=True, kw_only=True)"}
    interfaces = [
        node for node in classes if node.name not in own and not data & set(map(ast.unparse, node.decorator_list))
    ]
    assert len(interfaces) > 10
    assert [node.name for node in interfaces if f"`{node.name}`" not in page] == []
    members = [
        member.name
        for node in interfaces
        for member in node.body
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert [name for name in members if not re.search(rf"\b{name}\b", page)] == []


def test_the_page_of_all_keys_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert schema().filled(page, RunConfig) == page


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_outside_of_the_site_links_exists(name: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@cache
def schema() -> ModuleType:
    """The script that writes the pages of all keys."""
    spec = importlib.util.spec_from_file_location("configuration_page", ROOT / "docs" / "scripts" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_known(path: str) -> bool:
    """Whether a dotted path is a key of the schema, or below one that holds a mapping or a list."""
    parts = path.split(".")
    for end in range(len(parts), 1, -1):
        key = ".".join(parts[:end])
        if key in keys():
            return end == len(parts) or parts[end - 1] in FREE or parts[end].isdigit()
    return False


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_configuration_key_that_a_page_names_exists(page: Path) -> None:
    paths = set(KEY.findall(page.read_text(encoding="utf-8")))
    assert {path for path in paths if path.rpartition(".")[2] not in FILES and not is_known(path)} == set()


def test_the_check_of_keys_knows_keys_from_other_names() -> None:
    assert is_known("rollout.limits.max_turns")
    assert is_known("rollout.tools.use.0.options.corpus")
    assert not is_known("rollout.max_turns")
    assert not is_known("train.nothing")


def test_every_change_stands_under_a_version_and_a_kind_of_keep_a_changelog() -> None:
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    headings = re.findall(r"^(#{2,3}) (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == ("##", "[Unreleased]")
    versions = [text for level, text in headings if level == "##"]
    assert [text for text in versions[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - .+", text)] == []
    under = [[]]
    for level, text in headings[1:]:
        under[-1].append(text) if level == "###" else under.append([])
    assert all(under[1:])  # nothing has to be new since the last version
    assert all(found == sorted(found, key=kinds.index) for found in under)


def configuration(word: str) -> Path:
    """The file of a shipped configuration: ``quickstart``, ``configs/quickstart.yaml``, ``methods/mem1``."""
    return ROOT / "configs" / f"{word.removeprefix('configs/').removesuffix('.yaml')}.yaml"


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `condensegrpo train`, `plan` or `doctor` of a shipped configuration."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines:
        match = re.search(r"condensegrpo(?:\.cli)? (?:train|plan|doctor) (.*)", line.rstrip("&"))
        words = shlex.split(match[1], comments=True) if match and "…" not in line else []
        if words and configuration(words[0]).exists():
            found.append(words)
    return found


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.stem}-{place}" for place, (page, _) in enumerate(COMMANDS)]
)
def test_the_configuration_of_every_command_is_valid(page: Path, words: list[str]) -> None:
    given = [word for word in words[1:] if "=" in word and not word.startswith("--")]
    load_config(configuration(words[0]), given)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 40


def test_the_hooks_before_a_commit_run_what_make_runs_in_the_same_environment() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(BIN)", ".venv/bin")
    for entry in entries:
        tool, command = entry.split()[:2]
        assert re.search(rf"^\t{re.escape(tool)} {command}|^{command}:", recipes, re.MULTILINE), entry
    assert [entry.split()[1] for entry in entries] == ["check", "format", "typecheck"]


@pytest.mark.parametrize("form", ["bug", "feature", "question"])
def test_an_issue_form_has_the_fields_that_a_form_needs(form: str) -> None:
    read = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text(encoding="utf-8"))
    assert set(read) == {"name", "description", "labels", "body"}
    fields = {field["id"]: field["attributes"]["label"] for field in read["body"] if field["type"] == "textarea"}
    assert len(fields) == len(read["body"])
    assert form == "feature" or "`condensegrpo doctor" in fields["doctor"]
