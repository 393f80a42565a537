"""The tables of options in the reference: every option of every built-in plug-in, with its default."""

import inspect
import re

import pytest
from command import ROOT

from condensegrpo.core import plugins

SUPPLIED = {"sandbox", "tool_format", "data", "eval_data", "open_writer"}  # by the assembly
LONG = {"", "all", "truncate"}  # stands for a default that is a text or a list
WORDS = {"true": "True", "false": "False", "null": "None", "[]": "()"}
PAIRS = [
    (kind, point.name) for kind in ("condensers", "rewards", "tasks", "tools") for point in plugins.installed(kind)
]


def tables(kind: str) -> dict[tuple[str, str], str]:
    """The default in every row of a page, by plug-in and option."""
    page = (ROOT / "docs" / "reference" / f"{kind}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \| `(\w+)` \| ([^|]*)\|", page, re.MULTILINE)
    return {(name, option): default.strip() for names, option, default in rows for name in re.findall(r"\w+", names)}


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_the_page_has_every_option_of_a_plugin_with_its_default(kind: str, name: str) -> None:
    (point,) = (point for point in plugins.installed(kind) if point.name == name)
    plugin = point.load()
    known = inspect.signature(plugin).parameters if inspect.isclass(plugin) else {}
    wanted = {
        option: one.default for option, one in known.items() if option not in SUPPLIED and one.kind != one.VAR_KEYWORD
    }
    written = {option: default for (plugin_name, option), default in tables(kind).items() if plugin_name == name}
    assert written.keys() == wanted.keys()
    for option, default in wanted.items():
        if default is inspect.Parameter.empty:
            assert written[option] == "required", option
        elif written[option] not in LONG:
            plain = re.sub(r"[',]", "", str(default)).replace("((", "[[").replace("))", "]]").replace(") (", "] [")
            stated = WORDS.get(written[option], written[option].replace(",", ""))
            assert stated == plain or float(stated) == default, option
