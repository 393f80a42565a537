"""docs/reference/condensers.md against the code: the drawings, the example, and that every condenser is there."""

import importlib.util
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import yaml
from command import ENVIRONMENT
from forked import ForkedCommand

from condensegrpo.assembly.build import build_condenser
from condensegrpo.config.use import CondenserUse
from condensegrpo.core import plugins

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "condensers.md").read_text(encoding="utf-8")


TUTORIAL = (ROOT / "docs" / "tutorials" / "your-own-task.md").read_text(encoding="utf-8")


def blocks(kind: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def drawings() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("condensers_drawn", ROOT / "docs" / "scripts" / "condensers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: draw() for name, draw in module.EXAMPLES.items()}


def test_every_drawing_is_what_the_condenser_does() -> None:
    assert blocks("text") == [f"{drawing}\n" for drawing in drawings().values()]


@pytest.mark.parametrize("name", [point.name for point in plugins.installed("condensers")])
def test_every_condenser_has_its_section(name: str) -> None:
    assert f"\n## {name}\n" in PAGE


def test_the_configurations_on_the_page_can_be_built() -> None:
    found = [yaml.safe_load(block)["condenser"] for block in blocks("yaml")]
    assert [one["name"] for one in found] == ["pipeline", "summary_model", "pipeline", "anchors", "pipeline"]
    for one in found:
        build_condenser(CondenserUse.model_validate(one))


def test_the_condenser_of_twenty_lines_keeps_the_contract(tmp_path: Path) -> None:
    (example,) = (block for block in blocks("python", TUTORIAL) if "async def condense" in block)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    (tmp_path / "own.py").write_text(example)
    suite = str(ROOT / "tests" / "test_condenser_conformance.py")
    chosen = ["-k", "own.py or contract or policys_own"]
    process = ForkedCommand(
        ["-q", *chosen, "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", suite],
        cwd=ROOT,
        environment=ENVIRONMENT,
        more={"CONDENSER": f"{tmp_path / 'own.py'}:WithNumbers"},
        program=partial(runpy.run_module, "pytest", run_name="__main__"),
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out[-2000:] + err[-2000:]
    assert re.search(r"\d\d passed", out)
