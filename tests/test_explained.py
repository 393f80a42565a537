"""The terms of an advantage against the tensors of ``advantages``: on groups at random, and by hand."""

from inspect import Parameter, signature
from random import Random
from typing import Any

import pytest
import torch
from estimating import Row, run

from condensegrpo.algorithms.advantages import ESTIMATORS
from condensegrpo.algorithms.explained import EXPLAINED, Case, GroupMember

CONTEXTS = (60, 200, 500, 900, 4000)
ANCHORS = {"context_low": 100, "context_high": 1000}
OTHER_OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {  # beside the defaults
    "grpo": ({"scale": "none"}, {"singleton": "raw"}),
    "ms_grpo": ({"coef": 0.5},),
    "mt_grpo": ({"coef": 0.5},),
    "ms_po": ({"gamma": 0.5},),
    "rloo": ({"singleton": "raw"},),
    "reinforce": ({"clamp": 2.0},),
    "turn_discounted": ({"gamma": 0.0}, {"gamma": 0.5, "scale": "none"}),
    "efficient": ({"accuracy": "none", "guard": 1.0}, {"min_pass_rate": 0.7, "coefficient": 2.0}),
    "gigpo": ({"coef": 0.5, "gamma": 0.5}, {"scale": "none"}),
}
CASES = [(name, options) for name in ESTIMATORS for options in ({}, *OTHER_OPTIONS.get(name, ()))]


def drawn(draw: Random, *, unit: bool) -> tuple[list[Row], list[GroupMember]]:
    """Trajectories of up to two groups, as rows of a batch and as members; rewards on a grid: many are equal."""
    rows, members = [], []
    for _ in range(draw.randint(1, 8)):
        outcome = draw.choice((0.0, 0.5, 1.0)) if unit else draw.randint(-6, 6) / 2
        reward, turns = draw.randint(-2, 2) / 2, draw.randint(1, 4)
        result, states = draw.randint(-1, turns - 1), [draw.randint(0, 2) for _ in range(turns)]
        rows.append((outcome, reward, draw.choice((-7, 40)), turns, result))
        truncated = draw.random() < 0.3
        members.append(GroupMember(outcome, reward, turns, result, draw.choice(CONTEXTS), truncated, states))
    return rows, members


def columns(name: str, members: list[GroupMember]) -> dict[str, Any]:
    """The columns that an estimator takes besides the rows."""
    longest = max(member.turns for member in members)
    return {
        "efficient": {
            "contexts": [member.context for member in members],
            "truncated_N": torch.tensor([member.truncated for member in members]),
        },
        "gigpo": {"state_NK": torch.tensor([[*each.states, *[-1] * (longest - each.turns)] for each in members])},
    }.get(name, {})


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_terms_add_up_to_what_the_estimator_returns(name: str, options: dict[str, Any]) -> None:
    draw = Random(0)
    for _ in range(30):
        rows, members = drawn(draw, unit=name == "efficient")
        table = run(name, rows, **columns(name, members), **options).tolist()
        for place, member in enumerate(members):
            same = [other for other, row in enumerate(rows) if row[2] == rows[place][2]]
            for turn in range(member.turns):
                case = Case([members[other] for other in same], same.index(place), turn)
                terms = EXPLAINED[name](case, **options, **(ANCHORS if name == "efficient" else {}))
                assert sum(term.value for term in terms) == pytest.approx(table[place][turn], abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_options_and_defaults_are_those_of_the_estimator(name: str) -> None:
    def keywords(function: Any) -> dict[str, object]:
        every = signature(function).parameters.values()
        return {each.name: each.default for each in every if each.kind is Parameter.KEYWORD_ONLY}

    columns_of_a_batch = ("context_N", "truncated_N", "state_NK")
    wanted = {key: value for key, value in keywords(ESTIMATORS[name]).items() if key not in columns_of_a_batch}
    assert keywords(EXPLAINED[name]) == wanted


def test_a_term_shows_its_numbers() -> None:
    def member(outcome: float, reward: float, turns: int, result: int) -> GroupMember:
        return GroupMember(outcome, reward, turns, result, 100, False, tuple(range(turns)))

    group = [member(0, 1, 2, -1), member(1, 3, 3, 1), member(2, 2, 2, 0)]  # the example of advantages/turns.py
    outcome, turn = EXPLAINED["ms_grpo"](Case(group, 1, 1), coef=0.5, eps=0.0)
    assert outcome == (
        "N(R^O)",
        "the outcome against the group: (R^O − mean) / (deviation + ε) = (1 − 1) / (1 + 0)",
        0.0,
    )
    assert turn.name == "coef·N(R^T)·b(t)"
    assert turn.filled.startswith("up to the first tool result, of turn 1; 0.5 · the turn rewards against the group")
    assert turn.filled.endswith("= (3 − 2) / (1 + 0)")
    assert turn.value == 0.5
    (*_, after) = EXPLAINED["ms_grpo"](Case(group, 1, 2))
    assert after == ("coef·N(R^T)·b(t)", "after the first tool result, of turn 1, so b(t) = 0", 0.0)
    (rest,) = EXPLAINED["rloo"](Case(group, 0, 0))
    assert rest == ("R − mean of the others", "0 − 1.5", -1.5)
