"""The condenser that ranks units, with a scorer whose scores are known; and in a real engine with real attention."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from conformance import check_account, count, history, statuses, turns, unit
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.attention.scorer import ScriptedScorer
from condensegrpo.condensers.attention import AttentionCondenser, choose_units
from condensegrpo.config.options import build_plugin
from condensegrpo.core.condenser import Budget, Condensed, UnitScorer, with_tokens
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import History, Unit

NOW = {"smoothing": 0.0, "lookback": 0, "hysteresis": 1.0}  # each turn for itself


def condense(condenser: AttentionCondenser, past: History, tokens: int, scorer: UnitScorer) -> Condensed:
    budget = Budget(tokens=tokens - count(past.pinned), prompt_tokens=tokens, scorers={"policy": scorer})
    return asyncio.run(condenser.condense(with_tokens(past, count), budget))


def gold(unit: Unit) -> float:
    return float(unit.reply.content.count("g"))


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_newest_and_what_scores_most_are_kept_in_their_order() -> None:
    past = history(*(unit(turn, text) for turn, text in enumerate(["g.....", "......", "gg....", "......", "......"])))
    # the pinned messages take 23 tokens, each unit 10
    found = condense(AttentionCondenser(**NOW), past, 23 + 30, ScriptedScorer(gold))
    assert turns(found) == [0, 2, 4]
    assert statuses(past, found) == "kdkdk"
    assert found.reason == "kept 3 of 5 units by the attention of policy"
    check_account(past, found)


def test_units_are_ranked_by_score_a_token() -> None:
    past = history(unit(0, "gg" + "." * 40), unit(1, "g"), unit(2, "."), unit(3, "."))
    found = condense(AttentionCondenser(**NOW), past, 23 + 46 + 5, ScriptedScorer(gold))
    assert turns(found) == [1, 2, 3], "the long unit has twice the score and nine times the tokens"


def test_of_equal_scores_the_newer_stay() -> None:
    past = history(*(unit(turn, "......") for turn in range(5)))
    assert turns(condense(AttentionCondenser(), past, 23 + 30, ScriptedScorer(lambda unit: 0.0))) == [2, 3, 4]


def test_within_the_budget_nothing_is_scored() -> None:
    scorer = ScriptedScorer(gold)
    past = history(unit(0), unit(1), unit(2))
    assert condense(AttentionCondenser(), past, 1000, scorer).units == past.units
    assert scorer.sizes == []


def test_the_newest_stays_even_if_it_does_not_fit() -> None:
    past = history(unit(0, "ggg"), unit(1, "." * 100))
    found = condense(AttentionCondenser(**NOW), past, 50, ScriptedScorer(gold))
    assert turns(found) == [1]


@given(
    worth=st.lists(st.floats(0, 10), max_size=12),
    costs=st.lists(st.integers(1, 50), min_size=13, max_size=13),
    room=st.integers(0, 300),
)
def test_what_is_chosen_fits_and_leaves_no_room_for_more(worth: list[float], costs: list[int], room: int) -> None:
    costs = costs[: len(worth) + 1]
    chosen = choose_units(worth, costs, room)
    used = sum(costs[place] for place in chosen)
    assert chosen[0] == len(costs) - 1
    assert len(set(chosen)) == len(chosen)
    assert used <= room or len(chosen) == 1
    assert all(used + costs[place] > room for place in range(len(costs)) if place not in chosen)


def test_the_example_of_the_docstring() -> None:
    assert choose_units([3, 1, 2], [4, 1, 4, 2], 8) == [3, 0, 1]


# --- over turns -----------------------------------------------------------------------------------------------------


class ByTurn:
    """Scores that depend on how long the history is: {units: scores}."""

    def __init__(self, scores: dict[int, list[float]]) -> None:
        self.scores = scores
        self.sizes: list[int] = []

    async def score(self, histories: Sequence[History], tokens: int) -> Sequence[Sequence[float]]:
        self.sizes += [len(past.units) for past in histories]
        return [self.scores[len(past.units)] for past in histories]


def same(total: int) -> History:
    return history(*(unit(turn, "......") for turn in range(total)))  # 10 tokens each


def test_scores_are_smoothed_over_the_turns_that_are_looked_back_on() -> None:
    scorer = ByTurn({3: [8.0, 1.0, 0.0], 4: [1.0, 2.0, 0.0, 0.0]})
    for smoothing, kept in ((0.0, 1), (0.5, 0)):  # 0: ½·8 + ½·1 = 4.5 against ½·1 + ½·2 = 1.5
        condenser = AttentionCondenser(smoothing=smoothing, lookback=1, hysteresis=1.0)
        assert turns(condense(condenser, same(4), 23 + 20, scorer)) == [kept, 3]


def test_a_unit_that_was_the_newest_has_no_score_to_be_smoothed_with() -> None:
    scorer = ByTurn({3: [1.0, 1.0, 0.0], 4: [1.0, 1.0, 1.2, 0.0]})
    condenser = AttentionCondenser(smoothing=0.9, lookback=1, hysteresis=1.0)
    assert turns(condense(condenser, same(4), 23 + 20, scorer)) == [2, 3]


def test_a_dropped_unit_returns_only_if_it_is_clearly_better() -> None:
    for now, kept in ((1.2, 1), (1.3, 0)):  # 0 was dropped a turn ago: 1.25 times better than 1 it must be
        scorer = ByTurn({3: [1.0, 2.0, 0.0], 4: [now, 1.0, 0.0, 0.0]})
        condenser = AttentionCondenser(smoothing=0.0, lookback=1, hysteresis=1.25)
        assert turns(condense(condenser, same(4), 23 + 20, scorer)) == [kept, 3]


def test_turns_that_were_within_the_budget_dropped_nothing_and_are_not_read() -> None:
    scorer = ByTurn({4: [1.2, 1.0, 0.0, 0.0]})
    assert turns(condense(AttentionCondenser(lookback=3), same(4), 23 + 30, scorer)) == [0, 1, 3]
    assert scorer.sizes == [4]


def test_what_is_looked_back_on_is_bounded() -> None:
    scorer = ScriptedScorer(gold)
    condense(AttentionCondenser(lookback=2), same(60), 23 + 30, scorer)
    assert scorer.sizes == [58, 59, 60]


def test_nothing_is_held_from_one_episode_to_another() -> None:
    condenser, scorer = AttentionCondenser(), ScriptedScorer(gold)
    alone = condense(condenser, same(6), 53, scorer)
    condense(condenser, history(*(unit(turn, "gggggg") for turn in range(9))), 53, scorer)
    assert condense(condenser, same(6), 53, scorer) == alone


# --- what can go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scores", [[1.0], [float("nan")] * 4, [-1.0] * 4, [float("inf")] * 4])
def test_scores_that_are_none_are_an_error_and_never_a_ranking(scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"the scorer 'policy' returned .* for 4 units"):
        condense(AttentionCondenser(**NOW), same(4), 40, ByTurn({4: scores}))


def test_a_budget_without_the_scorer_names_those_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"wanted the scorer 'some/model', and the budget has policy"):
        condense(AttentionCondenser(scorer="some/model"), same(4), 40, ScriptedScorer(gold))


@pytest.mark.parametrize(
    "options", [{"smoothing": 1.0}, {"smoothing": -0.1}, {"lookback": -1}, {"lookback": 1.5}, {"hysteresis": 0.9}]
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match="setting up the condenser 'attention'"):
        build_plugin("condensers", "attention", options)
