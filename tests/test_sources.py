"""Credit of sources by hand: what the last reply was sampled without earns less where the advantage is positive."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from builders import scored, trajectory, turn
from estimating import ESTIMATORS
from hypothesis import given
from hypothesis import strategies as st

from condensegrpo.algorithms.credit import Estimator, source_factors
from condensegrpo.algorithms.settings import AggregationSettings, SourceCredit, StopSettings
from condensegrpo.core.messages import Message
from condensegrpo.core.trajectory import Condensation, Span, SpanStatus, Trajectory, Turn
from condensegrpo.training.learn_step import StepCredit, give_credit

KEPT, DROPPED, REWRITTEN = SpanStatus.KEPT, SpanStatus.DROPPED, SpanStatus.REWRITTEN
HALF = SourceCredit(dropped=0, rewritten=0.5)


def seeing(*statuses: tuple[int, SpanStatus], result: str = "", kind: str = "act") -> Turn:
    """A turn whose prompt was rewritten: what became of the unit of each turn."""
    spans = [Span(first=at, last=at, units=1, status=status, tokens=1) for at, status in statuses]
    made = Condensation(condenser="c", reason="", tokens_before=9, tokens_after=2, spans=tuple(spans))
    answer = Message(role="tool", content=result, tool_call_id="call_0", name="recall")
    return replace(turn([1], [2], condensation=made if spans else None, observations=[answer]), kind=kind)


def test_the_prompt_of_the_last_reply_decides_and_turns_after_its_condensation_are_shown() -> None:
    early = seeing((0, DROPPED))
    newest = seeing((0, DROPPED), (1, REWRITTEN), (2, KEPT))
    assert source_factors(trajectory(seeing(), early, seeing(), newest, seeing()), HALF) == [0, 0.5, 1, 1, 1]
    assert source_factors(trajectory(seeing(), early, seeing()), HALF) == [0, 1, 1]
    assert source_factors(trajectory(), HALF) == []


def test_a_turn_that_a_shown_result_recalls_counts_as_shown() -> None:
    recalling = seeing((0, DROPPED), result="<result>[recalled from turn 0]\npage</result>")
    shown, gone = seeing((0, DROPPED), (1, KEPT)), seeing((0, DROPPED), (1, DROPPED))
    assert source_factors(trajectory(seeing(), recalling, shown), HALF) == [1, 1, 1]
    assert source_factors(trajectory(seeing(), recalling, gone), HALF) == [0, 0, 1]
    masked = seeing((0, DROPPED), (1, REWRITTEN))  # a placeholder stands for the result
    assert source_factors(trajectory(seeing(), recalling, masked), SourceCredit()) == [0, 1, 1]


def test_a_result_that_only_reads_like_a_recall_shows_no_turn() -> None:
    said = seeing(result="[recalled from turn 99]\nx")
    assert source_factors(trajectory(seeing(), said, seeing((0, DROPPED), (1, KEPT))), HALF) == [0, 1, 1]


def test_a_shown_recall_of_a_recall_shows_the_source_of_both() -> None:
    recalling = seeing((0, DROPPED), result="[recalled from turn 0]\npage")
    again = seeing((0, DROPPED), (1, DROPPED), result="[recalled from turn 1]\n[recalled from turn 0]\npage")
    last = seeing((0, DROPPED), (1, DROPPED), (2, KEPT))
    assert source_factors(trajectory(seeing(), recalling, again, last), HALF) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("now", "factor"),
    [("page\n\n[Your notes]\nx: 1", 1), ("page", 1), ("[turn 0, tool result omitted: 9 tokens]", 0.5)],
)
def test_a_unit_that_is_shown_whole_with_notes_behind_it_is_not_rewritten(now: str, factor: float) -> None:
    reply = Message(role="assistant", content="ok")
    context = (Message(role="user", content="?"), reply, Message(role="tool", content=now), reply)
    last = replace(seeing((0, REWRITTEN), (1, KEPT)), context=context)
    assert source_factors(trajectory(seeing(result="page"), seeing(), last), HALF) == [factor, 1, 1]


def test_of_summaries_the_newest_counts_as_shown() -> None:
    first, second = seeing(kind="condense"), seeing(kind="condense")
    last = seeing((0, REWRITTEN), (2, REWRITTEN), (4, KEPT))
    one = trajectory(seeing(), first, seeing((0, REWRITTEN)), second, seeing((0, REWRITTEN)), last)
    assert source_factors(one, HALF) == [0.5, 0.5, 0.5, 1, 1, 1]


def given_credit(sources: SourceCredit | None) -> StepCredit:
    def one(sample: int) -> Trajectory:
        last = seeing((0, DROPPED), (1, REWRITTEN))
        return trajectory(seeing(), seeing(), last, id=f"p0/{sample}", sample=sample)

    return give_credit(
        [scored(one(0), 1.0), scored(one(1), 0.0, correct=0.0)],
        Estimator(ESTIMATORS["grpo"], {"scale": "none"}),
        AggregationSettings(max_tokens=4),
        stops=StopSettings(),
        whitened=False,
        sources=sources,
    )


def test_a_positive_advantage_shrinks_by_a_term_of_its_own_and_a_negative_one_and_all_weights_stay() -> None:
    plain, found = given_credit(None), given_credit(HALF)
    assert plain.advantage_NK.tolist() == [[0.5] * 3, [-0.5] * 3]
    assert found.advantage_NK.tolist() == [[0, 0.25, 0.5], [-0.5] * 3]
    assert found.weight_NK.tolist() == plain.weight_NK.tolist()
    assert [term.name for term in found.terms] == [*(term.name for term in plain.terms), "sources"]
    assert found.terms[-1].added().tolist() == [[-0.5, -0.25, 0], [0, 0, 0]]


@given(dropped=st.floats(0, 1), rewritten=st.floats(0, 1))
def test_no_factor_turns_a_sign_or_exceeds_the_advantage(dropped: float, rewritten: float) -> None:
    found = given_credit(SourceCredit(dropped=dropped, rewritten=rewritten))
    expected: Mapping[int, list[float]] = {0: [0.5 * dropped, 0.5 * rewritten, 0.5], 1: [-0.5] * 3}
    assert [*map(pytest.approx, expected.values())] == found.advantage_NK.tolist()
