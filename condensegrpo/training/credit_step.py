"""The credit of one step: advantage and token weight of every turn, kept for inspection and summed up as metrics."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from condensegrpo.algorithms.advantages import Moments, moments, whiten
from condensegrpo.algorithms.credit import Scores, condense_turns, scores_of, turn_counts, turn_tokens
from condensegrpo.algorithms.losses import Totals, share_of_summaries, token_weights, totals, with_share
from condensegrpo.algorithms.staleness import staleness_of
from condensegrpo.algorithms.turn_rewards import turn_sums
from condensegrpo.core.protocols import Counted
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.learner import ranks
from condensegrpo.metrics.credit import Credited, credit_metrics
from condensegrpo.metrics.trajectories import facts_of, multi_turn, summarise
from condensegrpo.storage.run_folder import Credit, write_credit
from condensegrpo.training.rig import Rig
from condensegrpo.training.rollout_step import Sampled

T = TypeVar("T")


class StepCredit(NamedTuple):
    """What the trajectories that train are given."""

    scores: Scores
    advantage_NK: Tensor
    weight_NK: Tensor  # of one trained token of the turn


def give_credit(rig: Rig, kept: Sequence[ScoredTrajectory]) -> StepCredit:
    """Scores, advantages and weights; denominators count the trajectories that train on all ranks."""
    algorithm, rollout = rig.config.algorithm, rig.config.rollout
    scores = scores_of(kept, on_stop=algorithm.on_stop, stop_penalty=algorithm.stop_penalty)
    tokens_NK = turn_tokens(kept)
    advantage_NK = rig.components.estimator(scores)
    if algorithm.whiten:
        everywhere = Moments(*ranks.sum_over_ranks(moments(advantage_NK, tokens_NK)))
        advantage_NK = whiten(advantage_NK, tokens_NK, moments=everywhere)
    weight_NK = token_weights(
        algorithm.aggregation,
        tokens_NK,
        totals=Totals(*ranks.sum_over_ranks(totals(tokens_NK, turn_counts(kept)))),
        max_tokens=algorithm.aggregation_tokens or rollout.max_turns * rollout.max_output_tokens,
    )
    if algorithm.summary_share is not None:
        condense_NK = condense_turns(kept)
        whole, summaries = ranks.sum_over_ranks(share_of_summaries(weight_NK, tokens_NK, condense_NK))
        weight_NK = with_share(weight_NK, condense_NK, share=algorithm.summary_share, whole=whole, summaries=summaries)
    return StepCredit(scores, advantage_NK, weight_NK)


def record_credit(rig: Rig, step: int, sampled: Sampled, credit: StepCredit) -> None:
    """Write the credit of every trajectory of every rank; one that does not train has advantages and weights of 0."""
    on_stop = rig.config.algorithm.on_stop
    rows = [
        Credit(
            trajectory=one.trajectory.id,
            advantages=tuple(advantage_K[: len(one.trajectory.turns)]),
            weights=tuple(weight_K[: len(one.trajectory.turns)]),
            handling=on_stop.get(one.trajectory.stop, "train"),
        )
        for one, advantage_K, weight_K in zip(
            sampled.kept, credit.advantage_NK.tolist(), credit.weight_NK.tolist(), strict=True
        )
    ]
    rows += [_no_credit(one, "mask") for one in sampled.masked]
    rows += [_no_credit(one, "drop") for one in sampled.dropped]
    everybody = _everybody(rows)
    if ranks.rank() == 0:
        write_credit(rig.folder.credit(step), everybody)


def _no_credit(one: ScoredTrajectory, handling: Literal["mask", "drop"]) -> Credit:
    nothing = (0.0,) * len(one.trajectory.turns)
    return Credit(trajectory=one.trajectory.id, advantages=nothing, weights=nothing, handling=handling)


def metrics_of(rig: Rig, step: int, sampled: Sampled, credit: StepCredit) -> dict[str, float]:
    """What the trajectories of all ranks were like and what became of them, each counted once."""
    everyone = (*sampled.kept, *sampled.masked, *sampled.dropped)
    facts = _everybody([facts_of(one, turn_reward=turn_sums(one).total) for one in everyone])
    rows = [*_credited(rig, sampled.kept, credit), *_left_out(rig, sampled)]
    ages = _everybody([staleness_of(one.trajectory, step) for one in everyone])
    return {
        **summarise(facts),
        **multi_turn(facts),
        **credit_metrics(_everybody(rows)),
        **_counted(rig),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def _counted(rig: Rig) -> dict[str, float]:
    """What the condensers of all ranks counted in this step."""
    condenser = rig.components.condenser
    mine = dict(condenser.counts()) if isinstance(condenser, Counted) else {}
    found: dict[str, float] = {}
    for share in ranks.gather(mine):
        for name, value in share.items():
            found[f"condenser/{name}"] = found.get(f"condenser/{name}", 0.0) + value
    for name, value in found.items():
        if name.endswith("refused") and value:
            rig.observer.say(f"{name}: {value:g} in this step; inspect-trajectory says why")
    return found


def _everybody(mine: Sequence[T]) -> list[T]:
    return [one for share in ranks.gather(list(mine)) for one in share]


def _credited(rig: Rig, kept: Sequence[ScoredTrajectory], credit: StepCredit) -> Iterator[Credited]:
    algorithm, scores = rig.config.algorithm, credit.scores
    outcome_N = scores.correct_N if algorithm.estimator == "efficient" else scores.total_N
    pull_NK = credit.weight_NK * turn_tokens(kept)
    columns = (column.tolist() for column in (outcome_N, scores.correct_N, credit.advantage_NK, pull_NK))
    for one, outcome, correct, advantage_K, weight_K in zip(kept, *columns, strict=True):
        turns = len(one.trajectory.turns)
        yield Credited(
            group_id=one.trajectory.group_id,
            outcome=outcome,
            correct=correct,
            tokens=one.trajectory.output_tokens,
            advantages=tuple(advantage_K[:turns]),
            turn_weights=tuple(weight_K[:turns]),
            condense=tuple(turn.kind == "condense" for turn in one.trajectory.turns),
            handling=algorithm.on_stop.get(one.trajectory.stop, "train"),
            dropped=False,
        )


def _left_out(rig: Rig, sampled: Sampled) -> Iterator[Credited]:
    """Those that no weight is given to."""
    left_out = (*((one, False) for one in sampled.masked), *((one, True) for one in sampled.dropped))
    for one, dropped in left_out:
        nothing = (0.0,) * len(one.trajectory.turns)
        yield Credited(
            group_id=one.trajectory.group_id,
            outcome=one.score.total,
            correct=one.score.correct,
            tokens=one.trajectory.output_tokens,
            advantages=nothing,
            turn_weights=nothing,
            handling=rig.config.algorithm.on_stop.get(one.trajectory.stop, "train"),
            dropped=dropped,
        )
