"""Where the time of the learner's step goes, by operators."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from passes import Budget, ModelSize, optimiser_step
from torch.profiler import ProfilerActivity

from condensegrpo.core.trajectory import Segment
from condensegrpo.learner.dtypes import DTYPES

TOP = 16
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::addmm_")


class Operator(NamedTuple):
    """All calls of an operator with inputs of the same shapes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that it was given
    calls: int
    seconds: float  # in itself, not in operators that it calls


def profile(size: ModelSize, budget: Budget, rows: Sequence[Segment], *, seed: int) -> list[Operator]:
    """The operators of one optimiser step after another one, those that take most time first."""
    on_gpu = budget.device != "cpu"
    model = size.build(seed=seed, dtype=DTYPES[budget.dtype])
    model.to(device=budget.device)
    step = optimiser_step(model, budget, rows)
    step(rows)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step(rows)
    operators = [
        Operator(
            event.key,
            tuple(tuple(shape) for shape in event.input_shapes if shape),
            event.count,
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6,
        )
        for event in profiler.key_averages(group_by_input_shape=True)
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)


def part_of(operator: Operator, vocabulary: int) -> str:
    """What part of the model an operator belongs to, as far as its name and shapes tell."""
    product = operator.name in PRODUCTS
    if "scaled_dot_product" in operator.name or "attention" in operator.name:
        return "attention"
    if product and any(vocabulary in shape for shape in operator.shapes):
        return "LM head: products with its weight"
    if any(shape[-1] == vocabulary for shape in operator.shapes):
        return "LM head: softmax and what else touches logits"
    return "decoder: products of linear layers" if product else "the rest: norms, activations, copies, optimiser"


def parts_table(operators: Sequence[Operator], vocabulary: int) -> tuple[list[str], list[list[str]]]:
    """Heads and lines: seconds and share of each part."""
    seconds: dict[str, float] = {}
    for operator in operators:
        part = part_of(operator, vocabulary)
        seconds[part] = seconds.get(part, 0.0) + operator.seconds
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return ["part", "seconds", "share"], [[part, f"{took:.2f}", f"{took / total:.0%}"] for part, took in ordered]


def operators_table(operators: Sequence[Operator]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines: the operators that take most."""
    total = sum(operator.seconds for operator in operators)
    lines = [
        [
            operator.name,
            _shapes(operator.shapes),
            str(operator.calls),
            f"{operator.seconds:.3f}",
            f"{operator.seconds / total:.1%}",
        ]
        for operator in operators[:TOP]
    ]
    return ["operator", "shapes", "calls", "seconds", "share"], lines


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    return " ".join("×".join(map(str, shape)) for shape in shapes)
