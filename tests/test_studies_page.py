"""The pages of studies against the committed results, and the coverage of their intervals."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from command import ROOT

from condensegrpo.studies.lab.intervals import ENOUGH
from condensegrpo.studies.lab.study import load_lab_study, write_pilots
from condensegrpo.training.sweep import check_runs, runs_of

PAGES = [ROOT / f"docs/results/{page}.md" for page in ("studies", "pictures", "pretrained")]
GUIDE = ROOT / "docs/how-to/studies.md"


def loaded(name: str, folder: str = "docs/scripts") -> ModuleType:
    """A program of a folder."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{folder}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("studies")


def test_the_page_has_the_tables_of_the_committed_results(script: ModuleType) -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [script.filled(text) for text in texts] == texts
    text = "".join(texts)
    named = set(re.findall(r"<!-- results (\w+) -->", text))
    assert named == {path.stem for path in (ROOT / "docs/results/studies").glob("*.json")}


def test_folds_are_compared_with_their_untrained_arm_and_those_without_a_trained_one_are_left_out() -> None:
    success = {"a": 0.3, "a_zero": 0.2, "b": 0.2, "b_zero": 0.0, "c": 0.8, "c_zero": 0.5, "d_zero": 0.9}
    arms = [{"arm": arm, "success": [value, 0, 1], "success_before": 0.1} for arm, value in success.items()]
    before, untrained = loaded("folds").lines({"name": "held-out", "arms": arms})
    # differences 0.1, 0.2, 0.3: a standard error of 0.1 / √3, times t(2) = 4.303
    assert untrained == "held-out − untrained: +0.200 [-0.048, +0.448] over 3 folds (a +0.100, b +0.200, c +0.300)"
    assert before.startswith("held-out − before the run: +0.333 [")
    assert before.endswith("3 folds (a +0.200, b +0.100, c +0.700)")
    (alone,) = loaded("folds").lines({"name": "s", "arms": arms[:1]})
    assert alone == "s − before the run: +0.200 over 1 fold (a +0.200)"


def test_the_results_of_a_sweep_and_figures_by_seed_make_the_same_kind_of_table(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [
        {"arm": "a", "problems": 128, "success": [0.5, 0.4, 0.6], "by_seed": {"success": {"0": 0.4, "1": 0.6}}},
        {"arm": "b", "problems": 128, "by_seed": {"success": {"0": 1.0, "1": 1.0}}},
    ]
    compared = [{"arm": "b", "baseline": "a", "paired": True}]
    evaluation = {"name": "held-out", "arms": arms, "comparisons": compared}
    predicted = {
        "claim": "c", "evaluation": "held-out", "predicted": "b − a in success > 0", "found": [0.5, -0.8, 1.0],
        "by_seed": {"0": 0.6, "1": 0.4}, "paired": True, "verdict": "undecided",
    }  # fmt: skip
    results = {"measured": "today", "baseline": "a", "evaluations": [evaluation], "predictions": [predicted]}
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    (script.RESULTS / "s.json").write_text(json.dumps(results))
    table = script.tables("s")
    found = "| b − a in success > 0 (held-out) | 0.500 [-0.800, 1.000], paired | **undecided** (≥ 1.671) |"
    assert found in table  # 1.3 · 16.33 / 12.71, of two seeds
    assert "`a`" not in table  # the arms of a study with predictions stand in the file alone
    (script.RESULTS / "s.json").write_text(json.dumps(results | {"predictions": []}))
    table = script.tables("s")
    assert "| `a` | 0.500 [0.400, 0.600] |" in table  # as stored
    assert "| `b` | 1.000 [0.971, 1.000] |" in table  # 256 of 256: Wilson, with each of 128 problems as one cluster


def test_the_page_has_the_simulated_coverage() -> None:
    table = loaded("coverage").table()
    assert table in GUIDE.read_text(encoding="utf-8")


def test_the_study_of_the_guide_is_valid_and_its_pilots_have_other_problems(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(name: my_study\n.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_study.yaml").write_text(example)
    study = load_lab_study(tmp_path / "my_study.yaml")
    assert len(study.seeds) >= ENOUGH
    runs = runs_of(study, tmp_path)
    check_runs(runs[:1])
    assert write_pilots(study, tmp_path / "pilots").is_file()
