"""Predictions of studies, compared with figures that are known."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from builders import add_trajectory, scored, trajectory, turn
from scipy.special import stdtrit

from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.errors import ConfigError
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.studies.lab.__main__ import main
from condensegrpo.studies.lab.cross_play import cell, cross_play, cross_play_table, effect
from condensegrpo.studies.lab.figures import SeedOutcome, StudyFigures, evaluation_figures, figure_of
from condensegrpo.studies.lab.intervals import detectable_effect
from condensegrpo.studies.lab.predictions import Figure, PredictionOutcome, Verdict, outcome
from condensegrpo.studies.lab.results import _outcome, markdown, play_study
from condensegrpo.studies.lab.study import LabStudy, Prediction

ROOT = Path(__file__).parent.parent


def column(*values: float, seeds: tuple[int, ...] | None = None) -> Figure:
    """A figure of some seeds that is not known by problem."""
    return Figure(
        value_SP=np.array([[value] for value in values]), seeds=seeds or tuple(range(len(values))), problems=()
    )


def judged(
    ours: Figure, theirs: Figure | None = None, *, paired: bool = True, **prediction: object
) -> PredictionOutcome:
    claim = {"claim": "c", "arm": "a", "figure": "turns", "minus": theirs and "b", **prediction}
    return outcome(Prediction.model_validate(claim), ours, theirs, paired=paired)


@pytest.mark.parametrize(
    ("threshold", "verdict"),
    [
        ({"above": 0.4}, Verdict.HOLDS),  # 0.7 ± 0.2484
        ({"above": 0.5}, Verdict.UNDECIDED),
        ({"above": 0.95}, Verdict.FAILS),
        ({"below": 0.95}, Verdict.HOLDS),
        ({"below": 0.7}, Verdict.UNDECIDED),
        ({"below": 0.4}, Verdict.FAILS),
    ],
)
def test_the_whole_interval_decides(threshold: dict[str, float], verdict: Verdict) -> None:
    assert judged(column(0.6, 0.7, 0.8), **threshold).verdict is verdict


def test_a_contrast_is_paired_by_seed_and_shows_the_differences() -> None:
    found = judged(column(6, 9, 12), column(5, 7, 9), above=0)
    assert found.found == pytest.approx((2.0, 2 - 2.484, 2 + 2.484), abs=1e-3)
    assert found.by_seed == {"0": 1, "1": 2, "2": 3}
    assert (found.paired, found.verdict, found.predicted) == (True, Verdict.UNDECIDED, "a − b in turns > 0")
    wider = judged(column(6, 9, 12), column(5, 7, 9), paired=False, above=0)
    assert wider.found is not None
    assert wider.found.low < found.found.low


def test_arms_with_other_warm_starts_are_not_paired() -> None:
    found = judged(column(6, 9), column(5, 7, 9), paired=False, above=0)
    assert (found.paired, found.by_seed) == (False, {})  # values of one arm would be read as differences


def test_a_share_of_another_figure_can_be_predicted() -> None:
    found = judged(column(60, 62, 61), column(80, 81, 79), times=0.8, below=0)
    assert found.found is not None
    assert found.found.mean == pytest.approx(61 - 0.8 * 80)
    assert found.predicted == "a − 0.8 × b in turns < 0"


def test_one_seed_and_what_was_not_measured_decide_nothing() -> None:
    assert judged(column(0.7), above=0).verdict is Verdict.UNDECIDED
    missing = outcome(Prediction(claim="c", arm="a", above=0), None, None, paired=False)
    assert (missing.found, missing.verdict) == (None, Verdict.UNDECIDED)


def test_what_the_study_file_calls_by_construction_holds_by_construction_or_fails() -> None:
    certain = {"by_construction": True}
    assert judged(column(0.6, 0.7, 0.8), above=0.4, **certain).verdict is Verdict.BY_CONSTRUCTION
    assert judged(column(0.6, 0.7, 0.8), above=0.5, **certain).verdict is Verdict.BY_CONSTRUCTION
    assert judged(column(0.6, 0.7, 0.8), above=0.95, **certain).verdict is Verdict.FAILS


def test_the_effect_that_seeds_could_have_found_follows_from_their_deviation() -> None:
    """λ = 3.15 of nine degrees of freedom: 0.996 deviations with ten seeds, by the tables of Cohen (1988)."""
    assert detectable_effect(1, 10) == pytest.approx(0.996, abs=1e-3)
    assert detectable_effect(0.3, 40) == pytest.approx(0.3 * 2.879 / 40**0.5, abs=1e-3)
    assert judged(column(6, 9, 12), column(5, 7, 9), above=0).could_find == pytest.approx(detectable_effect(1, 3))
    assert judged(column(6), column(5, 7), above=0).could_find is None
    cut = judged(column(0.7, 0.9, 0.98), figure="success", above=0.5).could_find  # the interval ends at 1
    assert cut == pytest.approx(detectable_effect(np.std([0.7, 0.9, 0.98], ddof=1), 3))


def test_the_effect_that_could_be_found_is_larger_where_problems_differ() -> None:
    """Seeds alone have a deviation of 0.01: an effect of that size is found in one study of ten."""
    rng, simulated = np.random.default_rng(5), 400

    def studies(effect: float) -> list[PredictionOutcome]:
        return [judged_on_problems(effect) for _ in range(simulated)]

    def judged_on_problems(effect: float) -> PredictionOutcome:
        value_SP = effect + rng.normal(0, 0.01, (10, 1)) + rng.normal(0, 0.2, (1, 64)) + rng.normal(0, 0.1, (10, 64))
        figure = Figure(value_SP=value_SP, seeds=tuple(range(10)), problems=tuple(map(str, range(64))))
        return outcome(Prediction(claim="c", arm="a", figure="price", above=0), figure, None, paired=False)

    least = fmean(each.could_find or 0 for each in studies(0))
    assert least == pytest.approx(2.8 * 0.2 / 64**0.5, rel=0.05)
    power = sum(each.verdict is Verdict.HOLDS for each in studies(least)) / simulated
    assert power == pytest.approx(0.8, abs=0.05)  # the standard error is 0.02


@pytest.mark.parametrize("seeds", [3, 10])
def test_four_of_five_simulated_studies_find_the_effect_that_they_could_find(seeds: int) -> None:
    value_NS = np.random.default_rng(7).normal(detectable_effect(0.2, seeds), 0.2, (20_000, seeds))
    low_N = value_NS.mean(axis=1) - stdtrit(seeds - 1, 0.975) * value_NS.std(axis=1, ddof=1) / seeds**0.5
    assert (low_N > 0).mean() == pytest.approx(0.8, abs=0.01)  # the standard error of a simulation is 0.003


def test_check_marks_what_a_study_is_too_small_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims = [
        "{claim: five points, arm: a, minus: b, above: -0.05, pilot_sd: 0.1}",  # ten seeds find 0.0996
        "{claim: fifteen, arm: a, minus: b, above: 0.15, pilot_sd: 0.1}",
        "{claim: any, arm: a, minus: b, above: 0, pilot_sd: 0.1}",
        "{claim: the level, arm: a, above: 0.05, pilot_sd: 0.1}",
        "{claim: certain, arm: a, above: 0, by_construction: true}",
        "{claim: unknown, arm: a, minus: b, above: 0.1}",
    ]
    arms = "arms: {a: [], b: [train.steps=2]}\n"
    text = f"name: s\nconfig: quickstart\nseeds: {[*range(10)]}\n{arms}predictions: [{', '.join(claims)}]\n"
    (tmp_path / "s.yaml").write_text(text)
    main(["check", str(tmp_path / "s.yaml")])
    finds = "10 seeds find effects >= 0.0996 with 80 % power"
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"five points: {finds}: *underpowered*, the threshold is -0.05",
        *(f"{name}: {finds}" for name in ("fifteen", "any", "the level")),
        "certain: by construction",
        "unknown: its power is not known (pilot_sd)",
    ]


def test_success_on_the_same_problems_is_compared_by_problem() -> None:
    easy = np.array([[1.0, 1.0, 0.0, 0.0]] * 3)
    ours = Figure(value_SP=np.ones((3, 4)), seeds=(0, 1, 2), problems=tuple("abcd"))
    theirs = Figure(value_SP=easy, seeds=(0, 1, 2), problems=tuple("abcd"))
    found = judged(ours, theirs, figure="success", above=0).found
    assert found is not None
    assert found.low < 0.5 - 0.1  # all seeds agree: the problems alone make the width


def test_problems_of_one_id_with_other_questions_are_others(tmp_path: Path) -> None:
    """Arms with other data were compared problem by problem, where a task numbers its problems."""
    config = load_config(find_config("quickstart"), [f"runs_dir={tmp_path}", "name=a"])
    for arm, question in (("a", "what is 1 + 1?"), ("b", "what is 2 + 2?")):
        folder = RunFolder.create(tmp_path / arm)
        one = scored(replace(trajectory(turn([1], [2])), problem_id="eval-0", question=question), 1.0)
        file = folder.evaluation(config.train.steps, "held-out")
        file.parent.mkdir(parents=True)
        add_trajectory(file, one)
    ours, theirs = (_outcome(config.model_copy(update={"name": arm}), "held-out") for arm in "ab")
    assert not ours.success.keys() & theirs.success.keys()


def test_the_table_of_an_unfinished_sweep_compares_the_seeds_that_both_arms_have() -> None:
    def run(seed: int, success: float, tokens: float) -> SeedOutcome:
        figures = {"success": success, "context_tokens": tokens}
        return SeedOutcome(seed=seed, success={"p": success}, context={"p": tokens}, before=figures, after=figures)

    arms = {"a": [run(0, 0.5, 10), run(1, 0.7, 30), run(2, 0, 90)], "b": [run(0, 0.25, 20), run(1, 0.5, 20)]}
    (paired,) = evaluation_figures("held-out", arms, baseline="b", metrics=(), shared=("a",)).comparisons
    assert paired.difference.mean == pytest.approx(0.225)  # of 0.25 and 0.2
    assert (paired.paired, paired.improvement, paired.context_ratio) == (True, 0.875, 1.0)  # 3½ of 4 pairs are better
    (whole,) = evaluation_figures("held-out", arms, baseline="b", metrics=()).comparisons
    assert whole.difference.mean == pytest.approx(0.4 - 0.375)


def test_where_seeds_have_problems_of_their_own_the_means_of_seeds_give_the_intervals() -> None:
    """The differences of seeds are 0.5, 0.5 and 1: 2/3 ± t(2) · 0.2887 / √3, with t = 4.303."""

    def run(seed: int, *success: float) -> SeedOutcome:
        values = {f"p{place} asks {seed}": each for place, each in enumerate(success)}
        figures = {"success": fmean(success), "context_tokens": 1.0}
        return SeedOutcome(seed=seed, success=values, context=dict.fromkeys(values, 1.0), before={}, after=figures)

    arms = {"a": [run(1, 1, 0), run(2, 1, 1), run(3, 1, 1)], "b": [run(1, 0, 0), run(2, 0, 1), run(3, 0, 0)]}
    shown = evaluation_figures("held-out", arms, baseline="b", metrics=(), shared=("a",))
    (compared,) = shown.comparisons
    assert compared.difference == pytest.approx((2 / 3, 2 / 3 - 4.303 * 0.2887 / 3**0.5, 1), abs=1e-3)  # cut off at 1
    assert shown.arms[0].problems == 2
    sides = [figure_of(runs, "success") for runs in arms.values()]
    predicted = outcome(Prediction(claim="c", arm="a", minus="b", above=0), *sides, paired=True)
    assert predicted.found == pytest.approx(compared.difference)
    first = {"a": arms["a"], "b": arms["b"][:1]}  # of one seed the problems are known to differ, and nothing else
    for shared in ("a", ""):
        begun = evaluation_figures("held-out", first, baseline="b", metrics=(), shared=shared)
        assert begun.arms[1].success.high > 0.5
        assert begun.comparisons[0].difference.mean == 0.5
        assert begun.comparisons[0].difference.low < 0.1
    alike = figure_of([run(seed, 1, 0, 1) for seed in (1, 2, 3)], "success")
    certain = outcome(Prediction(claim="c", arm="a", above=0.66), alike, None, paired=False)
    assert (certain.verdict, certain.could_find) == (Verdict.UNDECIDED, None)  # nine problems, and no width
    cells = {name: {"first": 0.0} for name in CELLS[10]}
    assert effect("writer_effect", {10: CELLS[10], 11: cells}).value_SP.tolist() == [[0.5], [0]]


def test_a_table_has_a_dash_before_training_where_one_run_of_an_arm_was_not_evaluated_then() -> None:
    figures = {"success": 0.25, "context_tokens": 10.0}
    runs = [
        SeedOutcome(seed=seed, success={"p": 0.25}, context={"p": 10.0}, before=before, after=figures)
        for seed, before in enumerate((figures, {}))
    ]
    (both, first) = (
        evaluation_figures("held-out", {"a": some}, baseline="a", metrics=()).arms[0] for some in (runs, runs[:1])
    )
    assert (both.success_before, both.context_before) == (None, None)
    assert (first.success_before, first.context_before) == (0.25, 10.0)


def test_a_table_counts_the_problems_of_each_arm_and_has_a_column_of_what_no_run_measured() -> None:
    def run(problems: str) -> SeedOutcome:
        figures = {"success": 1.0, "context_tokens": 10.0, "turns": 3.0}
        by_problem = dict.fromkeys(problems, 1.0)
        return SeedOutcome(seed=0, success=by_problem, context=by_problem, before=figures, after=figures)

    def page(**problems: str) -> str:
        arms = {arm: [run(of_arm)] for arm, of_arm in problems.items()}
        evaluation = evaluation_figures("held-out", arms, baseline="a", metrics=("turns", "trns"))
        return markdown(
            StudyFigures(
                study="s", question=None, baseline="a", reach=0.8, metrics=("turns", "trns"), evaluations=(evaluation,),
                curves=(), predictions=(),
            )
        )  # fmt: skip

    assert "## held-out: 2 problems\n" in page(a="pq", b="pq")
    others = page(a="pq", b="xyz")
    assert "## held-out: 2 to 3 problems an arm\n" in others
    rows = [line for line in others.splitlines() if line.startswith(("| arm | seeds", "| b | 1 |"))]
    assert [row.split(" | ")[-2:] for row in rows] == [["turns", "trns |"], ["3.000", "– |"]]


def test_a_study_is_checked_before_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "studies" / "s3_efficiency.yaml").read_text(encoding="utf-8")
    for name, arm in (("right", "efficient"), ("wrong", "eficient")):
        (tmp_path / f"{name}.yaml").write_text(text.replace("arm: efficient", f"arm: {arm}"), encoding="utf-8")
    main(["check", str(tmp_path / "right.yaml")])
    assert "predictions, pilots and report fit" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["check", str(tmp_path / "wrong.yaml")])
    assert "eficient" in capsys.readouterr().err


CELLS = {  # seed → cells; problems a and b
    10: {
        cell("initial", "initial"): {"a": 0, "b": 0.5},
        cell("initial", "trained"): {"a": 0, "b": 1},
        cell("trained", "initial"): {"a": 1, "b": 0.5},
        cell("trained", "trained"): {"a": 1, "b": 1},
    },
    11: {
        cell("initial", "initial"): {"b": 0, "a": 0},
        cell("initial", "trained"): {"b": 0, "a": 0},
        cell("trained", "initial"): {"b": 0, "a": 0},
        cell("trained", "trained"): {"b": 1, "a": 1},
    },
}


def test_the_writer_and_the_reader_effect_are_means_over_the_other_s_two_policies() -> None:
    """Seed 10: the writer brings 1 on a and 0 on b whoever reads, the reader 0 and 0.5; seed 11: both halves of 1."""
    assert effect("writer_effect", CELLS).value_SP.tolist() == [[1, 0], [0.5, 0.5]]
    assert effect("reader_effect", CELLS).value_SP.tolist() == [[0, 0.5], [0.5, 0.5]]
    found = cross_play("grpo", "held-out", CELLS)
    assert found.by_seed == {
        "writer_effect": {"10": 0.5, "11": 0.5},
        "reader_effect": {"10": 0.25, "11": 0.5},
    }
    assert found.effects["reader_effect"].mean == 0.375
    assert found.cells[cell("initial", "trained")] == {"10": 0.5, "11": 0}
    table = cross_play_table(found)
    assert "| writer trained | 0.375 | 1.000 |" in table
    assert "| reader effect | +0.375 [" in table
    assert table.endswith("| +0.250, +0.500 |")


def test_a_prediction_of_cross_play_names_the_arms_and_evaluations_that_are_played(tmp_path: Path) -> None:
    claim = {"claim": "c", "arm": "a", "minus": "b", "figure": "writer_effect", "above": 0.1}
    arms = {"a": [], "b": ["train.steps=2"]}
    tree = {"name": "s", "config": str(find_config("quickstart")), "seeds": [1], "arms": arms}
    study = LabStudy.model_validate({**tree, "predictions": [claim]})
    assert study.predictions[0].sides == (("a", "held-out"), ("b", "held-out"))
    assert [*play_study(study, tmp_path, None, "held-out")] == [
        f"{arm}-seed1: not finished, not played" for arm in ("a", "b")
    ]
    with pytest.raises(ConfigError, match=r"no prediction has one of its figures. Give --arm: a, b"):
        [*play_study(LabStudy.model_validate(tree), tmp_path, None, "held-out")]
    with pytest.raises(ConfigError, match=r"there is no arm 'c'. Give --arm: a, b"):
        [*play_study(study, tmp_path, "c", "held-out")]
