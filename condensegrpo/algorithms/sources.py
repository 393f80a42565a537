"""Credit of sources: a good turn whose unit the answer's context lost keeps a part of its advantage only.

turn                 0        1          2     3 condense   4     5 answers; its prompt shows the summary of 0-1, 2, 4
unit at the answer   summary  summary    kept  –            kept  –
with dropped 0, rewritten ½: A · ½ ½ 1 1 1 1
"""

from collections.abc import Sequence

import torch

from condensegrpo.algorithms.advantages import Estimate, Term
from condensegrpo.algorithms.settings import SourceCredit
from condensegrpo.core.results import recalled_turn
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import SpanStatus, Trajectory


def with_sources(estimate: Estimate, kept: Sequence[ScoredTrajectory], credit: SourceCredit) -> Estimate:
    """The estimate with less of a positive advantage where the last reply was sampled without the turn's unit.

        A'_it = f_it · A_it   where A_it > 0, else A_it

    After ECHO (https://arxiv.org/abs/2606.31650), which routes positive credit by the indices of the turns that the
    answer's context was made of. Its formula is not in what we read; this one is ours. f is of ``source_factors``.
    """
    advantage_NK = estimate.advantage_NK
    factor_NK = torch.ones_like(advantage_NK)
    for row, scored in enumerate(kept):
        factors = source_factors(scored.trajectory, credit)
        factor_NK[row, : len(factors)] = torch.tensor(factors, dtype=factor_NK.dtype)
    lost_NK = torch.where(advantage_NK > 0, (factor_NK - 1) * advantage_NK, 0.0)
    term = Term("sources", lost_NK.double(), {"f": factor_NK}, applies_NK=lost_NK != 0)
    return Estimate(advantage_NK + lost_NK, (*estimate.terms, term) if estimate.terms else ())


def source_factors(trajectory: Trajectory, credit: SourceCredit) -> list[float]:
    """f of every turn, (K,): by what became of its unit in the prompt of the last act turn.

    1 for a unit that is shown verbatim, and for the last act turn itself; ``credit.rewritten`` for a unit that a
    placeholder, a note or a summary stands for; ``credit.dropped`` for one that is gone. A turn that a shown result
    recalls counts as shown. Of condense turns the newest has 1, and the others, whose texts it replaced, ``rewritten``.
    """
    acts = [index for index, turn in enumerate(trajectory.turns) if turn.kind == "act"]
    if not acts:
        return [1.0] * len(trajectory.turns)
    last, factors, shown = acts[-1], [1.0] * len(trajectory.turns), set(acts)
    condensations = (trajectory.turns[index].condensation for index in reversed(acts))
    newest = next((condensation for condensation in condensations if condensation is not None), None)
    of_status = {SpanStatus.KEPT: 1.0, SpanStatus.REWRITTEN: credit.rewritten, SpanStatus.DROPPED: credit.dropped}
    for span in newest.spans if newest is not None else ():
        for index in span.turns:
            factors[index] = of_status[span.status]
            if span.status is not SpanStatus.KEPT:
                shown.discard(index)
    condensed = [index for index, turn in enumerate(trajectory.turns[:last]) if turn.kind == "condense"]
    for index in condensed:
        factors[index] = 1.0 if index == condensed[-1] else credit.rewritten
    for index in reversed(acts[:-1]):  # the result of a recall may itself be recalled
        recalled = [recalled_turn(result) for result in trajectory.turns[index].observations]
        for source in recalled if index in shown else ():
            if source is not None and source < index:  # a text that is no answer of recall may say anything
                factors[source] = 1.0
                shown.add(source)
    return factors
