"""The weights that a step gives to losses and to KL terms, over one rank."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import pytest
import torch
from builders import scored, trajectory, turn
from estimating import ESTIMATORS
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import collate
from tiny import qwen3, rows
from torch import Tensor
from two_ranks import OPTIMISER

from condensegrpo.algorithms.advantages import Batch, Estimate, Term, estimator, total
from condensegrpo.algorithms.credit import Estimator, rows_of
from condensegrpo.algorithms.objective import MicroBatchLoss, ObjectiveValue, PerToken, supervised
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.settings import Aggregation, AggregationSettings, StopSettings, TrainedKind
from condensegrpo.assembly.learning_signal import objective
from condensegrpo.config.load import find_config, load_config
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import StopReason
from condensegrpo.learner.engine import close_deepspeed, open_deepspeed
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trajectories import read_credit
from condensegrpo.training.learn_step import give_credit, no_signal, record_credit, update
from condensegrpo.training.rollout import BatchRollout, Round, StepBatch


def answered(name: str, tokens: int, *, right: float) -> ScoredTrajectory:
    """A trajectory of one turn; the policy gave each token a probability of ½."""
    one = turn([1, 2], range(3, 3 + tokens), logprobs=[math.log(0.5)] * tokens)
    return scored(trajectory(one, id=f"g-{name}", group="g"), right, correct=right)


@pytest.mark.parametrize("recipe", ["tool_use_gsm8k_lora", "tool_use_mbpp_lora"])
def test_tool_use_sums_the_losses_of_a_trajectory_and_takes_the_mean_of_its_kl_terms(recipe: str) -> None:
    """−mean_i A_i·Σ_t logp_t + 0.1·mean_i mean_t (logp − ref), with 1 and 4 tokens of logp = ln ½ and ref = ln ¼.

    A = ±1/√2 (two samples, one right): the loss is −½·(1 − 4)·ln ½ / √2, the KL term 0.1·ln 2 whatever the lengths.
    """
    algorithm = load_config(find_config(recipe)).algorithm
    kept = [answered("0", 1, right=1.0), answered("1", 4, right=0.0)]
    credit = give_credit(
        kept,
        Estimator(ESTIMATORS[str(algorithm.advantage.estimator)]),
        algorithm.aggregation,
        stops=algorithm.stops,
        whitened=False,
        kl_aggregation=algorithm.kl.aggregation,
    )
    assert credit.weight_NK.tolist() == [[1 / 2], [1 / 2]]
    assert credit.kl_weight_NK is not None
    assert credit.kl_weight_NK.tolist() == [[1 / 2], [1 / 8]]
    batch = collate(rows_of(kept, credit.advantage_NK, credit.weight_NK, kl_weight_NK=credit.kl_weight_NK))
    summed = MicroBatchLoss(objective(algorithm), replace(batch, reference=torch.full((5,), math.log(0.25))))(
        batch.logprobs
    )
    kl_loss = float(summed.statistics["kl_loss"].sum())
    assert kl_loss == pytest.approx(0.1 * math.log(2))
    assert float(summed.loss) - kl_loss == pytest.approx(-0.5 * (1 - 4) * math.log(0.5) / math.sqrt(2))


def test_without_an_aggregation_of_their_own_kl_terms_weigh_as_losses() -> None:
    algorithm = load_config(find_config("search_mt_grpo_qwen3_0.6b")).algorithm
    kept = [answered("0", 1, right=1.0), answered("1", 4, right=0.0)]
    credit = give_credit(
        kept, Estimator(ESTIMATORS["grpo"]), algorithm.aggregation, stops=algorithm.stops, whitened=False
    )
    batch = collate(rows_of(kept, credit.advantage_NK, credit.weight_NK, kl_weight_NK=credit.kl_weight_NK))
    assert batch.kl_weights.tolist() == batch.weights.tolist() == pytest.approx([1 / 5] * 5)


def test_a_trajectory_without_turns_is_recorded_beside_the_others(tmp_path: Path) -> None:
    """Its first prompt was longer than ``max_context_tokens``."""
    algorithm = load_config(find_config("search_grpo")).algorithm
    overflowed = scored(
        trajectory(id="g-1", group="g", stop=StopReason.CONTEXT_OVERFLOW, answer=None), 0.0, correct=0.0
    )
    kept = (answered("0", 2, right=1.0), overflowed)
    credit = give_credit(
        kept, Estimator(ESTIMATORS["grpo"]), algorithm.aggregation, stops=algorithm.stops, whitened=False
    )
    record_credit(tmp_path / "credit.parquet", StepBatch(kept, (), ()), credit, stops=algorithm.stops)
    recorded = read_credit(tmp_path / "credit.parquet")
    assert (recorded["g-1"].advantages, recorded["g-1"].terms) == ((), ())
    assert recorded["g-0"].advantages == pytest.approx([math.sqrt(0.5)], rel=1e-5)


@estimator(summary="against the best of the group", formula="R − best")
def against_best(batch: Batch, *, truncated_N: Tensor) -> Estimate:
    groups_G = batch.group_N.unique()
    best_G = torch.stack([batch.outcome_N[batch.group_N == group].max() for group in groups_G])
    best_N = best_G[torch.searchsorted(groups_G, batch.group_N)]
    return total(Term("R − best", batch.outcome_N - best_N, {"truncated": truncated_N, "turns": batch.turns_N}))


def test_whatever_type_the_numbers_of_a_term_have_they_are_read_back(tmp_path: Path) -> None:
    kept = (answered("0", 2, right=1.0), answered("1", 1, right=0.0))
    credit = give_credit(
        kept, Estimator(against_best), AggregationSettings(max_tokens=4), stops=StopSettings(), whitened=False
    )
    record_credit(tmp_path / "credit.parquet", StepBatch(kept, (), ()), credit, stops=StopSettings())
    (term,) = read_credit(tmp_path / "credit.parquet")["g-1"].terms
    assert (term.values, term.numbers) == ((-1.0,), {"truncated": (0.0,), "turns": (1.0,)})


def test_a_rank_without_a_trajectory_that_trains_asks_no_estimator() -> None:
    credit = give_credit(
        (), Estimator(against_best), AggregationSettings(max_tokens=4), stops=StopSettings(), whitened=True
    )
    assert credit.advantage_NK.shape == credit.weight_NK.shape == (0, 0)


# --- which turns train ------------------------------------------------------------------------------------------------

TURNS = st.lists(st.tuples(st.sampled_from(["act", "condense"]), st.integers(0, 4)), max_size=5)


def of_turns(turns: list[tuple[Literal["act", "condense"], int]], name: int) -> ScoredTrajectory:
    """A trajectory of turns with so many tokens, each under a prompt of its own, in one row."""
    prompt, made = [1], []
    for kind, tokens in turns:
        made.append(replace(turn(prompt, range(3, 3 + tokens)), kind=kind))
        prompt = [*prompt, *range(3, 3 + tokens), 2]
    return scored(trajectory(*made, id=f"g-{name}", group="g"), float(name % 2), correct=float(name % 2))


@pytest.mark.parametrize("mode", get_args(Aggregation))
@settings(max_examples=40)
@given(batch=st.lists(TURNS, min_size=1, max_size=4), kind=st.sampled_from(["act", "condense"]))
def test_turns_that_do_not_train_weigh_nothing_and_change_no_denominator(
    mode: Aggregation, batch: list[list[tuple[Literal["act", "condense"], int]]], kind: Literal["act", "condense"]
) -> None:
    """The turns of one kind weigh exactly as in a batch without all others; B counts every trajectory."""
    estimator = Estimator(ESTIMATORS["grpo"])

    def weights(turns: list[list[tuple[Literal["act", "condense"], int]]], trained: TrainedKind) -> list[list[float]]:
        kept = [of_turns(each, name) for name, each in enumerate(turns)]
        aggregation = AggregationSettings(mode=mode, max_tokens=7, turns=trained)
        credit = give_credit(kept, estimator, aggregation, stops=StopSettings(), whitened=False)
        rows = rows_of(kept, credit.advantage_NK, credit.weight_NK, kl=True)
        assert all(any(made.weight for made in row.turns) for row in rows)
        return [row[: len(each)] for row, each in zip(credit.weight_NK.tolist(), turns, strict=True)]

    found = weights(batch, kind)
    cut = weights([[each for each in turns if each[0] == kind] for turns in batch], "all")
    for turns, row, alone in zip(batch, found, cut, strict=True):
        assert [weight for (made, _), weight in zip(turns, row, strict=True) if made == kind] == alone
        assert not any(weight for (made, _), weight in zip(turns, row, strict=True) if made != kind)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_what_the_initial_policy_wrote_weighs_nothing_and_counts_in_no_denominator(mode: Aggregation) -> None:
    kept = [of_turns([("act", 2), ("condense", 3), ("act", 1)], 0), of_turns([("condense", 4), ("act", 4)], 1)]

    def frozen(each: ScoredTrajectory) -> ScoredTrajectory:
        turns = tuple(replace(turn, frozen=turn.kind == "condense") for turn in each.trajectory.turns)
        return replace(each, trajectory=replace(each.trajectory, turns=turns))

    def weights(kept: list[ScoredTrajectory], trained: TrainedKind) -> list[list[float]]:
        aggregation = AggregationSettings(mode=mode, max_tokens=7, turns=trained)
        estimator = Estimator(ESTIMATORS["grpo"])
        return give_credit(kept, estimator, aggregation, stops=StopSettings(), whitened=False).weight_NK.tolist()

    assert weights([frozen(each) for each in kept], "all") == weights(kept, "act") != weights(kept, "all")


def test_a_share_of_summaries_needs_both_kinds_of_turns() -> None:
    with pytest.raises(ValueError, match=r"turns=condense and summary_share=0\.5.*Remove summary_share"):
        AggregationSettings(turns="condense", summary_share=0.5)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"success": 1.0}, "every trajectory is correct. Take harder problems"),
        ({"success": 0.0}, "no trajectory is correct. Take easier problems"),
        ({"success": 0.5}, "all rewards are equal (success is 0.50). Raise train.samples_per_problem"),
        ({"success": 0.5, "masked": 1.0, "rows": 0.0, "groups_without_advantage": 0.0}, "masked for its stop"),
        ({"success": 0.5, "groups_without_advantage": 0.9, "rows": 3.0}, None),
    ],
)
def test_a_step_from_which_nothing_was_learned_says_why(metrics: dict[str, float], said: str | None) -> None:
    why = no_signal({"groups_without_advantage": 1.0, "masked": 0.0, **metrics})
    assert why is None if said is None else said in str(why)


def test_a_group_that_is_masked_whole_is_sampled_again() -> None:
    def group(name: str, *, stop: StopReason) -> list[ScoredTrajectory]:
        members = (replace(trajectory(turn([1], [2])), id=f"{name}/{n}", group_id=name, stop=stop) for n in range(2))
        return [scored(member, total=float(n), correct=float(n)) for n, member in enumerate(members)]

    asked = list[Round]()

    def run_round(further: Round) -> list[ScoredTrajectory]:
        asked.append(further)
        return group("1/2", stop=StopReason.ANSWERED)

    first = group("1/0", stop=StopReason.TURN_LIMIT) + group("1/1", stop=StopReason.ANSWERED)
    rollout = BatchRollout(
        config=load_config(
            find_config("quickstart"),
            ["algorithm.stops.handling={turn_limit: mask}", "algorithm.resample_rounds=2", "train.problems_per_step=2"],
        ),
        problems=[Problem(id=str(n), question="?") for n in range(9)],
        estimator=Estimator(ESTIMATORS["grpo"]),
        player=None,  # type: ignore[arg-type]  # rounds are played above
        folder=RunFolder(Path()),
        source="",
    )
    batch = rollout.complete(first, Round(step=1, chosen=(0, 1), new=2), run_round)
    assert [(further.new, len(further.chosen)) for further in asked] == [(1, 3)]
    assert {member.trajectory.group_id for member in batch.kept} == {"1/1", "1/2"}
    assert {member.trajectory.group_id for member in batch.masked} == {"1/0"}


def test_old_logprobs_are_measured_once_before_two_updates() -> None:
    seen = list[tuple[Tensor, Tensor]]()

    def watched(logp_T: Tensor, batch: PackedBatch) -> ObjectiveValue:
        seen.append((logp_T.detach().clone(), batch.old.clone()))
        return PerToken(supervised)(logp_T, batch)

    learner = open_deepspeed(qwen3(), zero_stage=0, optimizer=OPTIMISER, total_steps=10, dtype="float32")
    options = {"reference": None, "updates": 2, "measure_old": True, "temperature": 1.0, "max_tokens": 10_000}
    update(learner, rows(4), watched, **options)  # type: ignore[arg-type]  # of mixed types
    close_deepspeed(learner)
    (before_T, old_T), (after_T, still_T) = seen
    torch.testing.assert_close(old_T, before_T)
    assert torch.equal(old_T, still_T)
    assert (after_T - old_T).abs().max() > 1e-4
