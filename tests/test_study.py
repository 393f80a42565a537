"""Study files, and the check that nothing held out is trained on."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path

import pytest
from command import ROOT
from test_docs_paths import schema

from condensegrpo.assembly.build import build
from condensegrpo.assembly.components import Components
from condensegrpo.assembly.held_out import check_disjoint
from condensegrpo.cli.sweep import run_sweep
from condensegrpo.config.load import load_config, vary
from condensegrpo.config.study import find_study, load_study
from condensegrpo.core.errors import ConfigError, DataError, RunError
from condensegrpo.core.protocols.task import Demonstration
from condensegrpo.studies.lab.study import LabStudy, check_fresh, load_lab_study, write_pilots
from condensegrpo.training.sweep import (
    RunState,
    StudyRun,
    Sweep,
    runs_of,
)

DRAWN = ("task.options.eval_problems=8",)  # drawing hundreds of long stories takes seconds
STUDIES = sorted((ROOT / "studies").glob("*.yaml"))


def study(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(f"name: s\nconfig: quickstart\n{text}")
    return path


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_a_shipped_study_has_a_valid_configuration(path: Path, tmp_path: Path) -> None:
    shipped = load_lab_study(path)
    runs = runs_of(shipped.model_copy(update={"seeds": shipped.seeds[:1]}), tmp_path)
    assert [run.arm for run in runs] == list(shipped.arms)


def test_a_shipped_study_is_found_by_name_and_by_its_path_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_study("tiny") == find_study("studies/tiny.yaml") == ROOT / "studies/tiny.yaml"
    with pytest.raises(ConfigError, match=r"no such file\. Did you mean 'tiny'\? condensegrpo config --shipped lists"):
        find_study("tiney")


@pytest.mark.parametrize("name", ["s1_summaries", "s1_writers", "s2_precision", "methods_reads"])
def test_a_shipped_study_finds_its_files_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its estimators, rewards and templates lie beside it, in a clone and in an installed package."""
    monkeypatch.chdir(tmp_path)
    shipped = load_study(find_study(name))
    for arm in shipped.arms:
        config = shipped.config_of(arm, shipped.seeds[0], tmp_path)
        build(vary(config, ["evaluate.variants={}", "evaluate.skip=0", "evaluate.problems=8", *DRAWN]))


def test_the_page_of_the_keys_of_a_study_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/studies.md").read_text(encoding="utf-8")
    assert schema().filled(page, LabStudy) == page


def test_the_runs_of_a_study_take_turns_over_the_arms(tmp_path: Path) -> None:
    path = study(tmp_path, "seeds: [3, 5]\noverrides: [train.steps=7]\narms: {a: [], b: [train.steps=9]}")
    runs = runs_of(load_study(path), tmp_path)
    assert [run.name for run in runs] == ["a-seed3", "b-seed3", "a-seed5", "b-seed5"]
    assert [run.config.train.steps for run in runs] == [7, 9, 7, 9]  # an arm overrides what holds for all
    assert [run.config.seed for run in runs] == [3, 3, 5, 5]
    assert runs[0].folder.path == tmp_path / "a-seed3"


def test_an_override_may_depend_on_the_seed(tmp_path: Path) -> None:
    path = study(
        tmp_path, 'seeds: [3, 5]\noverrides: ["task.options.seed={seed}"]\narms: {a: [], b: ["train.steps={seed}1"]}'
    )
    runs = runs_of(load_study(path), tmp_path)
    assert [run.config.task.options["seed"] for run in runs] == [3, 3, 5, 5]
    assert [run.config.train.steps for run in runs if run.arm == "b"] == [31, 51]
    assert "train.steps=51" in runs[-1].arguments


def test_the_configuration_is_looked_for_beside_the_study_first(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("extends: quickstart.yaml\ntrain: {steps: 3}\n")
    (run,) = runs_of(load_study(study(tmp_path, "seeds: [0]\narms: {a: []}")), tmp_path)
    assert run.config.train.steps == 3


@pytest.mark.parametrize("out", ["2026-01-31", "7", "a #b", "[x]: y"])
def test_the_folder_of_a_study_may_have_any_name(tmp_path: Path, out: str) -> None:
    (run,) = runs_of(load_study(study(tmp_path, "seeds: [0]\narms: {a: []}")), Path(out))
    assert run.folder.path == Path(out) / "a-seed0"


def test_files_that_are_no_run_are_not_deleted_for_a_run_of_their_name(tmp_path: Path) -> None:
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0/notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"a-seed0: the folder is not empty, and it holds no config\.yaml"):
        runs_of(load_study(study(tmp_path, "seeds: [0]\narms: {a: []}")), tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    small = "overrides: [warm_start.steps=0, train.steps=1, evaluate.problems=1]"
    path = study(tmp_path, f"seeds: [0]\narms: {{a: []}}\n{small}")
    with pytest.raises(ConfigError, match=r"the run is written below .*study\.yaml, and it is no folder"):
        run_sweep(load_study(path), path / "out", parallel=1, launch=lambda run: Process(0))


def test_a_run_that_is_refused_is_named(tmp_path: Path) -> None:
    path = study(tmp_path, "seeds: [0]\narms: {a: [], b: [condenser.options.keep_lst=3]}")
    with pytest.raises(ConfigError, match=r"^the run b-seed0: .* no option 'keep_lst'"):
        run_sweep(load_study(path), tmp_path / "out", parallel=1, launch=lambda run: Process(0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [0]\narms: {a: []}\nreports: {}", "reports: unknown key. Did you mean 'report'?"),
        ("seeds: [0, 0]\narms: {a: []}", "has a seed twice"),
        ("seeds: []\narms: {a: []}", "seeds: "),
        ("seeds: [0]\narms: {a: [seed=4]}", "the override seed=4 would be lost"),
        ("seeds: [0]\narms: {one: []}\nreport: {baseline: two}", "there is no arm 'two'"),
        (
            "seeds: [0, 1]\narms: {a: []}\npilots: {seeds: [1, 7], overrides: []}",
            r"pilots\.seeds: \[1\] are seeds of the study",
        ),
        ("seeds: [0]\narms: {a: []}\npredictions: [{claim: c, arm: a, minus: b, above: 0}]", "there is no arm 'b'"),
        (
            "seeds: [0]\narms: {a: []}\npredictions: [{claim: c, arm: a, figure: call, above: 0}]",
            r"no figure 'call'\. Did you mean 'calls'",
        ),
        ("seeds: [0]\narms: {a: []}\npredictions: [{claim: c, arm: a}]", "'c' needs either above or below"),
        (
            "seeds: [0]\narms: {a: []}\npredictions: [{claim: c, arm: a, evaluation: K=21, above: 0}]",
            "predictions names K=21",
        ),
        ("seeds: [0]\narms: {a: [train.step=3]}", "the arm a of the study s: .*train.step: unknown key"),
        ("seeds: [0]\narms: {a: []}\nreport: {evaluations: [K=21]}", "report.evaluations names K=21"),
    ],
)
def test_a_wrong_study_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        runs_of(load_lab_study(study(tmp_path, text)), tmp_path)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("configs/quickstart.yaml", []),
        ("studies/configs/memory.yaml", []),
        ("studies/configs/stories.yaml", ["task.options.eval_problems=32"]),
        ("studies/configs/story_summaries.yaml", ["task.options.eval_problems=32"]),
        ("studies/configs/h_demand.yaml", ["task.options.eval_problems=32", "evaluate.problems=32"]),
    ],
)
def test_no_held_out_problem_of_a_drawn_task_is_trained_on(config: str, overrides: list[str]) -> None:
    check_disjoint(build(load_config(ROOT / config, ["warm_start.steps=10", "train.steps=20", *overrides])))


def test_a_held_out_problem_that_is_trained_on_is_named() -> None:
    overrides = ["warm_start.steps=1", "train.steps=1", "evaluate.variants={}", "evaluate.problems=8"]
    components = build(load_config(ROOT / "configs/quickstart.yaml", overrides))
    held_out = components.problems("eval")[3]
    leaked = [replace(held_out, id="train-0")] * 20
    leaking = replace(components, problems=lambda split: leaked if split == "train" else components.problems("eval"))
    with pytest.raises(DataError, match=re.escape(f"{held_out.id} of the evaluation held-out is also train-0")):
        check_disjoint(replace(leaking, evaluations=components.evaluations))


def test_the_held_out_problems_of_pilots_are_not_those_of_the_study(tmp_path: Path) -> None:
    text = "seeds: [0]\narms: {a: []}\noverrides: [evaluate.problems=8, evaluate.skip=8]\npilots: "
    same = load_lab_study(study(tmp_path, f"{text}{{seeds: [1], overrides: [evaluate.skip=9]}}"))
    with pytest.raises(DataError, match=r"of the evaluation held-out of the study is .* of its pilots"):
        write_pilots(same, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    other = load_lab_study(study(tmp_path, f"{text}{{seeds: [1], overrides: [evaluate.skip=0]}}"))
    (run,) = runs_of(load_study(write_pilots(other, tmp_path / "out")), tmp_path)
    assert (run.seed, run.config.evaluate.skip) == (1, 0)


@pytest.mark.parametrize(
    ("again", "earlier"),
    [("s1_writers", ("s1_summaries", "s2_lengths")), ("s2_precision", ("s1_summaries", "s2_lengths", "s1_writers"))],
)
def test_a_study_that_is_made_again_has_held_out_stories_of_its_own(again: str, earlier: tuple[str, ...]) -> None:
    for arm in (0, -1) if again == "s2_precision" else (0,):  # its last arm has other options of the task
        for name in earlier:
            check_fresh(first_run(again, arm), first_run(name))


@cache
def first_run(name: str, arm: int = 0) -> Components:
    shipped = load_study(ROOT / f"studies/{name}.yaml")
    return build(shipped.config_of(list(shipped.arms)[arm], shipped.seeds[0], Path("runs")))


def test_skipped_problems_are_not_evaluated() -> None:
    settings = ["evaluate.problems=3", "evaluate.variants={}"]
    every = build(load_config(ROOT / "configs/quickstart.yaml", settings))
    later = build(load_config(ROOT / "configs/quickstart.yaml", [*settings, "evaluate.skip=2"]))
    assert list(every.held_out()) == list(every.problems("eval")[:3])
    assert list(later.held_out()) == list(every.problems("eval")[2:5])
    with pytest.raises(ConfigError, match=r"evaluate\.skip is 99999 and the task has"):
        build(load_config(ROOT / "configs/quickstart.yaml", [*settings, "evaluate.skip=99999"]))


class Demonstrator:
    """A task that demonstrates a held-out problem."""

    def __init__(self, demonstration: Demonstration) -> None:
        self._demonstration = demonstration

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        return repeat(self._demonstration)

    def corpus(self) -> list[str]:
        return []

    def sound(self, context: object, reply: str) -> bool | None:
        return None


def test_a_held_out_problem_that_is_demonstrated_is_named() -> None:
    overrides = ["warm_start.steps=1", "train.steps=1", "evaluate.problems=8"]
    components = build(load_config(ROOT / "configs/quickstart.yaml", overrides))
    (longer,) = (problem for problem in components.evaluations["K=20"].problems("eval")[5:6])
    turn = Demonstration(context=(), reply="", problem=replace(longer, id="a-demonstration"))
    with pytest.raises(DataError, match=r"evaluation K=20 is also a-demonstration of the demonstrations"):
        check_disjoint(replace(components, task=Demonstrator(turn)))  # type: ignore[arg-type]  # a task with what the check reads


class Process:
    """A run that ends with this code when it is next asked; None: it goes on."""

    def __init__(self, code: int | None) -> None:
        self._code, self.signals = code, list[int]()

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


ARMS = "seeds: [0, 1]\narms: {a: [], b: [warm_start.steps=7]}"


def sweep_of(folder: Path, *, parallel: int, code: int | None, arms: str = ARMS) -> tuple[Sweep, list[str]]:
    runs = runs_of(load_study(study(folder, arms)), folder)
    started: list[str] = []

    def launch(run: StudyRun) -> Process:
        started.append(run.name)
        return Process(code)

    return Sweep(runs, parallel=parallel, launch=launch), started


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    sweep, started = sweep_of(tmp_path, parallel=2, code=1)
    assert sweep.advance()
    assert started == ["a-seed0", "b-seed0"]
    assert sweep.advance()
    assert started == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    assert not sweep.advance()
    assert set(sweep.states.values()) == {RunState.FAILED}


def test_a_run_that_is_killed_from_outside_is_told_from_one_that_fails(tmp_path: Path) -> None:
    sweep, started = sweep_of(tmp_path, parallel=4, code=-9)
    while sweep.advance():
        continue
    assert set(sweep.states.values()) == {RunState.KILLED}
    assert len(started) == 4
    assert sweep.steps_left == 0


def test_a_run_waits_for_the_warm_start_that_another_makes(tmp_path: Path) -> None:
    arms = "seeds: [0, 1]\narms: {a: [], b: [algorithm.advantage.estimator=rloo], c: [warm_start.steps=7]}"
    sweep, started = sweep_of(tmp_path, parallel=3, code=None, arms=arms)
    assert sweep.advance()
    assert started == ["a-seed0", "c-seed0", "a-seed1"]
    sweep, started = sweep_of(tmp_path, parallel=1, code=1, arms=arms)
    assert sweep.advance()
    (tmp_path / "a-seed0/origin/warm").mkdir(parents=True)
    (tmp_path / "a-seed0/origin/warm/weights").write_text("of a")
    while sweep.advance():
        continue
    assert (tmp_path / "b-seed0/origin/warm/weights").read_text() == "of a"
    assert started[1:3] == ["b-seed0", "c-seed0"]
    assert not (tmp_path / "c-seed0").exists()


def test_a_sweep_whose_time_is_up_starts_no_further_run(tmp_path: Path) -> None:
    sweep, started = sweep_of(tmp_path, parallel=1, code=1)
    sweep.advance()
    sweep.start_no_more()
    assert not sweep.advance()
    assert started == ["a-seed0"]
    assert sweep.states["b-seed1"] is RunState.WAITING


def test_the_steps_that_are_left_are_those_of_unfinished_runs(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, parallel=1, code=1)
    (tmp_path / "a-seed0").mkdir()
    (tmp_path / "a-seed0/metrics.jsonl").write_text('{"step": 15, "success": 0.5}\n')  # of 60
    assert sweep.steps_left == 45 + 3 * 60
