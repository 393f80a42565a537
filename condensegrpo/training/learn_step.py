"""One step of the learner: credit of the trajectories, optimiser steps on them, and the weights for the sampler.

The credit of a turn is its advantage and the weight of its tokens; it is written for inspection and reduced to
metrics.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages import Estimate, Moments, Term, moments, whiten
from condensegrpo.algorithms.credit import Scores, condense_turns, scores_of, trained_turns, turn_tokens, with_sources
from condensegrpo.algorithms.objective import (
    ObjectiveFunction,
    Totals,
    summary_weight,
    token_weights,
    totals,
    with_summary_share,
)
from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.algorithms.settings import Aggregation, AggregationSettings, SourceCredit, StopSettings
from condensegrpo.core.errors import LearnerError, PluginError
from condensegrpo.core.failures import PluginFailure, plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.threads import result_in_thread
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import DeepSpeedEngine, Reference, measure_logprobs, optimizer_step
from condensegrpo.learner.weights import adapters, gathered_weights
from condensegrpo.metrics.credit import Credited, credit_metrics
from condensegrpo.metrics.trajectories import mt_grpo_metrics, summarise
from condensegrpo.storage.trajectories import Credit, CreditTerm, write_credit
from condensegrpo.training.rollout import StepBatch, staleness_of

T = TypeVar("T")
COUNT_SECONDS = 10.0  # that a condenser may take to return its counts
Counts = Callable[[], Mapping[str, float]]


class StepCredit(NamedTuple):
    """Scores, advantages and weights of the N trajectories that train."""

    scores: Scores
    terms: tuple[Term, ...]  # that the advantages were the sum of, before they were whitened
    advantage_NK: Tensor
    weight_NK: Tensor  # of one trained token of the turn
    kl_weight_NK: Tensor | None  # of the KL term of one; None: weight_NK


def give_credit(
    kept: Sequence[ScoredTrajectory],
    estimator: Callable[[Scores], Estimate],
    aggregation: AggregationSettings,
    *,
    stops: StopSettings,
    whitened: bool,
    sources: SourceCredit | None = None,
    kl_aggregation: Aggregation | None = None,
) -> StepCredit:
    """Give every turn an advantage and its tokens a weight; denominators count the trajectories of all ranks.

    Where there are ``sources``, a turn that the last reply was sampled without keeps a part of a positive advantage. KL
    terms weigh as losses do, unless there is a ``kl_aggregation``. Turns that do not train have weight 0, and
    neither they nor their tokens count.
    """
    scores = scores_of(kept, stops)
    trained_NK = trained_turns(kept, aggregation.turns)
    tokens_NK = turn_tokens(kept) * trained_NK
    with plugin_code("computing the advantages of a step", PluginError):
        estimate = estimator(scores)
    advantage_NK, terms = estimate if sources is None else with_sources(estimate, kept, sources)
    if whitened:
        batch_moments = Moments(*ranks.sum_over_ranks(moments(advantage_NK, tokens_NK)))
        advantage_NK = whiten(advantage_NK, tokens_NK, moments=batch_moments)
    step_totals = Totals(*ranks.sum_over_ranks(totals(tokens_NK, trained_NK.sum(dim=1))))
    weights_of = partial(token_weights, tokens_NK=tokens_NK, totals=step_totals, max_tokens=aggregation.max_tokens)
    weight_NK = weights_of(aggregation.mode)
    share = aggregation.summary_share
    if share is not None:
        condense_NK = condense_turns(kept)
        total, summaries = ranks.sum_over_ranks(summary_weight(weight_NK, tokens_NK, condense_NK))
        weight_NK = with_summary_share(weight_NK, condense_NK, share=share, total=total, summaries=summaries)
    return StepCredit(scores, terms, advantage_NK, weight_NK, weights_of(kl_aggregation) if kl_aggregation else None)


def record_credit(path: Path, batch: StepBatch, credit: StepCredit, *, stops: StopSettings) -> None:
    """Write the credit of every trajectory of every rank; trajectories that do not train have zeros."""
    rows = [
        Credit(
            trajectory=scored.trajectory.id,
            advantages=tuple(advantage_K[: len(scored.trajectory.turns)]),
            weights=tuple(weight_K[: len(scored.trajectory.turns)]),
            handling=stops.of(scored.trajectory.stop),
            terms=terms,
        )
        for scored, advantage_K, weight_K, terms in zip(
            batch.kept, credit.advantage_NK.tolist(), credit.weight_NK.tolist(), _terms(batch.kept, credit), strict=True
        )
    ]
    rows += [_no_credit(scored, "mask") for scored in batch.masked]
    rows += [_no_credit(scored, "drop") for scored in batch.dropped]
    of_all_ranks = _over_ranks(rows)
    if ranks.rank() == 0:
        write_credit(path, of_all_ranks)


def _terms(kept: Sequence[ScoredTrajectory], credit: StepCredit) -> Iterator[tuple[CreditTerm, ...]]:
    """The terms of every trajectory that it has at any of its turns."""
    every = torch.ones_like(credit.advantage_NK)

    def listed(value: Tensor) -> list[list[float]]:
        """A tensor (N,) or (N, K) as a number for each turn."""
        rows: list[list[float]] = ((value[:, None] if value.dim() == 1 else value).double() * every).tolist()
        return rows

    columns = [
        (
            term.name,
            listed(term.value_NK),
            listed(every if term.applies_NK is None else term.applies_NK),
            {name: listed(number) for name, number in term.numbers.items()},
        )
        for term in credit.terms
    ]
    for index, scored in enumerate(kept):
        turns = slice(len(scored.trajectory.turns))
        yield tuple(
            CreditTerm(
                name=name,
                values=tuple(
                    value if has else None
                    for value, has in zip(values[index][turns], applies[index][turns], strict=True)
                ),
                numbers={key: tuple(number[index][turns]) for key, number in numbers.items()},
            )
            for name, values, applies, numbers in columns
            if any(applies[index][turns])  # none where the first prompt overflowed
        )


def _no_credit(scored: ScoredTrajectory, handling: Literal["mask", "drop"]) -> Credit:
    zeros = _zeros(scored)
    return Credit(trajectory=scored.trajectory.id, advantages=zeros, weights=zeros, handling=handling)


def _zeros(scored: ScoredTrajectory) -> tuple[float, ...]:
    """One a turn."""
    return (0.0,) * len(scored.trajectory.turns)


def no_signal(metrics: Mapping[str, float]) -> str | None:
    """Why nothing was learned in a step, and which keys help; None: something was learned."""
    if metrics["groups_without_advantage"] < 1 and metrics.get("rows") != 0:
        return None
    if metrics["masked"] >= 1:
        return "every trajectory is masked for its stop (algorithm.stops.handling)"
    if metrics["success"] >= 1:
        return "every trajectory is correct. Take harder problems (task.options), or end the run here"
    if metrics["success"] == 0:
        return (
            "no trajectory is correct. Take easier problems (task.options), more steps of the warm start "
            "(warm_start.steps), larger rollout.limits, or a reward for parts of the way (reward.name=weighted_sum); "
            "`condensegrpo inspect RUN` shows what the policy does"
        )
    return (
        f"within every group all rewards are equal (success is {metrics['success']:.2f}). Raise "
        f"train.samples_per_problem or rollout.temperature, or set algorithm.resample_rounds=2"
    )


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
    figures = _over_ranks([scored.figures for scored in batch.trajectories])
    rows = list(_credited(batch, credit, outcome_N, stops))
    ages = _over_ranks([staleness_of(scored.trajectory, step) for scored in batch.trajectories])
    return {
        **summarise(figures),
        **mt_grpo_metrics(figures),
        **credit_metrics(_over_ranks(rows)),
        **condenser_counts(counts, observer),
        "staleness": fmean(ages),
        "staleness_max": float(max(ages)),
    }


def condenser_counts(counts: Counts, observer: Observer) -> dict[str, float]:
    """What the condensers of all ranks counted in this step; nothing of one that fails, which is reported."""
    counted = result_in_thread(counts, name="the counts of the condenser", seconds=COUNT_SECONDS)
    if isinstance(counted, PluginFailure):
        observer.trajectories_failed(str(counted), counted.traceback)
    sums: dict[str, float] = {}
    for of_rank in ranks.gather({} if isinstance(counted, PluginFailure) else counted):
        for name, value in of_rank.items():
            sums[f"condenser/{name}"] = sums.get(f"condenser/{name}", 0.0) + value
    return sums


def _over_ranks(rows: Sequence[T]) -> list[T]:
    """The rows of all ranks."""
    return [row for of_rank in ranks.gather(list(rows)) for row in of_rank]


def _credited(batch: StepBatch, credit: StepCredit, outcome_N: Tensor, stops: StopSettings) -> Iterator[Credited]:
    """Every trajectory; the masked and dropped ones have advantages and weights of 0."""
    turn_weight_NK = credit.weight_NK * turn_tokens(batch.kept)
    columns = (outcome_N, credit.scores.correct_N, credit.advantage_NK, turn_weight_NK)
    trained = zip(*(column.tolist() for column in columns), strict=True)
    others = batch.trajectories[len(batch.kept) :]
    untrained = ((each.figures.total, each.figures.correct, _zeros(each), _zeros(each)) for each in others)
    rows = zip(batch.trajectories, chain(trained, untrained), strict=True)
    for number, (scored, (outcome, correct, advantage_K, weight_K)) in enumerate(rows):
        turns = scored.trajectory.turns
        yield Credited(
            group_id=scored.figures.group_id,
            outcome=outcome,
            correct=correct,
            tokens=scored.figures.output_tokens,
            advantages=tuple(advantage_K[: len(turns)]),
            turn_weights=tuple(weight_K[: len(turns)]),
            condense=tuple(turn.kind == "condense" for turn in turns),
            handling=stops.of(scored.trajectory.stop),
            dropped=number >= len(batch.kept) + len(batch.masked),
        )


def update(
    learner: DeepSpeedEngine,
    rows: Sequence[Segment],
    objective: ObjectiveFunction,
    *,
    reference: Reference | None,
    updates: int,
    measure_old: bool,
    temperature: float,
    max_tokens: int,
) -> dict[str, float]:
    """Take ``updates`` optimiser steps on the rows of all ranks; returns the statistics of the last step.

    No step is taken if no rank has a row, since there is no gradient. Beside the statistics of the step:

        rows             of training data
        tokens/rows      in all of them
        tokens/computed  that went through the model in a pass: prefixes that rows share once, padding left out

    Args:
        reference: measures the log-probabilities that a KL term needs; None: there is no KL term.
        measure_old: whether ratios are taken against the learner's own log-probabilities before the first step.
        temperature: of the distribution sampled from; greedy replies (0) are learned at 1.
        max_tokens: of a micro-batch.
    """
    batches = packed(learner, rows, max_tokens=max_tokens)
    count, in_rows, computed = ranks.sum_over_ranks(
        [len(rows), sum(len(row.token_ids) for row in rows), sum(batch.token_ids.numel() for batch in batches)]
    )
    if count == 0:
        return {"rows": 0.0}
    temperature = temperature or 1.0
    if reference is not None:
        batches = reference(batches, temperature)
    if measure_old:
        old = measure_logprobs(learner, batches, temperature=temperature)
        batches = [replace(batch, old=old_T.cpu()) for batch, old_T in zip(batches, old, strict=True)]
    stats: dict[str, float] = {}
    for _ in range(updates):
        stats = optimizer_step(learner, batches, objective, temperature=temperature)
    return {"rows": count, "tokens/rows": in_rows, "tokens/computed": computed / learner.module.ranks_a_row, **stats}


def packed(learner: DeepSpeedEngine, rows: Sequence[Segment], *, max_tokens: int) -> list[PackedBatch]:
    """This rank's micro-batches of the rows of all ranks."""
    batches: list[PackedBatch] = learner.module.pack(rows, max_tokens=max_tokens)
    vocabulary = learner.module.policy.config.get_text_config().vocab_size
    highest = max((int(batch.token_ids.max()) for batch in batches), default=0)
    if highest >= vocabulary:  # on a GPU it would end the process
        raise LearnerError(
            f"laying out the rows of a step: found the token id {highest}, and the policy knows those below "
            f"{vocabulary}. The sampler has another tokenizer: give it the model of the run."
        )
    return batches


def sampled_weights(sampler: Sampler, learner: DeepSpeedEngine) -> NamedTensors:
    """What a sampler gets of the learner's weights: adapters alone where it computes them, else all, merged."""
    return adapters(learner) if sampler.takes_adapters else gathered_weights(learner)
