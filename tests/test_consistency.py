"""Figures of a configuration that do not fit together."""

import pytest

from condensegrpo.assembly.learning_signal import advantage_estimator
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import find_config, load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError


def gsm8k(*overrides: str) -> RunConfig:
    return load_config(find_config("gsm8k"), ["task.data=train.jsonl", "task.eval_data=test.jsonl", *overrides])


def test_the_shipped_figures_fit() -> None:
    check_values(gsm8k())
    check_values(load_config(find_config("quickstart")))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            ["algorithm.advantage.context_anchors=[48, 16]"],
            "algorithm.advantage.context_anchors: found [48.0, 16.0], wanted",
        ),
        (["algorithm.advantage.context_anchors=[0, 16]"], "the first above 0"),
        (["algorithm.advantage.context_anchors=[16, 16]"], "the second above the first"),
        (["learner.tokens_per_micro_batch=1119"], "raise it to at least 1120"),
        (["sampler.options.max_model_len=1119"], "max_model_len: found 1119, and a context with its reply may have"),
        (["sampler.options.top_p=0.9"], "sampler.options.top_p: found 0.9. Where unlikely tokens are cut off, the"),
        (["sampler.options.top_k=20"], "every importance ratio is wrong. Leave it out; sharpen with rollout.temp"),
        (["sampler.options.min_p=0.1"], "sampler.options.min_p: found 0.1"),
        (["rollout.staleness=1"], "algorithm.importance.cap: found 0, no correction, and rollout.staleness is 1"),
        (["rollout.condense.threshold=0.5"], "rollout.condense.threshold=0.5: rollout.condense.when is every_turn"),
        (["rollout.condense.jitter=0.2"], "rollout.condense.jitter=0.2: rollout.condense.when is every_turn"),
        (
            ["rollout.condense.when=over_budget", "rollout.condense.threshold=0.5", "rollout.condense.target=0.6"],
            "rollout.condense.target: found 0.6, above rollout.condense.threshold=0.5",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(overrides: list[str], wanted: str) -> None:
    """The longest row of this configuration is a context of 1,024 tokens and a reply of 96."""
    with pytest.raises(ConfigError) as caught:
        check_values(gsm8k(*overrides))
    assert wanted in str(caught.value)


def test_what_fits_to_the_token_is_fine() -> None:
    check_values(gsm8k("learner.tokens_per_micro_batch=1120", "model.new.max_positions=1120"))


def test_trajectories_may_be_stale_where_that_is_corrected() -> None:
    check_values(gsm8k("rollout.staleness=2", "algorithm.importance.cap=2"))


def test_one_sample_a_problem_is_fine_where_nothing_is_trained() -> None:
    advantage_estimator(gsm8k("train.samples_per_problem=1", "train.steps=0"))


RAW = (
    "fold_grpo",
    "grpo",
    "grpo_merged",
    "ms_grpo",
    "ms_po",
    "mt_grpo",
    "reinforce",
    "rloo",
    "turn_discounted",
)  # by name


@pytest.mark.parametrize("estimator", RAW)
def test_one_sample_a_problem_can_be_trained_on_where_the_estimator_has_raw(estimator: str) -> None:
    one = (f"algorithm.advantage.estimator={estimator}", "train.samples_per_problem=1")
    advantage_estimator(gsm8k(*one, "algorithm.advantage.options={singleton: raw}"))
    with pytest.raises(ConfigError, match=rf"the estimator {estimator} compares .* Raise it, or set algorithm\.adv"):
        advantage_estimator(gsm8k(*one))


@pytest.mark.parametrize("estimator", ["efficient", "gigpo"])
def test_an_estimator_without_raw_is_not_told_to_set_it(estimator: str) -> None:
    with pytest.raises(ConfigError) as caught:
        advantage_estimator(gsm8k(f"algorithm.advantage.estimator={estimator}", "train.samples_per_problem=1"))
    assert f"the estimator {estimator} compares at least 2 trajectories a problem" in str(caught.value)
    assert f"Raise it, or choose one of {', '.join(RAW)} and set algorithm.advantage.options.singleton=raw" in str(
        caught.value
    )
