"""The credit of one step: advantage and token weight of every turn, written for inspection and reduced to metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from condensegrpo.algorithms.advantages import Moments, moments, whiten
from condensegrpo.algorithms.credit import Scores, condense_turns, scores_of, turn_counts, turn_tokens
from condensegrpo.algorithms.losses import Totals, share_of_summaries, token_weights, totals, with_share
from condensegrpo.algorithms.settings import Aggregation, AggregationSettings, StopSettings
from condensegrpo.algorithms.staleness import staleness_of
from condensegrpo.algorithms.turn_facts import turn_sums
from condensegrpo.core.failures import Failure
from condensegrpo.core.observer import Observer
from condensegrpo.core.thread_call import result_in_thread
from condensegrpo.core.trajectory import ScoredTrajectory
from condensegrpo.learner import ranks
from condensegrpo.metrics.credit import Credited, credit_metrics
from condensegrpo.metrics.trajectories import facts_of, multi_turn, summarise
from condensegrpo.rollout.player import COUNT_SECONDS
from condensegrpo.storage.credit import Credit, write_credit
from condensegrpo.training.rollout_step import StepBatch

T = TypeVar("T")
Counts = Callable[[], Mapping[str, float]]


class StepCredit(NamedTuple):
    """Scores, advantages and weights of the N trajectories that train."""

    scores: Scores
    advantage_NK: Tensor
    weight_NK: Tensor  # of one trained token of the turn
    kl_weight_NK: Tensor | None  # of the KL term of one; None: weight_NK


def give_credit(
    kept: Sequence[ScoredTrajectory],
    estimator: Callable[[Scores], Tensor],
    aggregation: AggregationSettings,
    *,
    stops: StopSettings,
    whitened: bool,
    kl_aggregation: Aggregation | None = None,
) -> StepCredit:
    """Give every turn an advantage and its tokens a weight; denominators count the trajectories of all ranks.

    KL terms weigh as losses do, unless there is a ``kl_aggregation``.
    """
    scores = scores_of(kept, stops)
    tokens_NK = turn_tokens(kept)
    advantage_NK = estimator(scores)
    if whitened:
        everywhere = Moments(*ranks.sum_over_ranks(moments(advantage_NK, tokens_NK)))
        advantage_NK = whiten(advantage_NK, tokens_NK, moments=everywhere)
    step_totals = Totals(*ranks.sum_over_ranks(totals(tokens_NK, turn_counts(kept))))
    weights_of = partial(token_weights, tokens_NK=tokens_NK, totals=step_totals, max_tokens=aggregation.max_tokens)
    weight_NK = weights_of(aggregation.mode)
    share = aggregation.summary_share
    if share is not None:
        condense_NK = condense_turns(kept)
        total, summaries = ranks.sum_over_ranks(share_of_summaries(weight_NK, tokens_NK, condense_NK))
        weight_NK = with_share(weight_NK, condense_NK, share=share, total=total, summaries=summaries)
    return StepCredit(scores, advantage_NK, weight_NK, weights_of(kl_aggregation) if kl_aggregation else None)


def record_credit(path: Path, batch: StepBatch, credit: StepCredit, *, stops: StopSettings) -> None:
    """Write the credit of every trajectory of every rank; trajectories that do not train have zeros."""
    rows = [
        Credit(
            trajectory=scored.trajectory.id,
            advantages=tuple(advantage_K[: len(scored.trajectory.turns)]),
            weights=tuple(weight_K[: len(scored.trajectory.turns)]),
            handling=stops.of(scored.trajectory.stop),
        )
        for scored, advantage_K, weight_K in zip(
            batch.kept, credit.advantage_NK.tolist(), credit.weight_NK.tolist(), strict=True
        )
    ]
    rows += [_no_credit(scored, "mask") for scored in batch.masked]
    rows += [_no_credit(scored, "drop") for scored in batch.dropped]
    of_all_ranks = _over_ranks(rows)
    if ranks.rank() == 0:
        write_credit(path, of_all_ranks)


def _no_credit(scored: ScoredTrajectory, handling: Literal["mask", "drop"]) -> Credit:
    zeros = (0.0,) * len(scored.trajectory.turns)
    return Credit(trajectory=scored.trajectory.id, advantages=zeros, weights=zeros, handling=handling)


def step_metrics(
    step: int,
    batch: StepBatch,
    credit: StepCredit,
    *,
    counts: Counts,
    stops: StopSettings,
    outcome_N: Tensor,
    observer: Observer,
) -> dict[str, float]:
    """The metrics of the trajectories of all ranks and of their credit, each trajectory counted once.

    Args:
        counts: of ``GroupPlayer``.
        outcome_N: the outcome that the estimator compares within a group, of the trajectories that train.
    """
    facts = _over_ranks([facts_of(scored, turn_reward=turn_sums(scored).total) for scored in batch.trajectories])
    rows = [*_credited(batch.kept, credit, outcome_N, stops), *_without_credit(batch, stops)]
    ages = _over_ranks([staleness_of(scored.trajectory, step) for scored in batch.trajectories])
    return {
        **summarise(facts),
        **multi_turn(facts),
        **credit_metrics(_over_ranks(rows)),
        **condenser_counts(counts, observer),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def condenser_counts(counts: Counts, observer: Observer) -> dict[str, float]:
    """What the condensers of all ranks counted in this step; nothing of one that fails, which is reported."""
    own = result_in_thread(counts, name="the counts of the condenser", seconds=COUNT_SECONDS)
    if isinstance(own, Failure):
        observer.failed(str(own), own.traceback)
    sums: dict[str, float] = {}
    for counted in ranks.gather({} if isinstance(own, Failure) else own):
        for name, value in counted.items():
            sums[f"condenser/{name}"] = sums.get(f"condenser/{name}", 0.0) + value
    return sums


def _over_ranks(own: Sequence[T]) -> list[T]:
    return [item for share in ranks.gather(list(own)) for item in share]


def _credited(
    kept: Sequence[ScoredTrajectory], credit: StepCredit, outcome_N: Tensor, stops: StopSettings
) -> Iterator[Credited]:
    turn_weight_NK = credit.weight_NK * turn_tokens(kept)
    columns = (outcome_N, credit.scores.correct_N, credit.advantage_NK, turn_weight_NK)
    for scored, outcome, correct, advantage_K, weight_K in zip(
        kept, *(column.tolist() for column in columns), strict=True
    ):
        turns = len(scored.trajectory.turns)
        yield Credited(
            group_id=scored.trajectory.group_id,
            outcome=outcome,
            correct=correct,
            tokens=scored.trajectory.output_tokens,
            advantages=tuple(advantage_K[:turns]),
            turn_weights=tuple(weight_K[:turns]),
            condense=tuple(turn.kind == "condense" for turn in scored.trajectory.turns),
            handling=stops.of(scored.trajectory.stop),
            dropped=False,
        )


def _without_credit(batch: StepBatch, stops: StopSettings) -> Iterator[Credited]:
    """The masked and dropped trajectories."""
    for number, scored in enumerate((*batch.masked, *batch.dropped)):
        zeros = (0.0,) * len(scored.trajectory.turns)
        yield Credited(
            group_id=scored.trajectory.group_id,
            outcome=scored.score.total,
            correct=scored.score.correct,
            tokens=scored.trajectory.output_tokens,
            advantages=zeros,
            turn_weights=zeros,
            handling=stops.of(scored.trajectory.stop),
            dropped=number >= len(batch.masked),
        )
