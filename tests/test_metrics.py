"""What training and evaluation report about trajectories, against counts made by hand."""

import pickle
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_page import explained, missing, tables, unexplained

from condensegrpo.core.messages import Message
from condensegrpo.core.scored_trajectory import ScoredTrajectory, TrajectoryStats
from condensegrpo.core.shared_sequence import shared_ids
from condensegrpo.core.trajectory import Condensation, Rejected, Score, StopReason, Trajectory, Turn
from condensegrpo.metrics.credit import Credited, credit_metrics
from condensegrpo.metrics.trajectories import summarise


def turn(prompt: int, output: int, *, condensed: bool = False) -> Turn:
    """A turn of so many tokens."""
    declared = Condensation(condenser="last_k", reason="", tokens_before=99, tokens_after=prompt, spans=())
    return Turn(
        prompt_ids=(1,) * prompt,
        output_ids=(2,) * output,
        logprobs=(-0.5,) * output,
        policy_version=0,
        condensation=declared if condensed else None,
        context=(),
        reply=Message(role="assistant", content=""),
    )


def scored(
    *turns: Turn,
    correct: float,
    total: float,
    stop: StopReason = StopReason.ANSWERED,
    format_valid: bool = True,
    components: Mapping[str, float] | None = None,
) -> ScoredTrajectory:
    trajectory = Trajectory(
        id="q/0",
        problem_id="q",
        group_id="q#1",
        sample=0,
        turns=turns,
        stop=stop,
        answer=None,
        seconds=0.5 * len(turns),
    )
    return ScoredTrajectory.of(
        trajectory,
        Score(
            total=total,
            components=components or {},
            format_valid=format_valid,
            correct=correct,
            context_tokens=trajectory.max_context_tokens,
        ),
    )


def summary(*some: ScoredTrajectory) -> dict[str, float]:
    return summarise([one.figures for one in some])


FIGURES = st.builds(
    replace,
    st.just(scored(correct=1, total=1).figures),
    problem_id=st.sampled_from("pq"),
    total=st.floats(-10, 10),
    components=st.dictionaries(st.sampled_from(["correct", "format"]), st.floats(-1, 1)),
    format_valid=st.booleans(),
    correct=st.sampled_from([0.0, 0.3, 1.0]),
    context_tokens=st.integers(0, 10**6),
    turn_reward=st.sampled_from([0.0, 0.1, -0.7]),
    replies=st.integers(0, 50),
    output_tokens=st.integers(0, 10**5),
    condensations=st.integers(0, 50),
    tool_attempts=st.sampled_from([0, 1, 3]),
    tool_successes=st.just(0),
    stop=st.sampled_from(StopReason),
    seconds=st.floats(0, 1000),
)


def test_the_figures_of_a_trajectory_are_read_off_its_turns_and_its_score() -> None:
    called = replace(
        turn(30, 2, condensed=True), tool_attempts=2, tool_successes=1, tools_abandoned=1, turn_rewards={"hint": 0.25}
    )
    one = scored(turn(10, 4), called, correct=1, total=0.8, stop=StopReason.TURN_LIMIT, components={"correct": 1.0})
    assert one.figures == TrajectoryStats(
        id="q/0",
        problem_id="q",
        group_id="q#1",
        sample=0,
        stop=StopReason.TURN_LIMIT,
        truncated=False,
        seconds=1.0,
        total=0.8,
        components={"correct": 1.0},
        turn_reward=0.25,
        correct=1.0,
        format_valid=True,
        context_tokens=30,
        prompt_tokens=40,
        prompt_tokens_uncached=30,
        output_tokens=6,
        turns=2,
        replies=2,
        summaries=0,
        condensations=1,
        rejected=0,
        rejected_tokens=0,
        tool_attempts=2,
        tool_successes=1,
        tool_errors=1,
        tools_abandoned=1,
        drafts=0,
        draft_tokens=0,
        confidence=None,
        information=(None, None),
        information_lost=None,
        lost_fact=False,
    )


def test_a_prefix_cache_saves_what_a_prompt_has_in_common_with_the_one_before() -> None:
    prompts = [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (7,)]  # continued, condensed behind a prefix, rewritten
    turns = [replace(turn(1, 1), prompt_ids=shared_ids(prompt)) for prompt in prompts]
    figures = scored(*turns, correct=1, total=1).figures
    assert (figures.prompt_tokens, figures.prompt_tokens_uncached) == (12, 3 + 2 + 1 + 1)
    found = summarise([figures, scored(turn(10, 4), correct=1, total=1).figures])
    assert (found["calls"], found["prompt_tokens"], found["prompt_tokens_uncached"]) == (2.5, 11.0, 8.5)


def test_a_picture_behind_equal_ids_is_not_in_a_prefix_cache() -> None:
    shown = [((1, 8, 8, 2), ("a",), (1,)), ((1, 8, 8, 2, 8, 8), ("a", "b"), (1, 4)), ((1, 8, 8, 2), ("b",), (1,))]
    turns = [
        replace(turn(1, 1), prompt_ids=shared_ids(ids), media=media, picture_starts=starts)
        for ids, media, starts in shown
    ]
    assert scored(*turns, correct=1, total=1).figures.prompt_tokens_uncached == 4 + 2 + 3


def test_a_trajectory_is_truncated_if_a_budget_of_tokens_was_used_up() -> None:
    stops = {stop for stop in StopReason if scored(turn(1, 1), correct=0, total=0, stop=stop).figures.truncated}
    assert stops == {StopReason.OUTPUT_LENGTH, StopReason.CONTEXT_OVERFLOW}


def test_summaries_are_no_replies_and_rejected_ones_are_counted_apart() -> None:
    wrote = replace(turn(20, 5), kind="condense")
    text = Rejected(before=2, prompt_ids=(1,), output_ids=(2, 3, 4), policy_version=0, text="x", reason="no")
    one = scored(turn(10, 4), wrote, turn(12, 4), correct=1, total=1)
    figures = ScoredTrajectory.of(replace(one.trajectory, rejected=(text, text)), one.score).figures
    assert (figures.replies, figures.summaries, figures.rejected, figures.rejected_tokens) == (2, 1, 2, 6)
    assert (figures.output_tokens, figures.context_tokens) == (13, 20)
    found = summarise([figures, scored(turn(10, 4), correct=1, total=1).figures])
    assert (found["summaries"], found["summaries_rejected"], found["summary_tokens_rejected"]) == (0.5, 1.0, 3.0)


def test_figures_are_small_whatever_the_length_of_the_trajectory() -> None:
    """Ranks exchange them: contexts of a hundred thousand tokens must not travel."""
    long = scored(*[turn(100_000, 100)] * 3, correct=1, total=1).figures
    sent = pickle.dumps(long)
    assert len(sent) < 1000
    assert pickle.loads(sent) == long


def test_a_summary_counts_trajectories_and_not_turns() -> None:
    # verl takes the last row only, others every row: a failure of three turns must weigh as much as a success of one
    found = summary(
        *[
            scored(turn(10, 4), correct=1, total=0.8),
            scored(
                turn(10, 1), turn(30, 2), turn(20, 3, condensed=True),
                correct=0, total=-0.2, stop=StopReason.TURN_LIMIT, format_valid=False,
            ),
        ]
    )  # fmt: skip
    assert found["trajectories"] == 2
    assert found["success"] == 0.5
    assert found["reward"] == pytest.approx(0.3)
    assert found["format_valid"] == 0.5
    assert found["context_tokens"] == 20  # mean of the largest, 10 and 30
    assert found["context_tokens_max"] == 30
    assert found["turns"] == 2
    assert found["output_tokens"] == 5
    assert found["condensations"] == 0.5
    assert found["seconds/trajectory"] == 1.0


def test_every_reason_to_stop_has_a_share_and_they_add_up() -> None:
    stops = [StopReason.ANSWERED, StopReason.ANSWERED, StopReason.FORMAT, StopReason.SAMPLER_ERROR]
    found = summary(*[scored(turn(1, 1), correct=0, total=0, stop=stop) for stop in stops])
    shares = {key.removeprefix("stop/"): value for key, value in found.items() if key.startswith("stop/")}
    assert shares == {
        **{stop.value: 0.0 for stop in StopReason},
        "answered": 0.5,
        "format": 0.25,
        "sampler_error": 0.25,
    }


def test_components_are_averaged_over_those_that_have_them() -> None:
    found = summary(
        *[
            scored(turn(1, 1), correct=1, total=1.5, components={"correct": 1.0, "format": 0.5}),
            scored(turn(1, 1), correct=0, total=0.0, components={"correct": 0.0}),
        ]
    )
    assert found["reward/correct"] == 0.5
    assert found["reward/format"] == 0.5


def test_valid_tool_calls_are_a_share_of_all_calls_and_not_of_trajectories() -> None:
    counts = ((3, 3), (1, 0), (0, 0))
    turns = [replace(turn(1, 1), tool_attempts=calls, tool_successes=worked) for calls, worked in counts]
    found = summary(*[scored(one, correct=0, total=0) for one in turns])
    assert found["tool_calls"] == pytest.approx(4 / 3)
    assert found["tool_calls_valid"] == 0.75
    assert "tool_calls" not in summary(scored(turn(1, 1), correct=0, total=0))


def test_a_trajectory_that_never_began_counts_too() -> None:
    found = summary(scored(correct=0, total=0, stop=StopReason.CONTEXT_OVERFLOW, format_valid=False))
    assert (found["trajectories"], found["turns"], found["context_tokens"], found["output_tokens"]) == (1, 0, 0, 0)


def test_no_trajectories_have_their_number_only() -> None:
    assert summarise([]) == {"trajectories": 0}


def test_turn_rewards_are_told_only_where_a_turn_was_paid() -> None:
    one = scored(turn(1, 1), correct=0, total=0)
    paid = [replace(one.figures, turn_reward=value) for value in (0.5, -0.5, 0.3, 0.0)]
    assert summarise(paid)["turn_reward"] == pytest.approx(0.075)  # 0.3 / 4
    assert summarise(paid[:2])["turn_reward"] == 0  # paid, though in balance
    assert "turn_reward" not in summarise(paid[3:])


def test_a_value_that_only_some_have_is_a_mean_over_those_and_not_over_ranks() -> None:
    """The mean of the means of ranks that hold 3 and 1 of 4 values is not the mean of the values."""
    parts = [{"style": 0.0}, {"style": 0.0}, {"style": 0.0}, {}, {}, {}, {"style": 1.0}, {}]
    figures = [scored(turn(1, 1), correct=0, total=0, components=part).figures for part in parts]
    assert summarise(figures)["reward/style"] == 0.25  # the mean over two ranks of four: (0 + 1) / 2
    assert summarise(figures[:3])["reward/style"] == 0
    assert "reward/style" not in summarise(figures[3:6])


@settings(max_examples=50)
@given(st.lists(FIGURES, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_number_of_ranks_says_the_same_to_the_bit(
    figures: list[TrajectoryStats], ranks: int, draw: random.Random
) -> None:
    mixed = draw.sample(figures, len(figures))
    gathered = [one for rank in range(ranks) for one in mixed[rank::ranks]]
    assert summarise(gathered) == summarise(figures)


@settings(max_examples=50)
@given(st.lists(FIGURES, min_size=1, max_size=12))
def test_shares_are_shares(figures: list[TrajectoryStats]) -> None:
    found = summarise(figures)
    stops = [value for key, value in found.items() if key.startswith("stop/")]
    assert sum(stops) == pytest.approx(1)
    assert all(0 <= value <= 1 for value in (*stops, found["success"], found["format_valid"]))


# --- docs/reference/metrics.md


def test_the_page_explains_every_key_of_trajectories_and_credit() -> None:
    called = replace(turn(1, 1), tool_attempts=1, answer_logprob=-1.0)
    figures = replace(
        scored(called, correct=1, total=1, components={"brevity": 1.0}).figures,
        turn_reward=1.0,
        summaries=1,
        drafts=1,
        confidence=0.5,
        text_turns=1,
        picture_tokens=4,
    )
    rows = [
        Credited(
            group_id="g",
            outcome=1.0,
            correct=1.0,
            tokens=turns,
            advantages=(1.0,) * turns,
            turn_weights=(1.0,) * turns,
            handling="train",
            dropped=False,
            condense=(True,) * turns,
        )
        for turns in (1, 2, 3, 100)
    ]
    written = summarise([figures]) | credit_metrics(rows)
    assert unexplained([written]) == set()
    assert unexplained([{f"eval/{key}": value for key, value in summarise([figures]).items()}]) == set()
    assert unexplained([{f"eval/K=20/{key}": value for key, value in summarise([figures]).items()}]) == set()
    for section in ("Trajectories", "Credit"):
        for name, *_ in tables()[section]:
            assert any(explained_by(name, key) for key in written), f"{name} is explained and never written"


def explained_by(name: str, key: str) -> bool:
    return key == name or ("<" in name and key.startswith(name.partition("<")[0]))


def test_the_page_does_not_explain_just_anything() -> None:
    assert explained("stop/answered")
    assert explained("eval/success_low")
    assert explained("eval/K=20/stop/answered")
    assert not explained("successes")
    assert not explained("stop/answered/twice")
    assert not explained("eval/weight/gini")  # credit is a matter of training
    assert not explained("success_low")


def test_the_page_promises_what_every_step_writes() -> None:
    promised = missing({"stop/answered": 1.0, "seconds": 1.0})
    assert {"success", "groups_dropped", "weight/gini", "loss", "seconds/sync"} <= promised
    assert not promised & {"stop/<reason>", "seconds", "tool_calls", "weight/turns_<range>", "importance"}
