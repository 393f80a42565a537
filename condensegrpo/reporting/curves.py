"""The curves of a run from its metrics, and which of them its report shows first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from condensegrpo.config.load import HELD_OUT
from condensegrpo.evaluation.figures import evaluations_in

Metrics = Sequence[Mapping[str, float]]
Pairs = tuple[tuple[str, str], ...]


class Panel(NamedTuple):
    """One diagram: a metric over optimiser steps, in training and on held-out problems."""

    metric: str
    title: str
    unit: str
    varied: bool = False  # also for the variants; the lengths of variants would only compress the scale


PANELS = (
    Panel("success", "Success", "share of trajectories", varied=True),
    Panel("context_tokens", "Largest context", "tokens, mean over trajectories", varied=True),
    Panel("reward", "Reward", "mean over trajectories"),
    Panel("output_tokens", "Output length", "tokens per trajectory"),
    Panel("turns", "Turns", "replies per trajectory"),
    Panel("grad_norm", "Gradient norm", "before clipping"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """One diagram of several metrics."""

    title: str
    unit: str
    lines: Pairs  # metric and label


SHARES = (  # of the training batches
    Diagram(
        title="Signal",
        unit="share of groups or trajectories",
        lines=(
            ("groups_of_equal_reward", "groups without signal"),
            ("trajectories_without_advantage", "trajectories without gradient"),
            ("correct_with_negative_advantage", "correct with negative advantage"),
            ("masked", "masked trajectories"),
        ),
    ),
    Diagram(
        title="Credit",
        unit="share of the batch",
        lines=(
            ("weight/correct", "weight on correct"),
            ("update/correct", "gradient weight on correct"),
            ("weight/gini", "Gini of the weights"),
        ),
    ),
)


class Series(NamedTuple):
    """A line of a diagram."""

    steps: tuple[float, ...]
    values: tuple[float, ...]  # NaN: not measured


def series(metrics: Metrics, key: str) -> Series:
    """The steps and values of a metric from its first value to its last; the later of two values at one step counts.

    A step between them that was logged without the metric has the value NaN: a gap of the line. Training is logged at
    other steps than an evaluation.
    """
    known = {line["step"]: line[key] for line in metrics if key in line and "step" in line}
    if not known:
        return Series((), ())
    evaluation = next((each for each in _evaluations_of(key) if any(each in line for line in metrics)), None)
    logged = {line["step"] for line in metrics if "step" in line and _is_of(line, evaluation)}
    first, last = min(known), max(known)
    steps = tuple(sorted({step for step in logged if first < step < last} | known.keys()))
    return Series(steps, tuple(known.get(step, math.nan) for step in steps))


def _evaluations_of(key: str) -> tuple[str, ...]:
    """The metrics of which one is in every line of the evaluation that a metric may be of; none: it is of training."""
    prefix, *names = key.split("/")
    return tuple(f"{each}/success" for each in (f"eval/{names[0]}", "eval")) if prefix == "eval" and names else ()


def _is_of(line: Mapping[str, float], evaluation: str | None) -> bool:
    """Whether a line is of an evaluation, by the metric that it always has, or of the training."""
    if evaluation is not None:
        return evaluation in line
    return any(name != "step" and not name.startswith("eval/") for name in line)


def variants(metrics: Metrics) -> tuple[str, ...]:
    """The names of the evaluation variants: k20 of ``eval/k20/success``."""
    names = evaluations_in(key for line in metrics for key in line)
    return tuple(name for name in names if name != HELD_OUT)
