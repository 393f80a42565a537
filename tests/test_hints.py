"""The hints of a run that learns nothing or writes useless summaries: after three steps, with the keys that help."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from condensegrpo.config.load import load_config
from condensegrpo.training.hints import PATIENCE, REPEAT, SignalWatch, SummaryWatch

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
IDLE: Mapping[str, float] = {"groups_without_advantage": 1.0, "masked": 0.0, "success": 0.0, "format_valid": 1.0}


def hints(steps: int, *overrides: str, **metrics: float) -> list[str | None]:
    """What is said after each step of a run in which all steps are alike."""
    watch = SignalWatch(load_config(QUICKSTART, overrides))
    return [watch.hint(step, {**IDLE, **metrics}) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"success": 1.0}, ("every trajectory is correct", "harder problems (task.options)")),
        (
            {"stop/turn_limit": 0.4, "format_valid": 0.25},
            ("no trajectory is correct", "a larger rollout.limits.max_turns: 40%", "warm_start.steps): only 25%"),
        ),
        ({"success": 0.5}, ("all rewards are equal (success is 0.50)", "algorithm.resample_rounds=2")),
        ({"masked": 1.0, "rows": 0.0, "groups_without_advantage": 0.0}, ("masked for its stop",)),
    ],
)
def test_the_hint_names_the_cause_and_the_keys(metrics: dict[str, float], said: tuple[str, ...]) -> None:
    first, second, hint = hints(PATIENCE, **metrics)
    assert (first, second) == (None, None)
    assert hint is not None
    assert hint.startswith("nothing was learned in steps 1 to 3: ")
    assert [text for text in said if text not in hint] == []


def test_only_an_estimator_that_sees_no_context_is_told_of_the_one_that_does() -> None:
    grpo = ("algorithm={advantage: {estimator: grpo}}",)
    assert "estimator=efficient" in str(hints(3, *grpo, success=1.0)[-1])
    assert "estimator=efficient" not in str(hints(3, success=1.0)[-1])
    assert "train.samples_per_problem=8" in str(hints(3, "train.samples_per_problem=1")[-1])


def test_the_hint_is_repeated_seldom_and_not_after_a_step_that_learned() -> None:
    said = hints(PATIENCE + REPEAT)
    assert [step for step, hint in enumerate(said, start=1) if hint] == [PATIENCE, PATIENCE + REPEAT]
    watch = SignalWatch(load_config(QUICKSTART))
    learned = {**IDLE, "groups_without_advantage": 0.9}
    assert [watch.hint(step, learned if step == 3 else IDLE) for step in range(1, 6)] == [None] * 5


def test_summaries_that_cannot_be_used_are_told_of_while_they_are_many() -> None:
    watch = SummaryWatch("summary")
    many, few = ({"summaries": 6.0, "summaries_rejected": lost} for lost in (2.0, 1.9))  # 2 of 8: a quarter
    assert [watch.hint(1, metrics) for metrics in (many, many, few, many, many)] == [None] * 5
    hint = watch.hint(6, many)
    assert hint is not None
    assert hint.startswith("25% of the summaries in step 6 cannot be used.")
    assert "a larger max_tokens of the condenser summary" in hint
    assert SummaryWatch("last_k").hint(1, {}) is None  # nobody writes any
