"""From scored trajectories to weighted training rows. Floor 4: pure functions over the data of a batch.

scores ─▶ advantage of every turn ─▶ weight of every turn's tokens ─▶ segments
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages import efficient, gigpo
from condensegrpo.algorithms.segments import segments
from condensegrpo.algorithms.turn_rewards import turn_sums
from condensegrpo.core.trajectory import Handling, ScoredTrajectory, Segment, Stop, Trajectory

T = TypeVar("T")
Estimator = Callable[..., Tensor]  # one of algorithms.advantages.ESTIMATORS, whose arguments its module explains
CUT_OFF = frozenset({Stop.OUTPUT_LENGTH, Stop.CONTEXT_OVERFLOW})  # stops for want of room


class Scores(NamedTuple):
    """What the estimators see of a batch of N trajectories."""

    total_N: Tensor  # float, R^O: Score.total, less the penalty of a stop
    correct_N: Tensor  # float in [0, 1], 0 for a penalised stop
    context_N: Tensor  # float, tokens of the largest context
    turn_N: Tensor  # float, R^T: the sum of the turn rewards
    group_N: Tensor  # int, labels of the groups
    turns_N: Tensor  # int, act turns: estimators know no others
    result_turn_N: Tensor  # int, first act turn with a tool result; −1: none
    truncated_N: Tensor  # bool, whether it stopped for want of room
    state_NK: Tensor  # int, label of an act turn's context: equal iff group and prompt ids are; −1 beyond the turns
    act_NK: Tensor  # int, of every turn the act turn, counted among those, whose advantage it has; −1 beyond the turns


def split_masked(
    scored: Sequence[ScoredTrajectory], on_stop: Mapping[Stop, Handling]
) -> tuple[tuple[ScoredTrajectory, ...], tuple[ScoredTrajectory, ...]]:
    """Those that train and those whose stop is masked: the latter count nowhere, as if they had not been sampled."""
    masked = [on_stop.get(one.trajectory.stop) == "mask" for one in scored]
    return (
        tuple(one for one, out in zip(scored, masked, strict=True) if not out),
        tuple(one for one, out in zip(scored, masked, strict=True) if out),
    )


def scores_of(
    scored: Sequence[ScoredTrajectory], *, on_stop: Mapping[Stop, Handling] | None = None, stop_penalty: float = 0.0
) -> Scores:
    """The columns of a batch, one entry a trajectory, in order.

    A stop that ``on_stop`` penalises makes a trajectory wrong and takes ``stop_penalty`` off its total.
    """
    labels = _labels(one.trajectory.group_id for one in scored)
    sums = [turn_sums(one) for one in scored]
    penalised = [(on_stop or {}).get(one.trajectory.stop) == "penalise" for one in scored]
    total = [one.score.total - stop_penalty * bad for one, bad in zip(scored, penalised, strict=True)]
    correct = [one.score.correct * (not bad) for one, bad in zip(scored, penalised, strict=True)]
    return Scores(
        total_N=torch.tensor(total, dtype=torch.float64),
        correct_N=torch.tensor(correct, dtype=torch.float64),
        context_N=torch.tensor([one.score.context_tokens for one in scored], dtype=torch.float64),
        turn_N=torch.tensor([one.total for one in sums], dtype=torch.float64),
        group_N=torch.tensor([labels[one.trajectory.group_id] for one in scored], dtype=torch.int64),
        turns_N=torch.tensor([one.trajectory.replies for one in scored], dtype=torch.int64),
        result_turn_N=torch.tensor([one.result_turn for one in sums], dtype=torch.int64),
        truncated_N=torch.tensor([one.trajectory.stop in CUT_OFF for one in scored], dtype=torch.bool),
        state_NK=_states(scored),
        act_NK=_table([act_turns(one.trajectory) for one in scored], beyond=-1),
    )


def act_turns(trajectory: Trajectory) -> list[int]:
    """Of every turn the act turn, counted among the act turns alone, whose advantage it has.

    A condense turn has the advantage of the act turn that it was written for, the next one; after the last act turn,
    that of the last.

        act act condense act condense   ─▶   0 1 2 2 2
    """
    acts, found = 0, []
    for turn in trajectory.turns:
        found.append(min(acts, trajectory.replies - 1))
        acts += turn.kind == "act"
    return found


def advantages_of(scores: Scores, estimator: Estimator, options: Mapping[str, Any]) -> Tensor:
    """The advantage of every turn, (N, K).

    Estimators see act turns only, so that neither a discount nor a comparison of states depends on how often a history
    was summarised; what they give is then spread over all turns (``Scores.act_NK``).

    ``efficient`` separates correctness from context and takes both; every other estimator takes the total reward, and
    ``gigpo`` the contexts as states besides.
    """
    rest = (scores.turn_N, scores.group_N, scores.turns_N, scores.result_turn_N)
    if estimator is efficient:
        of_acts = efficient(
            scores.correct_N, *rest, context_N=scores.context_N, truncated_N=scores.truncated_N, **options
        )
    elif estimator is gigpo:
        of_acts = gigpo(scores.total_N, *rest, state_NK=scores.state_NK, **options)
    else:
        of_acts = estimator(scores.total_N, *rest, **options)
    return _spread(of_acts, scores.act_NK)


def idle_groups(scored: Sequence[ScoredTrajectory], advantage_NK: Tensor) -> frozenset[str]:
    """The groups in which no trajectory has an advantage at any turn: they teach nothing."""
    idle = (advantage_NK == 0).all(dim=1).tolist()
    groups = [one.trajectory.group_id for one in scored]
    return frozenset(groups) - {group for group, nothing in zip(groups, idle, strict=True) if not nothing}


def turn_tokens(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Sampled tokens of every turn, int (N, K), 0 beyond a trajectory's turns."""
    return _table([[len(turn.output_ids) for turn in one.trajectory.turns] for one in scored], beyond=0)


def condense_turns(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Whether a turn wrote a summary, bool (N, K), False beyond a trajectory's turns."""
    return _table([[turn.kind == "condense" for turn in one.trajectory.turns] for one in scored], beyond=0).bool()


def turn_counts(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Turns of every trajectory, condense turns among them, int (N,)."""
    return torch.tensor([len(one.trajectory.turns) for one in scored], dtype=torch.int64)


def rows_of(
    scored: Sequence[ScoredTrajectory], advantage_NK: Tensor, weight_NK: Tensor, *, idle: bool = False
) -> tuple[Segment, ...]:
    """The training rows of a batch.

    The weights were computed over *all* trajectories, so leaving some out changes no denominator.

    Args:
        idle: whether trajectories without any advantage get rows too. The policy loss has no gradient there, a KL term
            has.
    """
    rows: list[Segment] = []
    for one, advantage_K, weight_K in zip(scored, advantage_NK.tolist(), weight_NK.tolist(), strict=True):
        if idle or any(advantage_K):
            count = len(one.trajectory.turns)
            rows += segments(one.trajectory, advantage_K=advantage_K[:count], weight_K=weight_K[:count])
    return tuple(rows)


def _spread(of_acts_NA: Tensor, act_NK: Tensor) -> Tensor:
    """The advantages of act turns (N, A) as those of all turns (N, K); 0 beyond a trajectory's turns."""
    if of_acts_NA.shape[1] == 0:
        return of_acts_NA.new_zeros(act_NK.shape)
    return torch.where(act_NK >= 0, of_acts_NA.gather(1, act_NK.clamp(min=0)), 0.0)


def _labels(things: Iterable[T]) -> dict[T, int]:
    return {thing: label for label, thing in enumerate(dict.fromkeys(things))}


def _states(scored: Sequence[ScoredTrajectory]) -> Tensor:
    prompts = [
        [(one.trajectory.group_id, turn.prompt_ids) for turn in one.trajectory.turns if turn.kind == "act"]
        for one in scored
    ]
    labels = _labels(prompt for row in prompts for prompt in row)
    return _table([[labels[prompt] for prompt in row] for row in prompts], beyond=-1)


def _table(rows: Sequence[Sequence[int]], *, beyond: int) -> Tensor:
    """Rows of different lengths as one int (N, K)."""
    longest = max(map(len, rows), default=0)
    filled = [[*row, *[beyond] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(rows), longest)
