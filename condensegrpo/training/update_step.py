"""The optimiser steps of one batch."""

from collections.abc import Sequence
from dataclasses import replace

from condensegrpo.algorithms.packing import PackedBatch
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import deepspeed, ranks
from condensegrpo.learner.sharing import packed
from condensegrpo.training.rig import Rig


def update(rig: Rig, rows: Sequence[Segment]) -> dict[str, float]:
    """Take ``algorithm.updates_per_batch`` optimiser steps on the rows of all ranks; the statistics of the last one.

    None is taken if no rank has a row, since there is no gradient. Beside the statistics of the step:

        rows             of training data
        tokens/rows      in all of them
        tokens/computed  that went through the model in a pass: prefixes that rows share once, padding left out
    """
    batches = packed(
        rows, max_tokens=rig.config.learner.tokens_per_micro_batch, share=rig.learner.module.computes_trees
    )
    count, in_rows, computed = ranks.sum_over_ranks(
        [len(rows), sum(len(row.token_ids) for row in rows), sum(batch.token_ids.numel() for batch in batches)]
    )
    if count == 0:
        return {"rows": 0.0}
    batches = _measured(rig, batches)
    stats: dict[str, float] = {}
    for _ in range(rig.config.algorithm.updates_per_batch):
        stats = deepspeed.optimise(
            rig.learner, batches, rig.components.objective, temperature=learning_temperature(rig.config)
        )
    return {"rows": count, "tokens/rows": in_rows, "tokens/computed": computed, **stats}


def learning_temperature(config: RunConfig) -> float:
    """The log-probabilities to learn from are those of the distribution sampled from; greedy ones are taken at 1."""
    return config.rollout.temperature or 1.0


def _measured(rig: Rig, batches: list[PackedBatch]) -> list[PackedBatch]:
    """The micro-batches with what ratios and divergence are measured against.

    The reference's log-probabilities, and before the first of several steps the learner's own. With a single step its
    own are those of the step itself: no pass is needed for them.
    """
    algorithm, temperature = rig.config.algorithm, learning_temperature(rig.config)
    if rig.reference is not None:
        batches = rig.reference(batches, temperature)
    if algorithm.importance.cap and algorithm.updates_per_batch > 1:
        old = deepspeed.measure(rig.learner, batches, temperature=temperature)
        batches = [replace(batch, old=old_T.to(batch.old.device)) for batch, old_T in zip(batches, old, strict=True)]
    return batches
