"""The study of methods: its page has the committed results, and by every method its expert solves the task."""

import json
import re
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from command import ROOT
from test_studies_page import loaded

from condensegrpo.assembly.build import build
from condensegrpo.assembly.demonstrations import demonstrations
from condensegrpo.assembly.preflight import made_tokenizer
from condensegrpo.assembly.runtime import renderer_with
from condensegrpo.core.plugins import load_plugin
from condensegrpo.display.console import quiet_libraries
from condensegrpo.episodes.toolformats import Malformed
from condensegrpo.storage.run_folder import read_metrics
from condensegrpo.studies.lab.study import LabStudy, load_lab_study

PAGE = ROOT / "docs/results/methods.md"
STUDY = load_lab_study(ROOT / "studies/methods_reads.yaml")
DECIDED = {  # what the expert calls beside its actions
    "selfcompact": {"compact"},
    "memact": {"prune"},
    "contextbudget": {"prune"},
    "foldgrpo": {"branch", "return"},
    "memory": {"memory_write"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("methods")


def test_the_page_has_the_tables_of_the_committed_results(script: ModuleType) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert script.filled(text) == text
    named = set(re.findall(r"<!-- methods (\w+) -->", text))
    assert named == {path.stem for path in script.RESULTS.glob("*.json")}


def test_every_run_of_a_study_is_in_its_results_or_named_as_not_finished(script: ModuleType) -> None:
    for path in script.RESULTS.glob("*.json"):
        results, study = script.results_of(path.stem), load_lab_study(ROOT / f"studies/{path.stem}.yaml")
        finished = [f"{arm}-seed{seed}" for arm, by_seed in results["arms"].items() for seed in by_seed]
        planned = [f"{arm}-seed{seed}" for arm in study.arms for seed in study.seeds]
        assert sorted(finished + results["not_finished"]) == sorted(planned)


def test_the_table_of_an_arm_is_that_of_its_seeds(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("context_tokens", "prompt_tokens", "prompt_tokens_uncached", "output_tokens", "calls", "refetches")

    def run(before: float, after: float, tokens: float) -> dict[str, object]:
        figures = {**dict.fromkeys([*names, "summaries"], tokens), "lost_facts": 0.5}
        training = {"steps": 3, "sampled_tokens": 1600, "training_success": 0.5, "cpu_seconds": tokens}
        return {"before": {"success": before, **figures}, "after": {"success": after, **figures}, **training}

    arms = {arm: {} for arm in STUDY.arms} | {
        "full": {"0": run(0.1, 0.4, 100), "1": run(0.3, 0.6, 100)},
        "mem1": {"0": run(0.0, 0.5, 10), "1": run(0.2, 0.7, 30)},
    }
    results = {"problems": 4, "warm_start_cpu_seconds": {"warm-seed0": 7}, "not_finished": ["x"], "arms": arms}
    (tmp_path / "methods_reads.json").write_text(json.dumps(results))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    table = script.tables("methods_reads")
    # 0.5 0.7: 0.6 ± 12.706·0.1, cut to [0, 1]; paired differences 0.1 0.1
    assert "| `mem1` | 0.60 [0.00, 1.00] | +0.10 [+0.10, +0.10] | 20 | 20 |" in table
    assert "Not finished: x." in table


@pytest.mark.parametrize("arm", STUDY.arms)
def test_the_expert_reads_on_decides_by_the_method_and_answers_right(arm: str, tmp_path: Path) -> None:
    calls, answers = played(STUDY, arm, tmp_path)
    assert calls == DECIDED.get(arm, set())
    assert len(answers) > 1
    assert all(said == right for said, right in answers)


def test_the_arms_of_a_seed_start_from_one_policy_and_end_by_their_tokens(tmp_path: Path) -> None:
    quiet_libraries()
    small = [
        "warm_start={steps: 2, turns_per_step: 4}",
        "train={steps: 9, problems_per_step: 2, samples_per_problem: 2, eval_every: 0, save_every: 0}",
        "evaluate.problems=2",
    ]
    arms = {arm: STUDY.arms[arm] for arm in ("full", "memact")}
    study = STUDY.model_copy(update={"arms": arms, "overrides": small, "predictions": [], "seeds": [10]})
    program = loaded("methods", folder="studies")
    program.main(study, tmp_path, tokens=1)
    program.main(study, tmp_path, tokens=1)  # nothing is left to do
    lines = [json.loads(line) for line in (tmp_path / "cpu.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ["warm-seed10", "full-seed10", "memact-seed10", "warm-seed10"]
    assert all(line["seconds"] > 0 for line in lines[:3])
    warm = [(tmp_path / f"{run['run']}/origin/warm/model.safetensors").read_bytes() for run in lines]
    assert warm[0] == warm[1] == warm[2]
    for unfinished in (None, 1_000_000):
        assert program.collected(study, tmp_path, unfinished)["not_finished"] == ["full-seed10", "memact-seed10"]
    results = program.collected(study, tmp_path, tokens=1)
    assert results["not_finished"] == []
    for arm in arms:
        figures = results["arms"][arm]["10"]
        metrics = read_metrics(tmp_path / f"{arm}-seed10/metrics.jsonl")
        (tokens,) = (4 * line["output_tokens"] for line in metrics if "seconds/rollout" in line)  # one step was enough
        assert (figures["steps"], figures["sampled_tokens"]) == (1, round(tokens))
        assert {"success", "calls", "lost_facts"} <= figures["before"].keys() & figures["after"].keys()


def played(study: LabStudy, arm: str, folder: Path) -> tuple[set[str], list[tuple[str, str | None]]]:
    """The tools that the expert calls, and its answers with the right ones."""
    config = study.config_of(arm, 0, folder)
    components = build(config)
    assert config.model.new is not None
    tokenizer = made_tokenizer(components.task, config.model.new)
    renderer = renderer_with(components, tokenizer, stop_ids=(tokenizer.convert_tokens_to_ids("<|im_end|>"),))
    turns = list(islice(demonstrations(components, renderer, "").turns(0), 60))
    replies = [(turn.shown.reply, turn.shown.problem) for turn in turns]
    calls = {name for reply, _ in replies for name in re.findall(r"<call> (\w+)", reply)}
    found = [(re.search(r"<answer> (\S+) </answer>", reply), problem) for reply, problem in replies]
    return calls, [(match[1], problem.answer) for match, problem in found if match and problem]


def test_the_short_format_reads_names_turns_and_text() -> None:
    form = load_plugin("tool_formats", f"{ROOT / 'studies/methods_tasks.py'}:Short")()
    (pruned,) = form.parse("<call> prune 0 1 : p3 red:7 </call>")
    assert (pruned.name, json.loads(pruned.arguments)) == ("prune", {"turns": [0, 1], "note": "p3 red:7"})
    (called,) = form.parse("<call> compact </call>")
    assert (called.name, json.loads(called.arguments)) == ("compact", {})
    assert [type(call) for text in ("<call> prune x : a </call>", "<call> prune 1") for call in form.parse(text)] == [
        Malformed,
        Malformed,
    ]
