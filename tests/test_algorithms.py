"""Every estimator, loss and option of ``algorithm`` trains the quickstart: real rollouts, real DeepSpeed, two steps.

In this process, so that the libraries load once: ``build`` and ``train`` are what the command calls.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command import ROOT
from estimating import ESTIMATORS, LOSSES, estimate

from condensegrpo.assembly.build import build
from condensegrpo.assembly.data_order import problem_indices
from condensegrpo.config.load import load_config
from condensegrpo.core.errors import CondenseError, RolloutError, TooManyFailed
from condensegrpo.core.observer import Observer
from condensegrpo.core.trajectory import StopReason
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_credit, read_trajectories
from condensegrpo.tasks.ledger import Ledger
from condensegrpo.training.train import run_training

SMALL = (
    "train.steps=2",
    "train.problems_per_step=8",
    "train.samples_per_problem=4",
    "train.eval_every=0",
    "train.save_every=0",
    "evaluate.problems=4",
    "evaluate.variants={}",
    "task.options={min_ops: 2, max_ops: 3, eval_problems: 8}",
)
# a reward that differs among siblings of a policy which knows little yet, and turn rewards beside it
COMPOSED = (
    "reward={name: weighted_sum, options: {parts: [{name: correct, weight: 0.6}, {name: format, weight: 0.4}, "
    f"{{name: {ROOT}/tests/turn_reward.py:Brief, weight: 0.3}}]}}}}",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Listening(Observer):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.failures: list[str] = []

    def trajectories_failed(self, text: str, traceback: str) -> None:
        self.failures.append(text)

    def notice(self, text: str) -> None:
        self.said.append(text)


def run(folder: Path, *changes: str, observer: Observer | None = None) -> list[dict[str, float]]:
    """Train with some keys changed; the metrics of its steps."""
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *changes])
    assert run_training(
        build(config), RunFolder.create(folder), observer=observer or Observer(), stopping=lambda: False
    ), "all steps were taken"
    return [line for line in read_metrics(folder / "metrics.jsonl") if "rows" in line]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy that sometimes answers right: the quickstart's after a short warm start."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    short = "warm_start={steps: 100, turns_per_step: 16, probe_target: null}"
    optimiser = "warm_start.optimiser={lr: 0.01, betas: [0.9, 0.95], schedule: constant}"
    run(folder, "model.new.layers=1", "train.steps=0", short, optimiser)
    return str(folder / "origin" / "warm")


def from_warm(warm: str) -> tuple[str, ...]:
    return ("model.new=null", f"model.path={warm}", "warm_start.steps=0")


def assert_learned(lines: list[dict[str, float]]) -> None:
    assert lines
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["rows"] > 0 and line["grad_norm"] > 0 for line in lines)


# what the others add up has no other inputs, and test_credit_gradient.py has the gradient of each
@pytest.mark.parametrize(
    ("estimator", "loss"), [*zip(("gigpo", "mt_grpo", "fold_grpo", "efficient", "reinforce"), LOSSES, strict=False)]
)
def test_estimators_of_every_input_and_every_loss_train_the_quickstart(
    estimator: str, loss: str, warm: str, tmp_path: Path
) -> None:
    chosen = (f"algorithm.advantage.estimator={estimator}", f"algorithm.loss.name={loss}", "train.steps=1")
    (line,) = run(tmp_path / "run", *from_warm(warm), *COMPOSED, *chosen)
    assert_learned([line])
    assert line["turn_reward"] > 0
    assert line["ratio"] == pytest.approx(1, abs=1e-3)  # one update a batch: on policy


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_estimators_that_are_said_to_see_turn_rewards_do_and_no_other(estimator: str) -> None:
    columns = {"turns": [2, 2, 2], "results": [0, 0, -1]}
    with_none, with_some = (
        estimate(estimator, [1, 0, 0], turn_rewards=rewards, **columns) for rewards in ([0, 0, 0], [0.5, 0, 0.2])
    )
    assert (with_none.tolist() != with_some.tolist()) == ESTIMATORS[estimator].sees_turn_rewards


def test_nothing_is_said_of_turn_rewards_where_no_turn_is_paid(warm: str, tmp_path: Path) -> None:
    observer = Listening()
    run(tmp_path / "run", *from_warm(warm), "algorithm.advantage.estimator=grpo", "train.steps=1", observer=observer)
    assert [line.partition(":")[0] for line in observer.said] == [
        "transformers",
        "attention kernel",
        "sampler transformers",
    ]


def test_efficient_says_at_the_start_what_it_will_not_look_at(tmp_path: Path) -> None:
    observer = Listening()
    chosen = "algorithm={advantage: {estimator: efficient}, stops: {handling: {turn_limit: penalise}, penalty: 3.0}}"
    run(tmp_path / "run", *COMPOSED, chosen, "warm_start.steps=0", "train.steps=0", observer=observer)
    penalty, sampler, kernel = observer.said
    assert (sampler.partition(":")[0], kernel) == ("transformers", "attention kernel: sdpa")
    assert "algorithm.stops.penalty, which is subtracted from the total reward, changes nothing" in penalty


def test_several_updates_move_the_ratio_from_one_beside_importance_correction_and_whitening(
    warm: str, tmp_path: Path
) -> None:
    chosen = (
        "algorithm={advantage: {estimator: grpo, whiten: true}, updates_per_batch: 3, "
        "importance: {cap: 2.0, level: turn}}"
    )
    lines = run(tmp_path / "run", *from_warm(warm), *COMPOSED, chosen, "learner.optimiser.lr=0.002")
    assert_learned(lines)
    assert max(line["ratio_max"] for line in lines) > 1.01
    for line in lines:
        assert line["kl"] > 1e-7  # to the policy that sampled
        assert line["importance"] == pytest.approx(1, abs=1e-3)  # sampler and learner agree here
        assert line["importance_bounded"] == 0
        assert line["trajectories_without_advantage"] == 0  # whitening moves a zero too


def test_a_kl_term_keeps_the_policy_near_its_origin(warm: str, tmp_path: Path) -> None:
    """The reference is the policy before the first step and stays it; a heavy term holds the policy to it."""
    base = (*from_warm(warm), *COMPOSED, "train.steps=3", "learner.optimiser.betas=[0.5, 0.9]")
    free = run(tmp_path / "free", *base, "algorithm={advantage: {estimator: grpo}, kl: {coefficient: 1.0e-9}}")
    held = run(
        tmp_path / "held", *base, "algorithm={advantage: {estimator: grpo}, kl: {coefficient: 10.0, estimator: k2}}"
    )
    assert free[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert held[-1]["kl"] < free[-1]["kl"] / 2
    assert all(line["rows"] >= line["trajectories"] for line in held)  # trl#7068: groups of equal reward train too


def test_dynamic_sampling_drops_idle_groups_and_samples_new_ones(warm: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lines = run(folder, *from_warm(warm), "algorithm={advantage: {estimator: grpo}, resample_rounds: 3}")
    assert any(line["groups_dropped"] > 0 for line in lines)
    assert all(line["groups_of_equal_reward"] == 0 for line in lines)
    for step, line in enumerate(lines, start=1):
        read = read_trajectories(folder / f"trajectories/step_{step:06d}.parquet")
        ids = [one.trajectory.id for one in read]
        assert len(ids) == len(set(ids)) == line["trajectories"]
        assert len(ids) > 8 * 4  # more than one round was sampled
        credit = read_credit(folder / f"credit/step_{step:06d}.parquet")
        groups: dict[str, list[float]] = {}
        for one in read:
            groups.setdefault(one.trajectory.group_id, []).append(one.score.total)
        for one in read:  # a group trains if and only if its rewards differ, and there is room for it in the step
            differ = len(set(groups[one.trajectory.group_id])) > 1
            assert any(credit[one.trajectory.id].weights) == differ
            assert credit[one.trajectory.id].handling == ("train" if differ else "drop")
        trained = [group for group, rewards in groups.items() if len(set(rewards)) > 1]
        assert len(trained) <= 8


def test_broken_problems_among_those_sampled_anew_do_not_end_the_run(warm: str, tmp_path: Path) -> None:
    """A resample round may be a single problem: that all of a round failed says nothing of the run."""
    folder, observer = tmp_path / "run", Listening()
    chosen = ("algorithm={advantage: {estimator: grpo}, resample_rounds: 2}", "train.steps=1")
    ledger = Ledger(min_ops=2, max_ops=3).problems("train")
    sound = [ledger[index].id for index in problem_indices(seed=0, step=0, count=8, size=len(ledger))]
    task = (
        f"task={{name: '{ROOT}/tests/flaky_task.py:Flaky', "
        f"options: {{min_ops: 2, max_ops: 3, eval_problems: 8, sound: {json.dumps(sound)}}}}}"
    )
    (line,) = run(folder, *from_warm(warm), *chosen, task, observer=observer)
    assert line["stop/environment_error"] > 0
    assert line["rows"] > 0
    failed = round(line["stop/environment_error"] * line["trajectories"])
    (told,) = observer.failures  # once for all rounds
    assert told.startswith(f"{failed} of {line['trajectories']:.0f} trajectories failed (environment_error): the envi")
    assert "tests/flaky_task.py:" in told
    with pytest.raises(RolloutError, match=r"trajectories failed.*this problem is broken"):
        run(tmp_path / "none", *from_warm(warm), *chosen, task.replace(json.dumps(sound), "[]"))


def test_a_reward_that_fails_most_of_two_steps_stops_the_run_which_resumes_once_it_is_fixed(
    warm: str, tmp_path: Path
) -> None:
    broken, rewards = tmp_path / "broken", tmp_path / "rewards.py"
    broken.touch()
    rewards.write_text(
        "from pathlib import Path\n"
        "class Fragile:\n"
        "    def __call__(self, trajectory, problem):\n"
        f"        if trajectory.sample and Path({str(broken)!r}).exists():\n"
        "            raise LookupError('no judge')\n"
        "        return {'brief': 1.0 / len(trajectory.turns[0].output_ids)}\n"
    )
    chosen = (
        *from_warm(warm),
        "algorithm={advantage: {estimator: grpo}, importance: {cap: 2}}",
        f"reward.name='{rewards}:Fragile'",
        "rollout.staleness=1",
        "train.steps=3",
    )
    config, folder = load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *chosen]), tmp_path / "run"
    with pytest.raises(TooManyFailed, match=r"24 of 32 .* the reward Fragile: LookupError: no judge"):
        run_training(build(config), RunFolder.create(folder), observer=Observer(), stopping=lambda: False)
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_000001"]
    with pytest.raises(TooManyFailed, match=r"12 of 16 .* more than train.max_failed=0\.5"):  # of an evaluation
        run(tmp_path / "other", *chosen, "evaluate.samples=4")
    broken.unlink()
    assert run_training(build(config), RunFolder(folder), observer=Observer(), stopping=lambda: False)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "rows" in line]
    failed = [(line["step"], line.get("stop/reward_error", 0)) for line in lines]
    assert failed == [(1, 0.75), (2, 0), (3, 0)]  # the batch of step 3 was prefetched, and is sampled again


def test_a_masked_stop_trains_nothing_and_counts_nowhere(warm: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    handling = "{format: mask, turn_limit: penalise, output_length: penalise}"
    chosen = f"algorithm={{advantage: {{estimator: grpo}}, stops: {{handling: {handling}}}}}"
    lines = run(folder, *from_warm(warm), *COMPOSED, chosen)
    assert all(line["masked"] == pytest.approx(line["stop/format"]) for line in lines)
    step = next(int(line["step"]) for line in lines if line["masked"] > 0)
    read = read_trajectories(folder / f"trajectories/step_{step:06d}.parquet")
    credit = read_credit(folder / f"credit/step_{step:06d}.parquet")
    masked = [one.trajectory.id for one in read if one.trajectory.stop is StopReason.FORMAT]
    assert masked
    assert not any(any(credit[name].weights) or any(credit[name].advantages) for name in masked)
    by_stop = {StopReason.FORMAT: "mask", StopReason.TURN_LIMIT: "penalise", StopReason.OUTPUT_LENGTH: "penalise"}
    assert all(credit[one.trajectory.id].handling == by_stop.get(one.trajectory.stop, "train") for one in read)


WRONG_OPTIONS = (
    ("grpo", "eps", "-1.0e-9", "at least 0"),
    ("grpo", "scale", "stdd", "'std' or 'none'"),
    ("rloo", "singleton", "drop", "'zero' or 'raw'"),
    ("gigpo", "coef", ".nan", "a finite number"),
    ("turn_discounted", "gamma", "2", "at most 1"),
    ("ms_po", "gamma", "-0.5", "at least 0"),
    ("reinforce", "clamp", "0", "greater than 0"),
    ("reinforce", "clamp", "true", "a number"),
    ("efficient", "guard", "1.1", "at most 1"),
    ("efficient", "coefficient", "'0.2'", "a number"),
    ("efficient", "accuracy", "stdd", "'std' or 'none'"),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "algorithm.advantage.estimator=gropo",
            r"looking for 'gropo' among the estimators: not installed. Did you mean 'grpo'\?",
        ),
        ("algorithm.loss.name=gsp", r"looking for 'gsp' among the losses: not installed. Did you mean 'gspo'\?"),
        (
            "algorithm={advantage: {estimator: ms_grpo, options: {coeff: 1}}}",
            "the estimator 'ms_grpo': it has no option 'coeff'",
        ),
        (
            "algorithm={advantage: {estimator: turn_discounted, options: {gamma: 2}}}",
            "the estimator 'turn_discounted': the option gamma is 2, wanted at most 1",
        ),
        (
            "algorithm={loss: {name: gspo, options: {clip_low: -1}}}",
            "the loss 'gspo': the option clip_low is -1, wanted at least 0",
        ),
        ("algorithm.importance.cap=0.5", "algorithm.importance: .*cap"),
        ("algorithm={stops: {handling: {lost: mask}}}", "algorithm.stops.handling.lost"),
        ("train.samples_per_problem=1", "samples_per_problem: found 1"),
    ],
)
def test_a_wrong_algorithm_stops_before_a_model_is_loaded(change: str, message: str) -> None:
    with pytest.raises(CondenseError, match=message):
        build(load_config(ROOT / "configs" / "quickstart.yaml", [change]))
