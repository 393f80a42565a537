"""What contexts know of the answer: measured by a real model, paid by the turn, told by the commands."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import add_trajectory, condensation, ledger_episode, scored, trajectory, turn
from talk import tokenizer
from typer.testing import CliRunner

from condensegrpo.cli.app import app
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import load_config
from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import InformationChange, information_changes, information_lost, mean_curve
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.engine import AnswerProbe
from condensegrpo.episodes.render import Renderer
from condensegrpo.evaluation.figures import evaluation_of
from condensegrpo.metrics.trajectories import summarise

PROBLEM = Problem(id="p", question="?", answer="7")


def knowing(*nats: float | None, declared: dict[int, Any] | None = None) -> Trajectory:
    """An episode whose contexts know so much; ``declared`` holds the condensation of a turn."""
    turns = [
        replace(turn([1], [2], condensation=(declared or {}).get(number)), answer_logprob=value)
        for number, value in enumerate(nats)
    ]
    return trajectory(*turns)


# --- measured ---------------------------------------------------------------------------------------------------------


class Certain:
    """A sampler that measures −1 nat a token, and notes down what it measured."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[float]:
        self.asked.append((tuple(prompt_ids), tuple(output_ids)))
        return [-1.0] * len(output_ids)


def probe(model: Certain, form: str = "<answer>{answer}</answer>") -> AnswerProbe:
    return AnswerProbe(sampler=model, renderer=Renderer(tokenizer()), form=form)


def text(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids)))


def test_the_answer_is_measured_behind_the_prompt_and_what_opens_it() -> None:
    model = Certain()
    assert asyncio.run(probe(model).measure(PROBLEM, (5, 6))) == -len("7</answer>")
    ((prompt, output),) = model.asked
    assert prompt[:2] == (5, 6)
    assert (text(prompt[2:]), text(output)) == ("<answer>", "7</answer>")


def test_a_problem_without_ground_truth_is_not_measured() -> None:
    model = Certain()
    assert asyncio.run(probe(model).measure(replace(PROBLEM, answer=None), (5, 6))) is None
    assert model.asked == []


# --- paid -------------------------------------------------------------------------------------------------------------


def paid(one: Trajectory, **options: float) -> list[float]:
    reward: Any = build_plugin("rewards", "answer_information", options)
    return list(reward.turn_rewards(one, PROBLEM))


def test_a_turn_is_paid_what_the_next_context_knows_more() -> None:
    assert paid(knowing(-9.0, -4.0, -4.5)) == [5.0, -0.5, 0.0]


def test_a_summary_is_paid_for_the_context_that_it_leaves() -> None:
    assert paid(knowing(-9.0, -4.0, None, -6.0)) == [5.0, 0.0, -2.0, 0.0]


def test_gains_are_bounded() -> None:
    assert paid(knowing(-90.0, -1.0, -50.0), bound=8.0) == [8.0, -8.0, 0.0]


def test_unbounded_gains_add_up_to_what_the_last_context_knows_more_than_the_first() -> None:
    assert math.fsum(paid(knowing(-9.0, -3.0, -7.0, None, -1.0), bound=1000.0)) == pytest.approx(8.0)


def test_an_episode_without_turns_pays_none() -> None:
    assert paid(knowing()) == []


def test_what_was_not_measured_cannot_be_paid() -> None:
    with pytest.raises(ValueError, match=r"set rollout\.answer_form"):
        paid(knowing(None, None))


@pytest.mark.parametrize("part", ["{name: answer_information, weight: 0.1}", "answer_information"])
def test_a_run_that_pays_what_it_does_not_measure_is_refused_at_its_start(part: str) -> None:
    parts = f"reward={{name: weighted_sum, options: {{parts: [{{name: correct}}, {part}]}}}}"
    file = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"rollout\.answer_form is null"):
        check_values(load_config(file, [parts]))
    check_values(load_config(file, [parts, "rollout.answer_form='<answer> {answer} </answer>'"]))


@pytest.mark.parametrize("form", ["<answer></answer>", "{answer}{answer}"])
def test_a_form_has_one_place_for_the_answer(form: str) -> None:
    file = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"answer_form.*\n?.*exactly once"):
        load_config(file, [f"rollout.answer_form='{form}'"])


# --- what was lost ----------------------------------------------------------------------------------------------------

DROPPED_0 = condensation("dk", [9, 9], before=30, after=20)


def test_what_a_condensation_took_is_told_with_what_was_dropped() -> None:
    one = knowing(-1.5, -1.2, -9.7, declared={2: DROPPED_0})
    (change,) = information_changes(one)
    assert change == InformationChange(turn=2, before=-1.2, after=-9.7, dropped=(0,))
    assert change.description == "information about the answer fell from −1.2 to −9.7 nats when turn 0 was dropped"
    assert information_lost(one) == pytest.approx(8.5)


def test_a_turn_that_was_dropped_before_is_not_dropped_again() -> None:
    again = condensation("ddk", [9, 9, 9], before=40, after=20)
    found = information_changes(knowing(-1.0, -1.0, -2.0, -3.0, declared={2: DROPPED_0, 3: again}))
    assert [change.dropped for change in found] == [(0,), (1,)]


def test_a_condensation_that_adds_information_costs_none() -> None:
    one = knowing(-5.0, -4.0, -3.0, declared={2: DROPPED_0})
    assert information_lost(one) == 0.0
    assert information_changes(one)[0].description.startswith(
        "information about the answer rose from −4.0 to −3.0 nats"
    )


def test_nothing_is_lost_where_nothing_was_condensed_and_unknown_where_nothing_was_measured() -> None:
    assert information_lost(knowing(-5.0, -9.0)) == 0.0
    assert information_lost(knowing(None, None)) is None


def test_several_dropped_turns_are_listed() -> None:
    change = InformationChange(turn=5, before=-1.0, after=-2.0, dropped=(1, 2))
    assert change.description.endswith("when turns 1, 2 were dropped")
    assert change._replace(dropped=()).description.endswith("when turn 5 was condensed")


def test_the_mean_curve_is_over_those_that_got_there() -> None:
    assert mean_curve([(-2.0, -4.0), (-4.0, -6.0, -1.0)]) == (-3.0, -5.0, -1.0)
    assert mean_curve([(None, -4.0), (None, None)]) == (None, -4.0)
    assert mean_curve([]) == ()


# --- in metrics, evaluations and the inspector ------------------------------------------------------------------------


def test_metrics_have_what_the_last_context_knew_and_what_was_lost() -> None:
    one = scored(knowing(-1.0, -2.0, -9.0, declared={2: DROPPED_0}), 1.0)
    other = scored(knowing(-1.0, -3.0), 1.0)
    found = summarise([each.figures for each in (one, other)])
    assert (found["answer_information"], found["answer_information_lost"]) == (-6.0, 3.5)
    unmeasured = summarise([scored(knowing(None), 1.0).figures])
    assert "answer_information" not in unmeasured


def test_an_evaluation_has_the_curve_by_turn() -> None:
    facts = [scored(knowing(*nats), 1.0).figures for nats in ((-1.0, -2.0), (-3.0,))]
    assert evaluation_of("e", facts, seed=0, seconds=0.0).information == (-2.0, -2.0)
    unmeasured = [scored(knowing(None), 1.0).figures]
    assert evaluation_of("e", unmeasured, seed=0, seconds=0.0).information == ()


def test_the_inspector_shows_the_curve_and_says_what_was_lost(tmp_path: Path) -> None:
    note = "<note> 3 </note>"
    one = ledger_episode([note] * 4, ["+1", "+2", "-1"], keep_last=1)
    known = [-2.3, -2.3, -1.2, -9.7]
    turns = tuple(replace(each, answer_logprob=nats) for each, nats in zip(one.turns, known, strict=True))
    file = tmp_path / "t.parquet"
    add_trajectory(file, scored(replace(one, turns=turns), 0.0))
    result = CliRunner().invoke(app, ["inspect-trajectory", str(file)])
    assert result.exit_code == 0, result.output
    assert "log-prob. of answer" in result.output
    assert "fell from −1.2 to −9.7 nats when turn 1 was dropped" in " ".join(result.output.split())
