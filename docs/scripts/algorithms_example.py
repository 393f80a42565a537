"""The worked example of docs/reference/estimators.md: a group of four trajectories, and two tokens of a turn."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import torch
from algorithms_parts import number, percent, table, turn_of
from torch import Tensor

from condensegrpo.algorithms.advantages import moments, whiten
from condensegrpo.algorithms.credit import Estimator, Scores, scores_of, turn_tokens
from condensegrpo.algorithms.losses import KL
from condensegrpo.algorithms.objective import importance, token_weights, totals
from condensegrpo.algorithms.settings import Aggregation
from condensegrpo.assembly.learning_signal import declared
from condensegrpo.core.plugins import load_plugin
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Score, StopReason, Trajectory


class Act(NamedTuple):
    """A turn of the example."""

    prompt: str  # which context it was given; one letter is one and the same prompt
    context: int  # tokens of it
    output: int  # tokens sampled
    reward: float
    result: bool = False  # whether a tool result answered it


GROUP: Mapping[str, tuple[float, tuple[Act, ...]]] = {  # name → correctness, turns
    "a": (1.0, (Act("Q", 100, 20, 1.0, True), Act("X", 200, 10, 1.0, True), Act("Y", 800, 10, 0.0))),
    "b": (1.0, (Act("Q", 100, 20, 0.0), Act("X", 200, 20, 1.0, True))),
    "c": (
        0.0,
        (Act("Q", 100, 30, 0.0), Act("V", 300, 20, 1.0, True), Act("V", 300, 20, 0.0), Act("W", 600, 30, 0.0)),
    ),
    "d": (0.0, (Act("Q", 100, 20, 0.0),)),
}
ANCHORS = {"context_low": 100.0, "context_high": 1600.0}
MAX_TOKENS = 100.0  # L of trajectory_constant

LEARNS, OLD = (-1.0, -2.0), (-1.5, -1.6)  # nats, under the weights that learn and those that sampled
SAMPLER, REFERENCE = (-1.7, -1.6), (-2.0, -2.0)  # nats, as the sampler's engine said and under the reference model
TOKEN_ADVANTAGE = 0.866
CAP, BETA = 1.1, 0.1
OPTIONS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("clipped", {}),
    ("clipped", {"dual_clip": 1.5}),
    ("gspo", {}),
    ("cispo", {}),
    ("reinforce", {}),
)


def example() -> tuple[ScoredTrajectory, ...]:
    """The group as trajectories, as a rollout would leave them."""
    return tuple(_scored(name, right, turns) for name, (right, turns) in GROUP.items())


def group_table() -> str:
    """What the estimators see of the group."""
    scored, scores = example(), scores_of(example())
    columns = (scores.total_N, scores.turn_N, scores.turns_N, scores.result_turn_N, scores.context_N)
    rows = []
    for index, (name, (_, turns)) in enumerate(GROUP.items()):
        tokens = ", ".join(str(count) for count in turn_tokens(scored)[index].tolist() if count)
        prompts = ", ".join(f"{turn.prompt} {turn.context}" for turn in turns)
        rows.append([name, *(number(float(column[index]), 0) for column in columns), prompts, tokens])
    head = ["", "R^O", "R^T", "turns", "result turn", "C", "prompt of each turn, tokens", "sampled tokens"]
    return table(head, rows)


def advantage_table() -> str:
    """The advantage of every turn under every estimator, and one of them whitened."""
    scored, scores = example(), scores_of(example())
    advantages = {name: example_advantages(name, scores) for name in declared("estimators")}
    tokens_NK = turn_tokens(scored)
    rows = [[f"`{name}`", *_turn_by_turn(advantage_NK, scores)] for name, advantage_NK in advantages.items()]
    whitened_NK = whiten(advantages["grpo"], tokens_NK, moments=moments(advantages["grpo"], tokens_NK))
    rows.append(["`grpo`, whitened", *_turn_by_turn(whitened_NK, scores)])
    return table(["estimator", *GROUP], rows)


def example_advantages(name: str, scores: Scores) -> Tensor:
    """The advantages of the group under an estimator with its defaults."""
    plugin = load_plugin("estimators", name)
    return Estimator(plugin, ANCHORS if "context_low" in plugin.options else {})(scores).advantage_NK


def weight_table() -> str:
    """The weight of a token of every turn under every aggregation, and what the trajectory has of the whole."""
    scored, scores = example(), scores_of(example())
    tokens_NK = turn_tokens(scored)
    rows = []
    for mode in get_args(Aggregation):
        weight_NK = token_weights(mode, tokens_NK, totals=totals(tokens_NK, scores.turns_N), max_tokens=MAX_TOKENS)
        whole_N = (weight_NK * tokens_NK).sum(dim=1)
        shares = map(percent, (whole_N / whole_N.sum()).tolist())
        cells = [f"{cell} ({share})" for cell, share in zip(_turn_by_turn(weight_NK, scores, 5), shares, strict=True)]
        rows.append([f"`{mode}`", *cells])
    return table(["aggregation", *GROUP], rows)


def loss_table() -> str:
    """Loss and gradient of the first token under every loss, for a good turn and for a bad one."""
    rows = []
    for name, options in OPTIONS:
        ratio, *good = first_token(name, options, TOKEN_ADVANTAGE)
        _, *bad = first_token(name, options, -TOKEN_ADVANTAGE)
        given = "".join(f", `{option}` {value}" for option, value in options.items())
        rows.append([f"`{name}`{given}", *map(number, (ratio, *good, *bad))])
    return table(["loss", "ratio", "A = 0.866: l", "∂/∂logp", "A = −0.866: l", "∂/∂logp"], rows)


def first_token(name: str, options: Mapping[str, float], advantage: float) -> tuple[float, float, float]:
    """Ratio, loss, and gradient with respect to the first token's log-probability, all weights 1."""
    logp_T = torch.tensor(LEARNS, dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor(OLD, dtype=torch.float64)
    advantage_T, turn_T = torch.full_like(old_T, advantage), torch.zeros(2).long()
    losses = load_plugin("losses", name)(logp_T, old_T, advantage_T, turn_T=turn_T, **options)
    (gradient_T,) = torch.autograd.grad(losses.loss_T.sum(), logp_T)
    return losses.ratio_T[0].item(), losses.loss_T[0].item(), gradient_T[0].item()


def kl_table() -> str:
    """Value and gradient of the first token's KL term."""
    rows = []
    for name, term in KL.items():
        logp_T = torch.tensor(LEARNS[:1], dtype=torch.float64, requires_grad=True)
        value_T = term(logp_T, torch.tensor(REFERENCE[:1], dtype=torch.float64))
        (gradient_T,) = torch.autograd.grad(value_T.sum(), logp_T)
        rows.append([f"`{name}`", number(value_T.item()), number(gradient_T.item())])
    return table(["KL", "k", "∂/∂logp"], rows)


def importance_table() -> str:
    """What the two tokens' losses are multiplied by under every level and mode."""
    old_T, sampler_T = (torch.tensor(column, dtype=torch.float64) for column in (OLD, SAMPLER))
    rows = []
    for level in ("token", "turn"):
        corrections = [
            importance(old_T, sampler_T, torch.zeros(2).long(), cap=CAP, level=level, mode=mode)
            for mode in ("truncate", "mask")
        ]
        columns = (corrections[0].ratio_T, *(correction.weight_T for correction in corrections))
        rows.append([f"`{level}`", *(", ".join(map(number, column.tolist())) for column in columns)])
    return table(["level", "ratios", "`truncate`", "`mask`"], rows)


def together_table() -> str:
    """The whole term of the first token in the step's loss, if it were one of a."""
    scored, scores = example(), scores_of(example())
    tokens_NK = turn_tokens(scored)
    weight_NK = token_weights(
        "trajectory_constant", tokens_NK, totals=totals(tokens_NK, scores.turns_N), max_tokens=MAX_TOKENS
    )
    weight = weight_NK[0, 0].item()
    old_T, sampler_T, logp_T, reference_T = (
        torch.tensor(column, dtype=torch.float64) for column in (OLD, SAMPLER, LEARNS, REFERENCE)
    )
    corrected = importance(old_T, sampler_T, torch.zeros(2).long(), cap=CAP, level="token", mode="truncate")
    v, k = corrected.weight_T[0].item(), KL["k3"](logp_T, reference_T)[0].item()
    _, loss, _ = first_token("clipped", {}, TOKEN_ADVANTAGE)
    whole = v * loss + BETA * k
    cells = [number(value) for value in (v, loss, k, whole)]
    return table(
        ["v", "l", "k", "v·l + β·k", "w", "w·(v·l + β·k)"], [[*cells, number(weight, 4), number(weight * whole, 5)]]
    )


def _turn_by_turn(value_NK: Tensor, scores: Scores, digits: int = 3) -> list[str]:
    """The values of every trajectory's turns; one value where all turns have it."""
    cells = []
    for value_K, turns in zip(value_NK.tolist(), scores.turns_N.tolist(), strict=True):
        numbers = [number(value, digits) for value in value_K[:turns]]
        cells.append(numbers[0] if len(set(numbers)) == 1 else ", ".join(numbers))
    return cells


def _scored(name: str, right: float, turns: Sequence[Act]) -> ScoredTrajectory:
    made = tuple(turn_of((ord(turn.prompt),) * turn.context, turn.output, result=turn.result) for turn in turns)
    trajectory = Trajectory(
        id=name, problem_id="p", group_id="g", sample=0, turns=made, stop=StopReason.ANSWERED, answer="yes", seconds=0.0
    )
    score = Score(
        total=right,
        components={},
        format_valid=True,
        correct=right,
        context_tokens=trajectory.max_context_tokens,
        turn_rewards=tuple(turn.reward for turn in turns),
    )
    return ScoredTrajectory.of(trajectory, score)
