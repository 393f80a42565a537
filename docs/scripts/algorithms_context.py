"""Context in reward and advantage: tables and plot of docs/reference/rewards.md."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from algorithms_parts import number, percent, table, turn_of
from torch import Tensor

from condensegrpo.algorithms.advantages import mean
from condensegrpo.algorithms.credit import Estimator, Scores
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.protocols.reward import GroupReward, Reward, RewardResult
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import StopReason, Trajectory
from condensegrpo.rewards.context import InverseMaxContext, InverseScaled, LinearPassRate, Multiplicative

CONTEXTS = (100, 200, 400, 1600)
TAX = {"context_low": 100.0, "context_high": 1600.0, "coefficient": 0.2}
REWARDS: Mapping[str, Reward | GroupReward] = {
    "inverse_max_context": InverseMaxContext(),
    "inverse_scaled": InverseScaled(reference_tokens=200.0),
    "multiplicative": Multiplicative(**TAX),
    "linear_pass_rate": LinearPassRate(**TAX),
}
PROBLEM = Problem(id="p", question="?", answer="yes")
LOW, HIGH = 1024, 16384  # tokens: contexts of the plot, and the anchors of efficient
SIBLINGS = 100  # of the plot's group, so that its pass rates are exact
RATES = (0.3, 0.7, 0.97)
DRAWN = (0.3, 0.7, 0.9, 0.97)  # chances that a trajectory of the drawn groups is right
NARROW = (0.9, 0.97)  # those drawn once more, from contexts that differ less
GROUPS, OF, SEED = 2000, 8, 0
STYLES = {0.3: ("#0072B2", "-"), 0.7: ("#D55E00", "--"), 0.97: ("#000000", ":")}  # told apart in grey, too
TITLES = ("(a) inverse_max_context with grpo", "(b) efficient")


def reward_table() -> str:
    """What a right answer is worth by its context, one of four siblings being wrong."""
    rows = []
    for name, reward in REWARDS.items():
        worth = [
            _worth(reward, [_answered("yes", tokens), *[_answered("yes", 100)] * 2, _answered("no", 100)])
            for tokens in CONTEXTS
        ]
        rows.append([f"`{name}`", *(f"{value:.4g}" for value in worth)])
    return table(["right answer under a context of", *(f"{tokens} tokens" for tokens in CONTEXTS)], rows)


class Batch(NamedTuple):
    """Groups whose members are right or wrong under contexts of some length."""

    correct_N: Tensor  # float, 0 or 1
    context_N: Tensor  # float, tokens
    group_N: Tensor  # int


def even_group(rate: float) -> Batch:
    """One group of exactly that pass rate; the contexts of the right lie evenly on a logarithmic axis."""
    right = round(rate * SIBLINGS)
    contexts = [round(LOW * (HIGH / LOW) ** ((index + 0.5) / right)) for index in range(right)]
    wrong = SIBLINGS - right
    return _batch([1.0] * right + [0.0] * wrong, contexts + [LOW] * wrong, [0] * SIBLINGS)


def drawn_groups(chance: float, *, low: int = LOW, high: int = HIGH) -> Batch:
    """Many groups of eight: right with that chance, contexts log-uniform whether right or wrong."""
    draw = random.Random(SEED)
    pairs = [(float(draw.random() < chance), low * (high / low) ** draw.random()) for _ in range(GROUPS * OF)]
    return _batch(
        [right for right, _ in pairs],
        [round(tokens) for _, tokens in pairs],
        [index // OF for index in range(len(pairs))],
    )


def under_inverse(batch: Batch, *, scale: str = "std") -> Tensor:
    """Advantages of the reward inverse_max_context under grpo."""
    rewards = [_inverse(int(context)) for context in batch.context_N.tolist()]
    return _one_turn("grpo", batch, torch.tensor(rewards, dtype=torch.float64) * batch.correct_N, {"scale": scale})


def under_efficient(batch: Batch) -> Tensor:
    """Advantages of correctness and context under efficient."""
    options = {"context_low": float(LOW), "context_high": float(HIGH)}
    return _one_turn("efficient", batch, batch.correct_N, options)


def pressure_table() -> str:
    """Who is pushed down and how hard, and what the advantages are about."""
    batches = [(f"one group of {SIBLINGS}, pass rate {rate}", even_group(rate)) for rate in RATES]
    batches += [(f"{GROUPS} groups of {OF}, chance {chance}", drawn_groups(chance)) for chance in DRAWN]
    batches += [
        (f"{GROUPS} groups of {OF} from 2k to 8k, chance {chance}", drawn_groups(chance, low=2048, high=8192))
        for chance in NARROW
    ]
    rows = []
    for setting, batch in batches:
        cells = []
        for advantage_N in (under_inverse(batch), under_efficient(batch)):
            down_D = pushed_down(batch, advantage_N)
            size = number(down_D.mean().item(), 2) if len(down_D) else "–"
            share = percent(len(down_D) / batch.correct_N.sum().item())
            cells += [share, size, percent(of_context(batch, advantage_N))]
        rows.append([setting, *cells])
    head = [f"({panel}) {column}" for panel in "ab" for column in ("A < 0", "mean of those", "ΣA² of context")]
    return table(["setting", *head], rows)


def unscaled_table() -> str:
    """How large the advantages of (a) are where nothing divides them."""
    batches = {str(chance): drawn_groups(chance) for chance in DRAWN}
    sizes = [under_inverse(batch, scale="none").abs().mean().item() for batch in batches.values()]
    return table(["chance", *batches], [["mean \\|A\\|", *(f"{size:.1e}".replace("e-0", "e−") for size in sizes)]])


def pushed_down(batch: Batch, advantage_N: Tensor) -> Tensor:
    """The advantages of the right trajectories that have a negative one, (D,)."""
    return advantage_N[(batch.correct_N == 1) & (advantage_N < 0)]


def of_context(batch: Batch, advantage_N: Tensor) -> float:
    """The share of ΣA² that is left when every advantage is taken against the mean of the equally right in its group.

    ΣA² = Σ(mean of the class)² + Σ(A − mean of the class)²; a class: the right, or the wrong, of one group.
    """
    label_N = 2 * batch.group_N + batch.correct_N.long()
    return float((advantage_N - mean(advantage_N, label_N)).square().sum() / advantage_N.square().sum())


def draw_plot(path: Path) -> None:
    """Two panels: the advantage of a right trajectory by its context, under (a) and (b)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "svg.hashsalt": "advantage", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, title, advantages in zip(panels, TITLES, (under_inverse, under_efficient), strict=True):
            axes.axhspan(-1.5, 0, color="#f0f0f0")
            axes.axhline(0, color="#888888", linewidth=0.8)
            for rate, (colour, style) in STYLES.items():
                batch = even_group(rate)
                right_N = batch.correct_N == 1
                label = f"pass rate {rate}"
                axes.plot(
                    batch.context_N[right_N].tolist(), advantages(batch)[right_N].tolist(),
                    color=colour, linestyle=style, linewidth=2.2, label=label,
                )  # fmt: skip
            axes.set_title(title)
            axes.set_xscale("log", base=2)
            axes.set_xticks([2**power for power in range(10, 15)], ["1k", "2k", "4k", "8k", "16k"])
            axes.set_xlabel("largest context of the trajectory, tokens")
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylim(-1.3, 4.3)
        panels[0].set_ylabel("advantage of a correct trajectory")
        panels[1].text(LOW, -0.75, "below 0: correct, and made less likely", fontsize=10)
        panels[1].legend(frameon=False, title="share of the group that is correct", alignment="left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _answered(answer: str, context: int) -> Trajectory:
    return Trajectory(
        id="t", problem_id="p", group_id="g", sample=0, turns=(turn_of((0,) * context, 1),),
        stop=StopReason.ANSWERED, answer=answer, seconds=0.0,
    )  # fmt: skip


def _worth(reward: Reward | GroupReward, group: Sequence[Trajectory]) -> float:
    """What the first of a group gets."""
    if isinstance(reward, GroupReward):
        return RewardResult.of(reward.score_group(group, PROBLEM)[0]).total
    return RewardResult.of(reward(group[0], PROBLEM)).total


@cache
def _inverse(context: int) -> float:
    return _worth(REWARDS["inverse_max_context"], [_answered("yes", context)])


def _batch(correct: Sequence[float], contexts: Sequence[int], groups: Sequence[int]) -> Batch:
    return Batch(
        correct_N=torch.tensor(correct, dtype=torch.float64),
        context_N=torch.tensor(contexts, dtype=torch.float64),
        group_N=torch.tensor(groups),
    )


def _one_turn(name: str, batch: Batch, outcome_N: Tensor, options: Mapping[str, object]) -> Tensor:
    """Advantages (N,) of trajectories of one turn, through the call that training makes."""
    once_N = torch.ones_like(batch.group_N)
    scores = Scores(
        total_N=outcome_N,
        score_N=outcome_N,
        correct_N=batch.correct_N,
        context_N=batch.context_N,
        uncached_N=batch.context_N,
        cached_N=torch.zeros_like(outcome_N),
        output_N=torch.zeros_like(outcome_N),
        turn_N=torch.zeros_like(outcome_N),
        group_N=batch.group_N,
        turns_N=once_N,
        result_turn_N=-once_N,
        truncated_N=torch.zeros_like(once_N, dtype=torch.bool),
        state_NK=once_N[:, None],
        turn_reward_NK=torch.zeros_like(outcome_N)[:, None],
        act_NK=torch.zeros_like(once_N)[:, None],
    )
    return Estimator(load_plugin("estimators", name), options)(scores).advantage_NK[:, 0]
