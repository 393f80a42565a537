"""Estimators and losses of a user's own, in a file beside the configuration, from the option to the inspector."""

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import scored, trajectory, turn
from command import ROOT
from estimating import LOSSES
from packed import collate
from tiny import segment
from torch import Tensor

from condensegrpo.algorithms import invariance
from condensegrpo.algorithms.advantages import Estimate
from condensegrpo.algorithms.credit import Scores
from condensegrpo.algorithms.losses import LossPlugin, TokenLoss
from condensegrpo.algorithms.settings import AggregationSettings, StopSettings
from condensegrpo.assembly.build import build
from condensegrpo.assembly.learning_signal import advantage_estimator, objective
from condensegrpo.config.load import load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import PluginError
from condensegrpo.core.observer import Observer
from condensegrpo.inspection.index import Index
from condensegrpo.inspection.panes import turns
from condensegrpo.storage.run_folder import RunFolder, read_metrics
from condensegrpo.storage.trajectories import read_credit
from condensegrpo.training.learn_step import give_credit
from condensegrpo.training.train import run_training

PLUGINS = """
    from typing import Annotated

    import torch
    from annotated_types import Ge
    from torch import Tensor

    from condensegrpo.algorithms.advantages import Batch, Estimate, Term, estimator, total
    from condensegrpo.algorithms.losses import TokenLoss, loss


    @estimator(summary="the reward against a threshold", formula="A_i = R_i − threshold, less a price a context token")
    def threshold(
        batch: Batch, *, context_N: Tensor, value: Annotated[float, Ge(0)] = 0.5, price: float = 0.0
    ) -> Estimate:
        reward = Term("R − threshold", batch.outcome_N - value, {"R": batch.outcome_N})
        return total(reward, Term("−price·C", -price * context_N, {"C": context_N}))


    @estimator(summary="numbers alone", formula="A_i = R_i")
    def bare(batch: Batch) -> Tensor:
        return batch.outcome_N


    @estimator(summary="against everybody", formula="A_i = R_i − mean R")
    def over_the_batch(batch: Batch) -> Tensor:
        return batch.outcome_N - batch.outcome_N.mean()


    @loss(summary="likely tokens alone", formula="l = −A·logp where logp > floor")
    def likely(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, *, floor: float = -5.0) -> TokenLoss:
        never_T = torch.zeros_like(logp_T, dtype=torch.bool)
        loss_T = torch.where(logp_T > floor, -advantage_T * logp_T, 0.0)
        return TokenLoss(loss_T, (logp_T - old_T).detach().exp(), never_T, never_T)


    @loss(summary="a mean over the micro-batch", formula="l = −(A − mean A)·logp")
    def centred(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> TokenLoss:
        never_T = torch.zeros_like(logp_T, dtype=torch.bool)
        loss_T = -(advantage_T - advantage_T.mean()) * logp_T
        return TokenLoss(loss_T, (logp_T - old_T).detach().exp(), never_T, never_T)


    @loss(summary="a mean over the turn, undeclared", formula="l = −A·mean logp")
    def no_columns(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> Tensor:
        return -advantage_T * logp_T


    def plain(batch: Batch) -> Tensor:
        return batch.outcome_N


    def twice(function):
        def inner(*arguments, **options):
            return 2 * function(*arguments, **options)
        return inner


    @estimator(summary="behind a decorator", formula="A_i = 2·R_i")
    @twice
    def wrapped(batch: Batch) -> Tensor:
        return batch.outcome_N


    @loss(summary="options by place", formula="l = −A·logp")
    def by_place(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, turn_T: Tensor, floor: float) -> TokenLoss:
        return likely.function(logp_T, old_T, advantage_T, floor=floor)
"""
FAULTY = """
    import torch

    from condensegrpo.algorithms.advantages import Estimate, Term, estimator
    from condensegrpo.algorithms.losses import TokenLoss, loss

    declared = {"summary": "s", "formula": "f"}


    @estimator(**declared)
    def raising(batch):
        return {}["price"]

    @estimator(**declared)
    def leaving(batch):
        raise SystemExit(3)

    @estimator(**declared)
    def nothing(batch):
        pass

    @estimator(**declared)
    def one_number(batch):
        return batch.outcome_N.mean()

    @estimator(**declared)
    def bare_term(batch):
        return Estimate(batch.outcome_N, (Term("R", batch.outcome_N, {"half": 0.5}),))

    @estimator(**declared)
    def unknown(batch, *, contexts_N):
        return batch.outcome_N

    @estimator(**declared)
    def in_place(batch):
        return batch.outcome_N.sub_(0.5)

    @estimator(**declared)
    def in_training(batch):
        if len(batch.outcome_N) == 4:
            raise RuntimeError("four")
        return batch.outcome_N

    @estimator(**declared)
    def of_trl(rewards, response_mask):
        return rewards

    @estimator(**declared)
    async def asynchronous(batch):
        return batch.outcome_N

    @estimator(**declared)
    def divided(batch):
        return batch.outcome_N / 0

    @loss(**declared)
    def other_names(logp, old, adv, low=0.5):
        return token_loss(logp, old, adv)

    def token_loss(logp_T, old_T, advantage_T):
        never_T = torch.zeros_like(logp_T, dtype=torch.bool)
        return TokenLoss(-advantage_T * logp_T, (logp_T - old_T).detach().exp(), never_T, never_T)

    @loss(**declared)
    def raising_loss(logp_T, old_T, advantage_T):
        return {}["floor"]

    @loss(**declared)
    def no_mask(logp_T, old_T, advantage_T):
        return token_loss(logp_T, old_T, advantage_T)._replace(low_T=None)

    @loss(**declared)
    def no_gradient(logp_T, old_T, advantage_T):
        return token_loss(logp_T.detach(), old_T, advantage_T)

    @loss(**declared)
    def no_number(logp_T, old_T, advantage_T):
        return token_loss(logp_T * float("nan"), old_T, advantage_T)

    @loss(**declared)
    def clamping(logp_T, old_T, advantage_T):
        return token_loss(logp_T, old_T, advantage_T.clamp_(max=0.1))

    @loss(**declared)
    def in_a_step(logp_T, old_T, advantage_T):
        if len(logp_T) == 7:  # more than where losses are tried
            raise RuntimeError("seven")
        right = token_loss(logp_T, old_T, advantage_T)
        return right if len(logp_T) < 7 else right._replace(loss_T=right.loss_T.mean())
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(textwrap.dedent(PLUGINS), encoding="utf-8")
    return file


def small(*changes: str) -> RunConfig:
    return load_config(ROOT / "configs" / "quickstart.yaml", list(changes))


def test_an_estimator_and_a_loss_of_a_file_train_and_their_terms_are_stored(plugins: Path, tmp_path: Path) -> None:
    config = small(
        f"algorithm.advantage={{estimator: '{plugins}:threshold', options: {{price: 0.001}}}}",
        f"algorithm.loss={{name: '{plugins}:likely', options: {{floor: -9.0}}}}",
        "warm_start={steps: 1, probe_target: null}",
        "train={steps: 1, problems_per_step: 2, samples_per_problem: 2, eval_every: 0}",
        "evaluate={problems: 1, variants: {}}",
        f"runs_dir={tmp_path}",
    )
    run_training(build(config), RunFolder.create(tmp_path / "run"), observer=Observer(), stopping=lambda: False)
    run = RunFolder(tmp_path / "run")
    assert len(read_metrics(run.metrics)) >= 1
    for credit in read_credit(run.credit(1)).values():
        reward, price = credit.terms
        assert (reward.name, price.name) == ("R − threshold", "−price·C")
        assert reward.values[0] == reward.numbers["R"][0] - 0.5
        assert price.values[0] == pytest.approx(-0.001 * price.numbers["C"][0])
        assert set(credit.advantages) == {reward.values[0] + price.values[0]}
    index = Index(run.path)
    batch = index.batch(run.trajectories(1))
    record = batch.at(0)
    turn = turns(record.read(), record.credit, budget=64, tokenizer=None)[0]
    lines = {line.name: line for line in batch.credit(record, batch.group(record), turn)}
    assert lines["R − threshold"].formula.startswith("R ")
    assert lines["advantage"].formula.endswith("threshold: R − threshold + −price·C")
    shutil.rmtree(run.path)


def test_an_option_is_validated_by_its_annotation(plugins: Path) -> None:
    with pytest.raises(PluginError, match=r"threshold' \(.*own.py:\d+\): the option value is -1, wanted at least 0"):
        advantage_estimator(small(f"algorithm.advantage={{estimator: '{plugins}:threshold', options: {{value: -1}}}}"))
    with pytest.raises(PluginError, match=r"no option 'valu'. Did you mean 'value'\?"):
        advantage_estimator(small(f"algorithm.advantage={{estimator: '{plugins}:threshold', options: {{valu: 1}}}}"))


def test_an_estimator_may_return_numbers_alone(plugins: Path) -> None:
    assert advantage_estimator(small(f"algorithm.advantage={{estimator: '{plugins}:bare'}}")).plugin.name == "bare"


def test_an_estimator_that_looks_beyond_the_group_is_refused(plugins: Path) -> None:
    with pytest.raises(PluginError, match=r"over_the_batch.*depends on the trajectories of other groups: found \["):
        advantage_estimator(small(f"algorithm.advantage={{estimator: '{plugins}:over_the_batch'}}"))


def test_a_function_may_hide_its_arguments_or_take_options_by_place(plugins: Path) -> None:
    advantage_estimator(small(f"algorithm.advantage={{estimator: '{plugins}:wrapped'}}"))
    objective(small(f"algorithm.loss={{name: '{plugins}:by_place', options: {{floor: -9.0}}}}").algorithm)


def test_a_loss_whose_gradient_depends_on_packing_is_refused(plugins: Path) -> None:
    # A = [1, 1, −½, −½, −½, 2] has mean ½; the third turn alone has mean 2, so its token would have no loss
    with pytest.raises(
        PluginError, match=r"centred' \(.*own.py:\d+\): the loss of a token, .*depends on the tokens of other"
    ):
        objective(small(f"algorithm.loss={{name: '{plugins}:centred'}}").algorithm)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("advantage", "plain", "found function, wanted a function that is decorated with estimator"),
        ("advantage", "likely", "found LossPlugin, wanted a function that is decorated with estimator"),
        ("loss", "threshold", "found EstimatorPlugin, wanted a function that is decorated with loss"),
        ("loss", "no_columns", "wanted a TokenLoss with one entry a token in every column"),
        ("loss", "nothing", "looking for 'nothing' in .*: no such name; it holds"),
    ],
)
def test_what_is_no_estimator_or_loss_says_what_it_is(plugins: Path, kind: str, name: str, message: str) -> None:
    key = "estimator" if kind == "advantage" else "name"
    config = small(f"algorithm.{kind}={{{key}: '{plugins}:{name}'}}")
    with pytest.raises(PluginError, match=message):
        advantage_estimator(config) if kind == "advantage" else objective(config.algorithm)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("advantage", "raising", r"raising' \(.*faulty.py:10\): KeyError: 'price' \(.*faulty.py:12\)\.$"),
        ("advantage", "leaving", r"SystemExit: 3 \(.*faulty.py:16\)"),
        ("advantage", "nothing", r"it returned None, wanted a tensor \(N,\), here \(5,\)"),
        ("advantage", "one_number", r"it returned a tensor of shape \(\), wanted"),
        ("advantage", "bare_term", "its term R has 0.5 as half, wanted"),
        ("advantage", "unknown", "no column 'contexts_N'. Did you mean 'context_N'"),
        ("advantage", "in_place", "it changes outcome_N in place"),
        ("advantage", "of_trl", r"it takes \(rewards, response_mask\), wanted \(batch\); all others are keywords"),
        ("advantage", "asynchronous", "it returned a coroutine, .*: define it with def, without async"),
        ("advantage", "divided", "gets .*inf.*, or divide by nothing that may be 0"),
        ("loss", "other_names", r"it takes \(logp, old, adv, low\), wanted \(logp_T, old_T, advantage_T\)"),
        ("loss", "raising_loss", r"KeyError: 'floor' \(.*faulty.py:\d+\)"),
        ("loss", "no_mask", "wanted a TokenLoss with one entry a token in every column"),
        ("loss", "no_gradient", "its loss_T has no gradient"),
        ("loss", "no_number", r"its loss_T is \[nan, .*, wanted finite numbers"),
        ("loss", "clamping", "it changes advantage_T in place"),
    ],
)
def test_what_a_faulty_estimator_or_loss_does_is_said_before_a_run(
    tmp_path: Path, kind: str, name: str, message: str
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(textwrap.dedent(FAULTY), encoding="utf-8")
    key = "estimator" if kind == "advantage" else "name"
    config = small(f"algorithm.{kind}={{{key}: '{file}:{name}'}}")
    with pytest.raises(PluginError, match=message):
        advantage_estimator(config) if kind == "advantage" else objective(config.algorithm)


def test_an_estimator_that_fails_in_a_step_says_where(tmp_path: Path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(textwrap.dedent(FAULTY), encoding="utf-8")
    failing = advantage_estimator(small(f"algorithm.advantage={{estimator: '{file}:in_training'}}"))
    batch = [scored(trajectory(turn((1,), (2,)), group=group), 1.0) for group in "aabb"]
    with pytest.raises(
        PluginError, match=r"computing the advantages of a step: RuntimeError: four \(.*faulty.py:\d+\)"
    ):
        give_credit(batch, failing, AggregationSettings(), stops=StopSettings(), whitened=False)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (7, r"computing the loss of a step: RuntimeError: seven \(.*faulty.py:\d+\)\.$"),
        (8, "computing the loss of a step: it returned .*, wanted a TokenLoss with one entry a token in every column"),
    ],
)
def test_a_loss_that_fails_in_a_step_says_what_it_did(tmp_path: Path, tokens: int, message: str) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(textwrap.dedent(FAULTY), encoding="utf-8")
    failing = objective(small(f"algorithm.loss={{name: '{file}:in_a_step'}}").algorithm)
    batch = collate([segment(list(range(tokens + 1)), range(1, tokens + 1))])
    with pytest.raises(PluginError, match=message):
        failing(torch.full((tokens,), -0.7, requires_grad=True), batch)


def test_the_example_of_the_guide_is_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "write-an-estimator.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    mine = tmp_path / "mine.py"
    mine.write_text("\n".join(blocks), encoding="utf-8")
    names = re.findall(r"mine\.py:(\w+)\", options: (\{.*?\})", page)
    assert names == [("priced", "{price: 0.002}"), ("floored", "{floor: -8}")]
    config = small(
        f"algorithm.advantage={{estimator: '{mine}:priced', options: {names[0][1]}}}",
        f"algorithm.loss={{name: '{mine}:floored', options: {names[1][1]}}}",
    )
    objective(config.algorithm)
    scores = invariance.SCORES._replace(context_N=torch.tensor([10.0, 20.0, 30.0, 5.0, 5.0]))
    # outcomes 1, 0, 1 have mean ⅔ and deviation 0.577; contexts lie −10, 0 and 10 from their mean
    advantage = advantage_estimator(config)(scores).advantage_NK[:, 0].tolist()
    expected = [0.5774 + 0.02, -1.1547, 0.5774 - 0.02, -0.7071, 0.7071]
    assert advantage == pytest.approx(expected, abs=1e-4)


def token_loss(function: Callable[..., Tensor], *, turns: bool) -> LossPlugin:
    """A loss of a function of the log-probabilities, the advantages and the turns."""

    def of_tokens(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor) -> TokenLoss:
        never_T = torch.zeros_like(logp_T, dtype=torch.bool)
        return TokenLoss(function(logp_T, advantage_T, None), torch.ones_like(logp_T), never_T, never_T)

    def of_turns(logp_T: Tensor, old_T: Tensor, advantage_T: Tensor, turn_T: Tensor) -> TokenLoss:
        never_T = torch.zeros_like(logp_T, dtype=torch.bool)
        return TokenLoss(function(logp_T, advantage_T, turn_T), torch.ones_like(logp_T), never_T, never_T)

    return LossPlugin(function=of_turns if turns else of_tokens, summary="made for a test", formula="l")


def centred_gradient(logp_T: Tensor, advantage_T: Tensor, _: object) -> Tensor:
    """The loss of each token alone, whose gradient is that of all of them."""
    return -advantage_T.detach() * logp_T + logp_T.mean() - logp_T.mean().detach()


@pytest.mark.parametrize(
    ("function", "turns", "fault"),
    [
        (lambda logp, advantage, turn: -advantage * logp / (1 + turn), True, "depends on the labels of turns"),
        (centred_gradient, False, "where the advantage is 0"),
        (
            lambda *given: given[1].abs().sign() * centred_gradient(*given),
            False,
            "depends on the tokens of other turns",
        ),
        (lambda logp, advantage, _: -(advantage + 0.1) * logp, False, "where the advantage is 0"),
    ],
)
def test_a_loss_that_changes_with_labels_packing_or_rows_left_out_is_refused(
    function: Callable[..., Tensor], turns: bool, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        invariance.check_loss(token_loss(function, turns=turns), {})


def test_an_estimator_that_reads_the_values_of_states_is_refused() -> None:
    def by_label(scores: Scores) -> Estimate:
        return Estimate(scores.state_NK.clamp(min=0).double())

    with pytest.raises(ValueError, match="depends on the labels of states"):
        invariance.check_estimator(by_label)  # type: ignore[arg-type]  # a function, not a plug-in


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_the_package_passes_the_check(name: str) -> None:
    invariance.check_loss(LOSSES[name], {})
