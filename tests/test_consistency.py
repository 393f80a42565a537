"""Figures of a configuration that do not fit together."""

import pytest

from condensegrpo.config import RunConfig, find_config, load_config
from condensegrpo.consistency import check_figures
from condensegrpo.errors import ConfigError


def gsm8k(*overrides: str) -> RunConfig:
    return load_config(find_config("gsm8k"), ["task.data=train.jsonl", "task.eval_data=test.jsonl", *overrides])


def test_the_shipped_figures_fit() -> None:
    check_figures(gsm8k())
    check_figures(load_config(find_config("quickstart")))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["train.samples_per_problem=1"], "at least 2 trajectories"),
        (["learner.tokens_per_micro_batch=1119"], "raise it to at least 1120"),
        (["model.new.max_positions=1119"], "Raise it to at least 1120"),
        (
            ["rollout.tool_format=native"],
            "task.options.tool_format: found 'tagged'",
        ),
        (["condenser.options.keep_last=1"], "task.options.keep_last: found 3"),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(overrides: list[str], wanted: str) -> None:
    """The longest row of this configuration is a context of 1,024 tokens and a reply of 96."""
    with pytest.raises(ConfigError) as caught:
        check_figures(gsm8k(*overrides))
    assert wanted in str(caught.value)


def test_what_fits_to_the_token_is_fine() -> None:
    check_figures(gsm8k("learner.tokens_per_micro_batch=1120", "model.new.max_positions=1120"))


def test_one_sample_a_problem_is_fine_where_nothing_is_trained() -> None:
    check_figures(gsm8k("train.samples_per_problem=1", "train.steps=0"))
