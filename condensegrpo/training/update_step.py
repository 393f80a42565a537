"""The optimiser steps of one batch, and the weights that the sampler gets after them."""

from collections.abc import Sequence
from dataclasses import replace

from condensegrpo.algorithms.objective import ObjectiveFunction
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.protocols.sampler import NamedTensors, Sampler, TakesAdapters
from condensegrpo.core.trajectory import Segment
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import DeepSpeedEngine, measure_logprobs, optimizer_step
from condensegrpo.learner.micro_batches import pack_rows
from condensegrpo.learner.reference import Reference
from condensegrpo.learner.weights import adapters, gathered_weights


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
    together: int = learner.module.ranks_a_row
    share = learner.module.computes_trees
    batches = pack_rows(learner.module.named(rows), max_tokens=max_tokens, share=share, ranks_a_row=together)
    vocabulary = learner.module.policy.config.get_text_config().vocab_size
    highest = max((int(batch.token_ids.max()) for batch in batches), default=0)
    if highest >= vocabulary:  # on a GPU it would end the process
        raise LearnerError(
            f"laying out the rows of a step: found the token id {highest}, and the policy knows those below "
            f"{vocabulary}. The sampler has another tokenizer: give it the model of the run."
        )
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
    return {"rows": count, "tokens/rows": in_rows, "tokens/computed": computed / together, **stats}


def sampled_weights(sampler: Sampler, learner: DeepSpeedEngine) -> NamedTensors:
    """What a sampler gets of the learner's weights: adapters alone where it computes them, else all, merged."""
    return (
        adapters(learner)
        if isinstance(sampler, TakesAdapters) and sampler.takes_adapters
        else gathered_weights(learner)
    )
