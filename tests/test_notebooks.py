"""The notebooks run from top to bottom, in one folder and one kernel, and are stored without outputs."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ORDER = ("first_run", "write_a_condenser", "compare_condensers", "read_credit")


def test_the_list_is_complete() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(ORDER)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.filterwarnings("ignore")  # of zmq and the kernel's client
def test_every_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    whole = nbformat.v4.new_notebook()
    for path in sorted(NOTEBOOKS, key=lambda path: ORDER.index(path.stem)):
        fresh = nbformat.v4.new_code_cell("%reset -f")  # imported modules stay: torch is loaded once
        whole.cells += [fresh, *nbformat.read(path, as_version=4).cells]
    whole.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbclient.NotebookClient(whole, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output.text for cell in whole.cells for output in cell.get("outputs", ()) if output.get("name") == "stderr"]
    assert said == []  # which a notebook draws in pink
    drawn = [
        output.data["text/html"]
        for cell in whole.cells
        for output in cell.get("outputs", ())
        if output.output_type == "execute_result" and "text/html" in output.data
    ]
    assert sum("stop answered" in html or "stop format" in html or "turns" in html for html in drawn) >= 6
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"notebook", "first_and_last"}
