"""The verdicts and the rewards that are built on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from builders import assistant, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from condensegrpo.config.options import build_plugin
from condensegrpo.core.errors import PluginError
from condensegrpo.core.messages import ToolCall
from condensegrpo.core.protocols.reward import Reward, RewardPart, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.rewards.context import InverseMaxContext, InverseScaled, Multiplicative
from condensegrpo.rewards.format import Format
from condensegrpo.rewards.matches import Match, Matcher, number
from condensegrpo.rewards.outcome import Correct, ToolCalls, format_valid, judge_trajectory
from condensegrpo.rewards.weighted_sum import WeightedSum

SEVEN = Problem(id="p0", question="3 + 4?", answer="7")
NO_TRUTH = Problem(id="p9", question="why?")


def answered(
    answer: str | None,
    *,
    stop: StopReason = StopReason.ANSWERED,
    contexts: Sequence[int] = (3,),
    replies: Sequence[str] = ("<answer>…</answer>",),
) -> Trajectory:
    """A trajectory whose turns have prompts of so many tokens and these replies."""
    said = [*replies, *[replies[-1]] * (len(contexts) - len(replies))]
    turns = [turn(range(length), [1], reply=reply) for length, reply in zip(contexts, said, strict=True)]
    return trajectory(*turns, stop=stop, answer=answer)


def correct(one: Trajectory, problem: Problem, matcher: Matcher) -> float:
    """Whether a trajectory is right."""
    return judge_trajectory(one, problem, matcher).correct


def calling(*counts: tuple[int, int], answer: str | None = "7") -> Trajectory:
    """A trajectory whose turns tried and succeeded in so many tool calls."""
    turns = [replace(turn([1], [2]), tool_attempts=tried, tool_successes=worked) for tried, worked in counts]
    return trajectory(*turns, turn([1], [2]), answer=answer)


# --- format ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [stop for stop in StopReason if not stop.gives_answer])
def test_only_a_trajectory_that_gives_an_answer_is_well_formed(stop: StopReason) -> None:
    assert format_valid(answered("7"))
    assert not format_valid(answered("7", stop=stop))


def test_a_blank_reply_spoils_the_format() -> None:
    assert not format_valid(answered("7", contexts=(3, 3), replies=(" \n", "<answer>7</answer>")))


def test_a_call_without_text_is_no_blank_reply() -> None:
    """Families whose calls are read by their tokens: every trajectory with a call was malformed."""
    call = ToolCall(id="call_0", name="look", arguments="{}")
    said = answered("7", contexts=(3, 3), replies=("", "<answer>7</answer>"))
    first, last = said.turns
    called = replace(first, reply=replace(first.reply, tool_calls=(call,)))
    assert not format_valid(said)
    assert format_valid(replace(said, turns=(called, last)))


def test_a_bare_correct_answer_fails_no_minimum_length() -> None:
    assert format_valid(answered("5", replies=("5",)))
    assert not format_valid(answered("5", replies=("5",)), min_reply_chars=2)


def test_a_trajectory_without_turns_is_not_well_formed() -> None:
    assert not format_valid(trajectory(stop=StopReason.ANSWERED))


# --- correctness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "truth", "answer", "right"),
    [
        ("exact", "Paris", " paris\n", 1.0),
        ("exact", "New York", "new   york", 1.0),
        ("exact", "Paris", "Paris, France", 0.0),
        ("exact", "7", "7.0", 0.0),
        ("number", "7", "7.0", 1.0),
        ("number", "3", "3.14", 0.0),  # "3.14" is not read as "3"
        ("number", "1080", "$1,080", 1.0),
        ("number", "1,080", " 1080.00 $\n", 1.0),
        ("number", "72", "7 2", 0.0),  # the first is 7
        ("number", "72", "7, 2", 0.0),
        ("number", "1080", "1 080", 0.0),
        ("number", "5", "5.", 1.0),
        ("number", "20", "20%", 1.0),
        ("number", "50", "50 %", 1.0),
        ("number", "-5", "-5", 1.0),
        ("number", "-5", "\u22125", 1.0),  # the Unicode minus
        ("number", "-5", "$\u22125", 1.0),
        ("number", "-5", "- 5", 0.0),
        ("number", "-5", "5", 0.0),
        ("number", ".5", "0.5", 1.0),
        ("number", "0.3333333", "0.33333333", 1.0),
        ("number", "0.33", "0.333", 0.0),
        ("number", "12", "12 apples", 1.0),
        ("number", "12 apples", "12", 1.0),
        ("number", "7", "x = 7 apples", 1.0),
        ("number", "12", "#### 12 #### 13", 1.0),  # the first
        ("number", "13", "#### 12 #### 13", 0.0),
        ("number", "1/3", "1/2", 0.0),
        ("number", "1/3", "2/6", 1.0),
        ("number", "24", "72/3", 1.0),
        ("number", "24", "$72 / 3", 1.0),
        ("number", "72", "72/3", 0.0),
        ("number", "0.5", "x = 1/2", 1.0),
        ("number", "12", "12/25/2024", 1.0),  # a date is no fraction
        ("number", "1", "1 1/2", 1.0),  # nor is a mixed number
        ("number", "34", "3,4 and 5", 0.0),  # a comma that groups no thousands ends a number
        ("number", "3", "3,4 and 5", 1.0),
        ("number", "5e-7", "0", 0.0),
        ("number", "0", "5e-7", 0.0),
        ("number", "5e-7", "0.0000005", 1.0),
        ("number", "0", "1e-15", 1.0),
        ("number", "0.333333", "1/3", 1.0),
        ("last_number", "5e-7", "it is 0", 0.0),
        ("words", "$5", "it costs $5 now", 1.0),
        ("words", "C++", "In C++.", 1.0),
        ("words", "C++", "c", 0.0),
        ("number", "1", "1/0", 0.0),
        ("number", "7", "therefore", 0.0),
        ("number", "7", "", 0.0),
        ("number", "7", "inf", 0.0),
        ("number", "7", "nan", 0.0),
    ],
)
def test_an_answer_is_compared_with_the_ground_truth(match: Match, truth: str, answer: str, right: float) -> None:
    problem = Problem(id="p0", question="?", answer=truth)
    assert correct(answered(answer), problem, Matcher(match)) == right


def test_any_alias_is_right() -> None:
    problem = Problem(id="p0", question="Who?", answer="Ann Lee", data={"aliases": ["A. Lee", "Ann"]})
    assert [correct(answered(said), problem, Matcher("alias")) for said in ("a. lee", "ann", "Ann Lee", "Lee")] == [
        1,
        1,
        1,
        0,
    ]
    assert correct(answered("Ann"), problem, Matcher("exact")) == 0.0
    assert correct(answered("Ann"), replace(problem, answer=None), Matcher("alias")) == 1.0


@pytest.mark.parametrize(("aliases", "right"), [("Ann", [1.0, 1.0, 0.0]), (None, [1.0, 0.0, 0.0])])
def test_a_column_of_aliases_may_have_a_text_or_null(aliases: str | None, right: list[float]) -> None:
    problem = Problem(id="p0", question="Who?", answer="Lee", data={"aliases": aliases})
    assert [correct(answered(said), problem, Matcher("alias")) for said in ("lee", "ann", "n")] == right
    assert [correct(answered(said), problem, Matcher("contains")) for said in ("a lee", "ann b", "nobody")] == right


def test_an_alias_of_punctuation_makes_no_answer_right() -> None:
    problem = Problem(id="p0", question="Who?", answer="Lee", data={"aliases": ["-", "(*)"]})
    assert [correct(answered(said), problem, Matcher("words")) for said in ("any text", "Lee.")] == [0.0, 1.0]


def test_no_answer_is_not_right() -> None:
    assert correct(answered(None), SEVEN, Matcher("exact")) == 0.0


@pytest.mark.parametrize("match", ["exact", "number", "alias"])
@pytest.mark.parametrize("answer", ["therefore 7", None])
def test_without_ground_truth_nothing_is_ever_called_right(match: Match, answer: str | None) -> None:
    with pytest.raises(ValueError, match="judging problem p9: it has no ground truth"):
        correct(answered(answer), NO_TRUTH, Matcher(match))


def test_a_ground_truth_that_is_no_number_cannot_be_judged_by_number() -> None:
    with pytest.raises(ValueError, match="judging problem p0 by number: its ground truth 'seven' is not a number"):
        correct(answered("7"), replace(SEVEN, answer="seven"), Matcher("number"))


@given(st.integers(-(10**9), 10**9))
@settings(max_examples=50)
def test_a_number_is_read_however_it_is_grouped(value: int) -> None:
    assert number(f"{value:,}") == number(f"$ {value}") == number(f"{value}.") == float(value)


@pytest.mark.parametrize("digits", [400, 5000])  # beyond the largest float, and beyond what int() reads
def test_a_denominator_without_end_makes_an_answer_wrong_and_no_error(digits: int) -> None:
    assert correct(answered(f"1/{'3' * digits}"), SEVEN, Matcher("number")) == 0.0


# --- rewards --------------------------------------------------------------------------------------------------------


def test_correct_pays_a_right_answer_in_a_well_formed_trajectory() -> None:
    assert Correct()(answered("7"), SEVEN) == RewardResult(
        total=1.0, components={"correct": 1.0}, format_valid=True, correct=1.0
    )
    assert Correct()(answered("8"), SEVEN).total == 0.0
    cut_off = Correct()(answered("7", stop=StopReason.TURN_LIMIT), SEVEN)
    assert (cut_off.total, cut_off.format_valid, cut_off.correct) == (0.0, False, 0.0)


@pytest.mark.parametrize(
    ("one", "reward"),
    [
        (answered("7", contexts=(200,)), 1 / 200),
        (answered("7", contexts=(10, 40, 25)), 1 / 40),  # the largest context, not the last or the sum
        (answered("8", contexts=(10,)), 0.0),
        (answered("7", contexts=(10,), stop=StopReason.OUTPUT_LENGTH), 0.0),
        (answered("7", contexts=(10,), replies=("",)), 0.0),
        (answered("7", contexts=(1,)), 1.0),
    ],
)
def test_inverse_max_context_is_exact(one: Trajectory, reward: float) -> None:
    result = InverseMaxContext()(one, SEVEN)
    assert result.total == reward
    assert result.components == {"inverse_max_context": reward}
    assert result.correct == float(reward > 0)


def test_format_pays_whatever_the_answer() -> None:
    wrong = Format()(answered("8"), SEVEN)
    assert (wrong.total, wrong.format_valid, wrong.correct) == (1.0, True, 0.0)
    assert Format()(answered("7"), SEVEN).correct == 1.0
    assert Format()(answered(None, stop=StopReason.FORMAT), SEVEN).total == 0.0
    assert Format(match=None)(answered("7"), NO_TRUTH).total == 1.0


def test_tool_calls_pay_the_share_that_worked() -> None:
    assert ToolCalls()(calling((2, 1), (2, 2)), SEVEN).total == 0.75
    assert ToolCalls(weight=0.2)(calling((1, 1)), SEVEN).components == {"tool_calls": 0.2}
    assert ToolCalls()(calling((0, 0)), SEVEN).total == 0.0
    assert ToolCalls()(calling((1, 0)), SEVEN).correct == 1.0
    assert ToolCalls(match=None)(calling((1, 1)), NO_TRUTH).total == 1.0


def part(name: str, reward: Reward, weight: float = 1.0) -> RewardPart:
    return RewardPart(name=name, weight=weight, reward=reward)


REWARDS: Mapping[str, Reward] = {
    "correct": Correct(),
    "format": Format(),
    "inverse_max_context": InverseMaxContext(),
    "inverse_scaled": InverseScaled(reference_tokens=3),
    "multiplicative": Multiplicative(context_low=3, context_high=9),
    "tool_calls": ToolCalls(),
    "weighted_sum": WeightedSum(parts=[part("format", Format()), part("correct", Correct())]),
}
OPTIONS: Mapping[str, Mapping[str, object]] = {  # those that must be given
    "inverse_scaled": {"reference_tokens": 3},
    "multiplicative": {"context_low": 3, "context_high": 9},
    "weighted_sum": {"parts": [part("correct", Correct())]},
}


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_judges_format_and_correctness(name: str) -> None:
    for one, verdict in (
        (answered("7"), (True, 1.0)),
        (answered("8"), (True, 0.0)),
        (trajectory(answer=None), (False, 0.0)),
    ):
        result = REWARDS[name](one, SEVEN)
        assert isinstance(result, RewardResult)
        assert (result.format_valid, result.correct) == verdict


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_refuses_a_problem_without_ground_truth(name: str) -> None:
    for one in (answered("7"), answered(None, stop=StopReason.FORMAT)):
        with pytest.raises(ValueError, match="p9"):
            REWARDS[name](one, NO_TRUTH)


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_is_found_by_its_name(name: str) -> None:
    assert type(build_plugin("rewards", name, OPTIONS.get(name, {}))) is type(REWARDS[name])


@pytest.mark.parametrize("name", ["correct", "format", "inverse_max_context", "tool_calls"])
def test_an_unknown_match_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match="match is 'roughly', wanted 'exact', 'number', 'last_number', 'alias'"):
        build_plugin("rewards", name, {"match": "roughly"})


def test_the_text_of_the_replies_is_not_read_for_the_answer() -> None:
    """The engine reads the answer, from the assistant's text only; a number elsewhere counts for nothing."""
    loud = trajectory(
        replace(turn([1], [2], reply="7 7 7"), observations=(assistant("7"),)), answer=None, stop=StopReason.FORMAT
    )
    assert Correct()(loud, SEVEN).total == 0.0
