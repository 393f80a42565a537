"""Credit diagnostics: which trajectories have the weight of a batch, and which have a gradient. Pure functions.

Ranks exchange a small ``Credited`` of every trajectory; the figures are those of all ranks together. Every key
is explained in docs/reference/metrics.md.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from condensegrpo.algorithms.advantages import ROUNDING
from condensegrpo.core.trajectory import Handling


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """The advantages and weights of one trajectory of a batch."""

    group_id: str  # unique among the groups of a step
    outcome: float  # the estimator's input: the total reward, less a penalty for its stop
    correct: float  # in [0, 1]; 0 if the stop is penalised, 1 is correct
    tokens: int  # sampled ones, of all turns
    advantages: tuple[float, ...]  # (K,) of every turn
    turn_weights: tuple[float, ...]  # (K,) Σ over the turn's tokens of their weight in the optimiser step
    handling: Handling  # by its stop; masked trajectories do not train
    dropped: bool  # its group was dropped by dynamic sampling
    condense: tuple[bool, ...] = ()  # (K,) whether the turn wrote a summary; (): none did

    @property
    def token_weight(self) -> float:
        """Σ over all of its trained tokens of their weight in the optimiser step."""
        return math.fsum(self.turn_weights)

    @property
    def update(self) -> float:
        """Σ_t |A_t|·w_t: its part in the update, if the gradients of all tokens had one length."""
        return math.fsum(abs(a) * weight for a, weight in zip(self.advantages, self.turn_weights, strict=True))


def credit_metrics(rows: Sequence[Credited]) -> dict[str, float]:
    """The diagnostics of an optimiser step, as shares in [0, 1]; a share of nothing is 0.

    docs/reference/metrics.md defines every share. A *kept* group has no dropped trajectory, and the trajectories of
    kept groups that are not masked *learn*. Advantages and weights of all others are ignored.

    Worked example: two groups, every trajectory one turn of weight ¼, the outcomes 1, 0 | 1, 1 and the advantages
    ½, −½ | 0, 0. Half of the groups are equal and half without advantage, half of the trajectories have no advantage;
    correct trajectories have ¾ of the weight and ½ of the update. With the advantages 0.1, −0.1 in the second group, as
    ``efficient`` gives for different contexts, it stays equal and is not without advantage.
    """
    dropped = {row.group_id for row in rows if row.dropped}
    kept = [row for row in rows if row.group_id not in dropped]
    masked = [row for row in kept if row.handling == "mask"]
    learn = [row for row in kept if row.handling != "mask"]
    correct = [row for row in learn if row.correct >= 1]
    by_group: dict[str, list[Credited]] = defaultdict(list)
    for row in learn:
        by_group[row.group_id].append(row)
    groups = by_group.values()
    outcomes = [[row.outcome for row in group] for group in groups]
    return {
        "groups_of_equal_reward": _share(  # but for rounding, as the estimators see it
            max(group) - min(group) <= ROUNDING * max(map(abs, group)) for group in outcomes
        ),
        "groups_without_advantage": _share(not any(any(row.advantages) for row in group) for group in groups),
        "groups_dropped": _part([len(dropped)], [len({row.group_id for row in rows})]),
        "trajectories_without_advantage": _share(not any(row.advantages) for row in learn),
        "correct_with_negative_advantage": _share(math.fsum(row.advantages) < 0 for row in correct),
        "masked": _part([len(masked)], [len(kept)]),
        "masked_tokens": _part((row.tokens for row in masked), (row.tokens for row in kept)),
        "penalised": _share(row.handling == "penalise" for row in kept),
        "weight/correct": _part((row.token_weight for row in correct), (row.token_weight for row in learn)),
        **_weight_by_turns(learn),
        "weight/gini": gini([row.token_weight for row in learn if row.tokens]),
        "update/correct": _part((row.update for row in correct), (row.update for row in learn)),
        **_summaries(learn),
    }


def gini(values: Sequence[float]) -> float:
    """The Gini coefficient: 0 where all values are equal, (n−1)/n where one of n has everything; 0 of nothing.

        G = Σ_i Σ_j |x_i − x_j| / (2 n² mean) = Σ_i (2i − n − 1)·x_(i) / (n Σ x)        x_(1) ≤ x_(2) ≤ …

    (https://mathworld.wolfram.com/GiniCoefficient.html; not multiplied by n/(n−1), which would correct for small n.)

        1, 1, 2   ─▶   (−2·1 + 0·1 + 2·2) / (3·4) = 1/6
    """
    largest = max(values, default=0.0)
    if largest == 0:
        return 0.0
    scaled = sorted(value / largest for value in values)  # sums of the largest and of the smallest floats stay exact
    count = len(scaled)
    spread = math.fsum((2 * rank - count - 1) * value for rank, value in enumerate(scaled, start=1))
    return spread / (count * math.fsum(scaled))


def _summaries(learn: Sequence[Credited]) -> dict[str, float]:
    """The part of summaries in the weight and in the update of a batch; nothing where there are none."""
    weights, updates = list[float](), list[float]()
    summary_weights, summary_updates = list[float](), list[float]()
    for row in learn:
        turns = zip(row.advantages, row.turn_weights, strict=True)
        turn_updates = [abs(advantage) * weight for advantage, weight in turns]
        weights += row.turn_weights
        updates += turn_updates
        summary_weights += compress(row.turn_weights, row.condense)
        summary_updates += compress(turn_updates, row.condense)
    if not any(any(row.condense) for row in learn):
        return {}
    return {"weight/summaries": _part(summary_weights, weights), "update/summaries": _part(summary_updates, updates)}


def _weight_by_turns(learn: Sequence[Credited]) -> dict[str, float]:
    """By numbers of turns above 2^(power − 1) and up to 2^power: ``1``, ``2``, ``3_4``, ``5_8``."""
    weights: dict[int, list[float]] = defaultdict(list)
    for row in learn:
        if row.advantages:
            weights[(len(row.advantages) - 1).bit_length()].append(row.token_weight)
    every = [row.token_weight for row in learn]
    shares: dict[str, float] = {}
    for power in sorted(weights):
        low, high = (1 << power) // 2 + 1, 1 << power
        shares[f"weight/turns_{high if low >= high else f'{low}_{high}'}"] = _part(weights[power], every)
    return shares


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / len(listed) if listed else 0.0


def _part(amounts: Iterable[float], every: Iterable[float]) -> float:
    """Σ amounts / Σ every; the sums are exact, so the order does not matter."""
    total = math.fsum(every)
    return math.fsum(amounts) / total if total else 0.0
