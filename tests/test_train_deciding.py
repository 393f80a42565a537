"""Training with condensers that the policy decides about: two steps of a small model whose replies call their tools."""

import json
from pathlib import Path
from typing import Any

import pytest
from deciding import call
from talk import save_model

from condensegrpo.algorithms.segments import broken_invariants
from condensegrpo.assembly.build import build
from condensegrpo.assembly.preflight import check_model
from condensegrpo.config.load import validate
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.display.console import quiet_libraries
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import provenance_of, read_credit, read_figures, read_trajectories
from condensegrpo.training.train import run_training

ADD = call("calculator", expression="3 + 4")
WRITE = call("memory_write", name="sum", text="seven")
SCRIPT = [
    WRITE,
    call("branch", description="add"),
    ADD,
    ADD,
    call("return", message="7"),
    call("prune", turns=[0]),
    ADD,
]
POLICY = rf"""
import re

from condensegrpo.learner.model_folder import load_tokenizer
from condensegrpo.samplers.scripted import TextSampler

SCRIPT = {SCRIPT!r}


class Policy(TextSampler):
    '''Plays the script; every second sample answers right.'''

    def __init__(self, model_path):
        super().__init__(load_tokenizer(model_path), None)

    async def sample(self, prompt_ids, params):
        answer = "7" if int(params.trajectory.rpartition("/")[2]) % 2 else "8"
        script = [*SCRIPT, f"<answer>{{answer}}</answer>"]
        turns = re.findall(r"\[turn (\d+):", self._tokenizer.decode(list(prompt_ids)))
        self._say = lambda request: script[int(turns[-1]) + 1 if turns else 0]
        return await super().sample(prompt_ids, params)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    quiet_libraries()
    folder = tmp_path_factory.mktemp("deciding")
    save_model(folder / "model")
    for name, number in (("train", 4), ("eval", 5)):
        row = {"question": f"3 and {number}?", "answer": f"3+{number} = <<3+{number}={3 + number}>>\n#### {3 + number}"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "policy.py").write_text(POLICY)
    stages = [
        *({"name": name, "over": 0} for name in ("fold", "prune")),
        {"name": "last_k", "options": {"keep_last": 9}},
    ]
    paid = [{"name": "correct"}, {"name": "failed_calls"}, {"name": "main_line", "options": {"budget": 10000}}]
    return {
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "task": {"name": "gsm8k", "data": str(folder / "train.jsonl"), "eval_data": str(folder / "eval.jsonl")},
        "condenser": {"name": "pipeline", "options": {"stages": [*stages, {"name": "memory", "over": 0}]}},
        "sampler": {"name": f"{folder / 'policy.py'}:Policy"},
        "reward": {"name": "weighted_sum", "options": {"parts": paid}},
        "rollout": {
            "limits": {"max_turns": 9, "max_context_tokens": 6000, "max_output_tokens": 200},
            "tools": {"use": ["calculator"], "format": "tagged"},
            "condense": {"meter": "tokens", "schedule": [[1, 1.0], [3, 0.8]]},
        },
        "algorithm": {"advantage": {"estimator": "ms_grpo"}},
        "learner": {"tokens_per_micro_batch": 7000, "threads": 1},
        "train": {"steps": 2, "problems_per_step": 1, "samples_per_problem": 2, "eval_every": 0, "save_every": 1},
        "evaluate": {"problems": 1},
    }


def trained(tree: dict[str, Any], name: str, *, stops: bool = False) -> RunFolder:
    """A run; with ``stops`` interrupted before its first step, after it and in the last save, and resumed each time."""
    config = validate({**tree, "name": name}, source="test")
    folder = RunFolder.create(Path(config.runs_dir) / name)
    with folder.locked():
        for steps in range(3) if stops else ():
            asked = iter([False] * steps + [True])
            assert not run_training(
                build(config), folder, observer=Observer(), stopping=lambda asked=asked: next(asked)
            )
            assert next(asked, None) is None
            lines = read_metrics(folder.metrics)
            assert [line["step"] for line in lines if "loss" in line] == [*range(1, steps + 1)]
            assert [line["step"] for line in lines if "eval/success" in line] == [0]  # the last comes with the resume
        assert run_training(build(config), folder, observer=Observer(), stopping=lambda: False)
    return folder


def trajectories(folder: RunFolder, step: int) -> list[Trajectory]:
    found = (each.trajectory for each in read_trajectories(folder.trajectories(step)))
    return sorted(found, key=lambda one: one.sample)


def test_two_steps_train_what_the_policy_decided_and_resume_bit_equal(tree: dict[str, Any]) -> None:
    whole, resumed = both = trained(tree, "whole"), trained(tree, "resumed", stops=True)
    for step, budget in ((1, 6000), (2, 5400)):
        found = trajectories(whole, step)
        provenance = provenance_of(read_figures(whole.trajectories(step)))
        assert provenance is not None
        assert provenance.max_context_tokens == budget
        assert len(found) == 2
        for one in found:
            assert broken_invariants(one) == ()
            assert [turn.tool_successes for turn in one.turns] == [1] * len(SCRIPT) + [0]
            assert f" of {budget} context tokens used" in one.turns[0].observations[0].text
            reasons = [turn.condensation.reason if turn.condensation else "" for turn in one.turns]
            assert reasons[:5] == [""] * 5
            assert reasons[5] == "fold: folded turns 2–3 by the policy's return in turn 4"
            assert reasons[6].startswith(f"{reasons[5]}; prune: pruned turn 0 by the policy's call in turn 5; memory")
            assert "[Your notes]\nsum: seven" in "".join(message.text for message in one.turns[7].context)
        credit = read_credit(whole.credit(step))
        assert all(any(credit[one.id].advantages) for one in found)
        assert [one.turns for one in trajectories(resumed, step)] == [one.turns for one in found]
    learned = [[line["grad_norm"] for line in read_metrics(folder.metrics) if "loss" in line] for folder in both]
    assert len(learned[0]) == 2
    assert learned[0] == learned[1]
    evaluated = [[line["step"] for line in read_metrics(folder.metrics) if "eval/success" in line] for folder in both]
    assert evaluated == [[0, 2], [0, 2]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"meter": "none"},
            r"rollout.condense.meter: found none, .* when it calls prune. Set rollout.condense.meter=turns",
        ),
        (
            {"when": "over_budget"},
            r"rollout.condense.when: found over_budget, .* by branch, return, prune, memory_write",
        ),
        ({"schedule": [0, 1.0]}, r"rollout.condense.schedule.0: found 0, wanted a list"),
        ({"schedule": [[3, 1.0], [3, 0.5]]}, r"the steps of schedule are \[3, 3\], wanted each above the last"),
    ],
)
def test_settings_that_do_not_fit_a_deciding_policy_are_refused(
    tree: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    rollout = {**tree["rollout"], "condense": {**tree["rollout"]["condense"], **changes}}
    with pytest.raises(ConfigError, match=words):
        build(validate({**tree, "rollout": rollout}, source="test"))


def test_a_tool_of_the_run_with_the_name_of_a_condensers_tool_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        'def branch(name: str) -> str:\n    """Branches.\n\n    Args:\n        name: of it."""\n'
    )
    rollout = {**tree["rollout"], "tools": {"use": [f"{tmp_path / 'own.py'}:branch"], "format": "tagged"}}
    with pytest.raises(
        ConfigError, match=r"condenser pipeline: .*'branch', which another tool .*of the run are: branch"
    ):
        build(validate({**tree, "rollout": rollout}, source="test"))


def test_a_format_that_runs_python_only_and_a_stage_that_waits_are_refused(tree: dict[str, Any]) -> None:
    rollout = {**tree["rollout"], "tools": {"use": ["python"], "format": "code"}}
    with pytest.raises(ConfigError, match=r"pipeline offers branch, .*format=code runs the tool python and no other"):
        build(validate({**tree, "rollout": rollout}, source="test"))
    waiting = {"name": "pipeline", "options": {"stages": [{"name": "fold"}]}}
    with pytest.raises(ConfigError, match=r"the policy decides when fold condenses.*set over: 0"):
        build(validate({**tree, "condenser": waiting}, source="test"))


def test_a_question_must_fit_the_smallest_budget(tree: dict[str, Any]) -> None:
    rollout = {**tree["rollout"], "condense": {"meter": "turns", "schedule": [[0, 1.0], [9, 0.1]]}}
    with pytest.raises(ConfigError, match="the context budget is 600"):
        check_model(build(validate({**tree, "rollout": rollout}, source="test")), tree["model"]["path"])
