"""From scored trajectories to weighted training rows: pure functions on the data of a batch.

scored trajectories ─▶ Scores ─▶ Estimator: advantage of every turn ─▶ rows, with the weight of every turn's tokens
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from condensegrpo.algorithms.advantages import Batch, Estimate, EstimatorPlugin, Term
from condensegrpo.algorithms.segments import segments
from condensegrpo.algorithms.settings import DEFAULT_STOPS, SourceCredit, StopSettings, TrainedKind
from condensegrpo.core.messages import Message, recalled_turn
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.shared_sequence import shared, shared_ids
from condensegrpo.core.trajectory import Segment, SpanStatus, TrainedTurn, Trajectory, Turn

T = TypeVar("T")


class Scores(NamedTuple):
    """The columns that estimators may take, for a batch of N trajectories."""

    total_N: Tensor  # float, R^O: Score.total, less the penalty of a stop
    score_N: Tensor  # float, Score.total, 0 for a penalised stop
    correct_N: Tensor  # float in [0, 1], 0 for a penalised stop
    context_N: Tensor  # float, tokens of the largest context
    uncached_N: Tensor  # float, prompt tokens of all turns that a prefix cache does not answer
    cached_N: Tensor  # float, prompt tokens of all turns that it answers
    output_N: Tensor  # float, sampled tokens of all turns
    turn_N: Tensor  # float, R^T: the sum of the turn rewards
    group_N: Tensor  # int, labels of the groups
    turns_N: Tensor  # int, number of act turns; estimators see no other turns
    result_turn_N: Tensor  # int, first act turn with a tool result; −1: none
    truncated_N: Tensor  # bool, whether a token budget cut it off
    state_NK: Tensor  # int, label of an act turn's context: equal iff group and prompt ids are; −1 beyond the turns
    turn_reward_NK: Tensor  # float, what an act turn is paid, and the texts that were written for it; 0 beyond
    act_NK: Tensor  # int, for every turn the index of the act turn whose advantage it gets; −1 beyond the turns


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator with its options, as a function of ``Scores``."""

    plugin: EstimatorPlugin
    options: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, scores: Scores) -> Estimate:
        """The advantage of every turn, (N, K), and the terms that it is the sum of, (N,) or (N, K).

        The plug-in sees act turns only, so that neither a discount nor a comparison of states depends on how often a
        history was summarised; its advantages are then spread over all turns (``Scores.act_NK``).
        """
        columns = {column: getattr(scores, column) for column in self.plugin.columns}
        batch = Batch(self.outcome(scores), scores.turn_N, scores.group_N, scores.turns_N, scores.result_turn_N)
        estimate = self.plugin(batch, **columns, **self.options)
        spread = partial(_spread, act_NK=scores.act_NK)
        return Estimate(spread(estimate.advantage_NK), tuple(term.mapped(spread) for term in estimate.terms))

    def outcome(self, scores: Scores) -> Tensor:
        """The outcome that it compares within a group, float (N,): the total reward, penalties subtracted or as 0."""
        return scores.score_N if self.plugin.learns_from == "score" else scores.total_N


def _spread(value: Tensor, act_NK: Tensor) -> Tensor:
    """A table of act turns (N, A) as one of all turns (N, K), 0 beyond them; a number a trajectory (N,) as it is."""
    if value.dim() == 1:
        return value
    if value.shape[1] == 0:
        return value.new_zeros(act_NK.shape)
    return torch.where(act_NK >= 0, value.gather(1, act_NK.clamp(min=0)), value.new_zeros(()))


def split_masked(
    scored: Sequence[ScoredTrajectory], stops: StopSettings
) -> tuple[tuple[ScoredTrajectory, ...], tuple[ScoredTrajectory, ...]]:
    """The trajectories that train, and those whose stop is masked; the latter count nowhere, as if never sampled."""
    kept = tuple(each for each in scored if stops.of(each.trajectory.stop) != "mask")
    masked = tuple(each for each in scored if stops.of(each.trajectory.stop) == "mask")
    return kept, masked


def scores_of(scored: Sequence[ScoredTrajectory], stops: StopSettings = DEFAULT_STOPS) -> Scores:
    """The columns of a batch, one entry per trajectory, in order.

    A penalised stop makes a trajectory incorrect with score 0, and subtracts ``stops.penalty`` from its total.
    """
    group_labels = _labels(each.trajectory.group_id for each in scored)
    prompts = [[(each.trajectory.group_id, digest) for digest in prompt_digests(each.trajectory)] for each in scored]
    prompt_labels = _labels(prompt for row in prompts for prompt in row)
    act_NK = _table([act_turns(each.trajectory) for each in scored], beyond=-1)
    penalised = [stops.of(each.trajectory.stop) == "penalise" for each in scored]
    total = [each.score.total - stops.penalty * bad for each, bad in zip(scored, penalised, strict=True)]
    score = [each.score.total * (not bad) for each, bad in zip(scored, penalised, strict=True)]
    correct = [each.score.correct * (not bad) for each, bad in zip(scored, penalised, strict=True)]
    return Scores(
        total_N=torch.tensor(total, dtype=torch.float64),
        score_N=torch.tensor(score, dtype=torch.float64),
        correct_N=torch.tensor(correct, dtype=torch.float64),
        context_N=torch.tensor([each.figures.context_tokens for each in scored], dtype=torch.float64),
        uncached_N=torch.tensor([each.figures.prompt_tokens_uncached for each in scored], dtype=torch.float64),
        cached_N=torch.tensor([each.figures.cached_tokens for each in scored], dtype=torch.float64),
        output_N=torch.tensor([each.figures.sampled_tokens for each in scored], dtype=torch.float64),
        turn_N=torch.tensor([each.figures.turn_reward for each in scored], dtype=torch.float64),
        group_N=torch.tensor([group_labels[each.trajectory.group_id] for each in scored], dtype=torch.int64),
        turns_N=torch.tensor([each.figures.replies for each in scored], dtype=torch.int64),
        result_turn_N=torch.tensor([result_turn(each.trajectory) for each in scored], dtype=torch.int64),
        truncated_N=torch.tensor([each.figures.truncated for each in scored], dtype=torch.bool),
        state_NK=_table([[prompt_labels[prompt] for prompt in row] for row in prompts], beyond=-1),
        turn_reward_NK=_turn_rewards(scored, act_NK),
        act_NK=act_NK,
    )


def idle_groups(scored: Sequence[ScoredTrajectory], advantage_NK: Tensor) -> frozenset[str]:
    """The groups in which every advantage of every trajectory is 0: they have no gradient."""
    groups = [each.trajectory.group_id for each in scored]
    active = (advantage_NK != 0).any(dim=1).tolist()
    return frozenset(groups) - {group for group, has_gradient in zip(groups, active, strict=True) if has_gradient}


def turn_tokens(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Sampled tokens of every turn, int (N, K), 0 beyond a trajectory's turns."""
    return _table([[len(turn.output_ids) for turn in each.trajectory.turns] for each in scored], beyond=0)


def trained_turns(scored: Sequence[ScoredTrajectory], turns: TrainedKind) -> Tensor:
    """Whether a turn trains, bool (N, K), False beyond a trajectory's turns and for the texts of a frozen writer."""
    trained = [[turns in ("all", turn.kind) and not turn.frozen for turn in each.trajectory.turns] for each in scored]
    return _table(trained, beyond=0).bool()


def condense_turns(scored: Sequence[ScoredTrajectory]) -> Tensor:
    """Whether a turn wrote a summary, bool (N, K), False beyond a trajectory's turns."""
    return _table([[turn.kind == "condense" for turn in each.trajectory.turns] for each in scored], beyond=0).bool()


def rows_of(
    scored: Sequence[ScoredTrajectory],
    advantage_NK: Tensor,
    weight_NK: Tensor,
    *,
    kl_weight_NK: Tensor | None = None,
    kl: bool = False,
) -> tuple[Segment, ...]:
    """The training rows of a batch.

    The weights were computed over *all* trajectories, so leaving rows out that have no gradient changes no denominator:
    those whose every turn has no weight or no advantage.

    Args:
        kl_weight_NK: the weights of KL terms; None: ``weight_NK``.
        kl: whether there is a KL term, which has a gradient without an advantage too.
    """

    def has_gradient(turn: TrainedTurn) -> bool:
        return bool(turn.weight or turn.kl_weight) if kl else bool(turn.weight and turn.advantage)

    rows: list[Segment] = []
    kl_weights = [None] * len(scored) if kl_weight_NK is None else kl_weight_NK.tolist()
    columns = (advantage_NK.tolist(), weight_NK.tolist(), kl_weights)
    for each, advantage_K, weight_K, kl_weight_K in zip(scored, *columns, strict=True):
        if kl or any(advantage_K):
            made = segments(each.trajectory, advantage_K=advantage_K, weight_K=weight_K, kl_weight_K=kl_weight_K)
            rows += (row for row in made if any(has_gradient(turn) for turn in row.turns))
    return tuple(rows)


def _labels(values: Iterable[T]) -> dict[T, int]:
    return {value: label for label, value in enumerate(dict.fromkeys(values))}


def _turn_rewards(scored: Sequence[ScoredTrajectory], act_NK: Tensor) -> Tensor:
    """R^T by act turn, float (N, A)."""
    paid_NK = torch.zeros(act_NK.shape, dtype=torch.float64)
    for row, each in enumerate(scored):
        by_rewards = each.score.turn_rewards or (0.0,) * len(each.trajectory.turns)
        for index, (turn, paid) in enumerate(zip(each.trajectory.turns, by_rewards, strict=True)):
            paid_NK[row, index] = paid + sum(turn.turn_rewards.values())
    most = max((each.trajectory.replies for each in scored), default=0)
    turn_reward_NK = torch.zeros((len(scored), most), dtype=torch.float64)
    if most:
        turn_reward_NK.scatter_add_(1, act_NK.clamp(min=0), paid_NK)
    return turn_reward_NK


def _table(rows: Sequence[Sequence[int]], *, beyond: int) -> Tensor:
    """Rows of different lengths as one int (N, K)."""
    longest = max(map(len, rows), default=0)
    filled = [[*row, *[beyond] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(len(rows), longest)


def result_turn(trajectory: Trajectory) -> int:
    """The index among the act turns of the first whose observation carried a tool result; −1: none.

    An error that answers a tool call is a result too: the policy saw it.
    """
    acts = (turn for turn in trajectory.turns if turn.kind == "act")
    for index, turn in enumerate(acts):
        if any(message.tool_call_id is not None for message in turn.observations):
            return index
    return -1


def act_turns(trajectory: Trajectory) -> list[int]:
    """For every turn the act turn, counted among the act turns alone, whose advantage it gets.

    A condense turn gets the advantage of the act turn that it was written for, the next one; after the last act turn,
    that of the last.

        act act condense act condense   ─▶   0 1 2 2 2
    """
    acts, indices = 0, []
    for turn in trajectory.turns:
        indices.append(min(acts, trajectory.replies - 1))
        acts += turn.kind == "act"
    return indices


def prompt_digests(trajectory: Trajectory) -> Iterator[bytes]:
    """A digest of the prompt of every act turn, its media included: one that continues the last costs what it adds."""
    digest, last = blake2b(), shared_ids(())
    for turn in trajectory.turns:
        prompt = shared(turn.prompt_ids)
        if not prompt.continues(last):
            digest, last = blake2b(), shared_ids(())
        digest.update(array("I", prompt[len(last) :]))
        last = prompt
        if turn.kind == "act":
            yield digest.digest() + "".join(turn.media).encode()


def with_sources(estimate: Estimate, kept: Sequence[ScoredTrajectory], credit: SourceCredit) -> Estimate:
    """The estimate with less of a positive advantage where the last reply was sampled without the turn's unit.

        A'_it = f_it · A_it   where A_it > 0, else A_it

    After ECHO (https://arxiv.org/abs/2606.31650), which routes positive credit by the indices of the turns that the
    answer's context was made of. The paper gives no formula that we found; this one is ours. f: ``source_factors``.
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
    """f of every turn, (K,): by the form of its unit in the prompt of the last act turn.

    turn                 0        1        2     3 condense   4     5 answers, shown the summary of 0-1, 2, 4
    unit at the answer   summary  summary  kept  –            kept  –
    f for rewritten ½    ½        ½        1     1            1     1

    1 for a unit that is shown whole, with notes behind it or not, and for the last act turn itself;
    ``credit.rewritten`` for a unit that a placeholder, a note or a summary stands for; ``credit.dropped`` for one that
    is gone. A turn that a shown result recalls counts as shown. The newest condense turn has 1; the others, whose texts
    it replaced, have ``rewritten``.
    """
    turns = trajectory.turns
    factors = [1.0] * len(turns)
    acts = [index for index, turn in enumerate(turns) if turn.kind == "act"]
    if not acts:
        return factors
    last, shown = acts[-1], set(acts)
    condensations = [found for index in acts if (found := turns[index].condensation) is not None]
    factor_of = {SpanStatus.REWRITTEN: credit.rewritten, SpanStatus.DROPPED: credit.dropped}
    for span in condensations[-1].spans if condensations else ():
        for index in span.turns if span.status is not SpanStatus.KEPT else ():
            if span.status is SpanStatus.DROPPED or not _shows(turns[last].context, turns[index]):
                factors[index] = factor_of[span.status]
                shown.discard(index)
    condensed = [index for index, turn in enumerate(turns[:last]) if turn.kind == "condense"]
    for index in condensed:
        factors[index] = 1.0 if index == condensed[-1] else credit.rewritten
    for index in reversed(acts[:-1]):  # the result of a recall may itself be recalled
        for source in map(recalled_turn, turns[index].observations if index in shown else ()):
            if source is not None and source < index:  # a text that is no answer of recall may say anything
                factors[source] = 1.0
                shown.add(source)
    return factors


def _shows(context: Sequence[Message], turn: Turn) -> bool:
    """Whether a context holds a turn's reply and its observations, each with or without text after it."""
    unit = (turn.reply, *turn.observations)
    return any(
        all(
            now.role == was.role and now.text.startswith(was.text)
            for now, was in zip(context[at : at + len(unit)], unit, strict=True)
        )
        for at in range(len(context) - len(unit) + 1)
    )
