"""The notebooks run from top to bottom, in one folder and one shell, and are stored without outputs."""

import json
from functools import partial
from pathlib import Path

import pytest
from command import run, run_script

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ORDER = ("first_run", "write_a_condenser", "compare_condensers", "read_credit")


def test_the_list_is_complete() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(ORDER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


def test_every_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="IPython is not installed")
    out, paths = tmp_path / "drawn.json", sorted(NOTEBOOKS, key=lambda path: ORDER.index(path.stem))
    script = partial(run_script, Path(__file__).with_name("notebook_cells.py"))
    done = run(str(out), *map(str, paths), cwd=tmp_path, program=script)
    assert (done.returncode, done.stderr) == (0, "")  # which a notebook draws in pink
    drawn = json.loads(out.read_text(encoding="utf-8"))
    assert sum("stop answered" in html or "stop format" in html or "turns" in html for html in drawn) >= 6
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"notebook", "first_and_last"}
