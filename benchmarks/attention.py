"""What captured attention costs, and how well it ranks units: against leaving each of them out.

    python benchmarks/attention.py cost
    python benchmarks/attention.py oracle CONFIG MODEL [KEY=VALUE ...]

``cost`` reads prompts of growing length with a model of random weights: the plain pass, the pass that is watched, and
the pass that gives out all attention. ``oracle`` plays held-out problems with the model of a run, its whole history in
sight, and compares, turn by turn, the scores of the units with what the reply that followed loses without each (see
attention/scorer.py).
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tables import show
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.runtime import renderer_for, trajectory_engine, use_threads
from condensegrpo.attention.capture import attend
from condensegrpo.attention.scorer import AttentionScorer, losses
from condensegrpo.config.load import load_config
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.messages import History, Unit
from condensegrpo.core.protocols.sampler import AttentionQuery
from condensegrpo.core.trajectory import Trajectory
from condensegrpo.episodes.group import problem_groups, rollout_groups
from condensegrpo.episodes.render import Renderer
from condensegrpo.samplers.transformers import TransformersSampler

LEAST_UNITS = 4  # of a history whose ranking is compared: the newest is not ranked
QUERIES = 32  # queries of the question, and of the last output, in ``cost``


def main() -> None:
    """Run the chosen part and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    cost = parts.add_parser("cost")
    cost.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    cost.add_argument("--repeats", type=int, default=5)
    oracle = parts.add_parser("oracle")
    oracle.add_argument("config", type=Path)
    oracle.add_argument("model", help="a Hugging Face folder, such as RUN/checkpoints/step_000060/model")
    oracle.add_argument("overrides", nargs="*")
    oracle.add_argument("--problems", type=int, default=32)
    oracle.add_argument("--layers", type=int, nargs="+", default=(), help="that are watched, from 0 on")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.part == "cost":
        print_cost(given.lengths, given.repeats)
    else:
        config = load_config(given.config, [*WHOLE, *given.overrides])
        print_oracle(config, given.model, given.problems, given.layers)


# --- cost -------------------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one pass."""

    seconds: float  # of the CPU, all threads together, the median of the repeats
    products: int  # floating-point operations of matrix products, those inside sdpa not counted


class Costs(NamedTuple):
    """Of the three ways to read a prompt."""

    plain: Cost
    watched: Cost
    everything: Cost  # all attention of all layers, as output_attentions=True gives it


def print_cost(lengths: Sequence[int], repeats: int) -> None:
    """What watching adds to the plain pass, and what giving out all attention adds."""
    model = random_model()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {QUERIES} + {QUERIES} queries")
    heads = ("tokens", *(f"{name}, CPU s" for name in ("plain", "watched", "all attention")))
    lines = []
    for length in lengths:
        measured = costs(model, length, repeats)
        seconds = (f"{cost.seconds:.3f}" for cost in measured)
        added = (f"{(cost.products - measured.plain.products) / 1e9:.2f} GFLOP" for cost in measured[1:])
        lines.append((str(length), *seconds, *added))
    show("", (*heads, "watched adds", "all attention adds"), lines)


def costs(model: PreTrainedModel, length: int, repeats: int) -> Costs:
    """Of a prompt of this many tokens, of which the last ``QUERIES`` are query positions."""
    ids = torch.randint(0, model.config.vocab_size, (1, length))
    query = AttentionQuery(
        prompt_ids=tuple(ids[0].tolist()),
        positions=tuple(range(length - QUERIES, length)),
        question_ids=tuple(range(QUERIES)),
        calibration_ids=(1, 2, 3),
    )
    plain = _cost(lambda: model.base_model(ids, use_cache=False), repeats)
    watched = _cost(lambda: attend(model, [query]), repeats)
    model.set_attn_implementation("eager")
    everything = _cost(lambda: model.base_model(ids, use_cache=False, output_attentions=True), repeats)
    model.set_attn_implementation("sdpa")
    return Costs(plain, watched, everything)


def random_model() -> PreTrainedModel:
    """Six layers of width 256, grouped queries, made for long prompts."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=65536,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def _cost(call: Callable[[], object], repeats: int) -> Cost:
    with FlopCounterMode(display=False) as counter:
        call()
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return Cost(statistics.median(seconds), counter.get_total_flops())


# --- oracle -----------------------------------------------------------------------------------------------------------


WHOLE = ("condenser={name: full}", "rollout.limits.max_context_tokens=1024", "rollout.answer_form=null")
Found = dict[str, dict[str, list[float]]]  # scores of what, of which replies ─▶ problem ─▶ correlation of each turn


def print_oracle(config: RunConfig, model: str, problems: int, layers: Sequence[int] = ()) -> None:
    """Mean Spearman correlation with the oracle of attention, and of recency as a control."""
    correlations = asyncio.run(_played(config, model, problems, layers))
    lines = []
    for name, by_problem in correlations.items():
        values = [value for problem in by_problem.values() for value in problem]
        low, high = interval(by_problem)
        lines.append((name, f"{statistics.fmean(values):.3f}", f"{low:.3f} … {high:.3f}", str(len(values))))
    show("", ("scores of", "mean Spearman with leave-one-out", "95 % interval", "rankings"), lines)


async def _unobserved(_: Trajectory) -> None:
    """Nothing is done with a trajectory before all are played."""


async def _played(config: RunConfig, model: str, problems: int, layers: Sequence[int]) -> Found:
    use_threads(config)
    components = build_components(config)
    sampler = TransformersSampler(model)
    renderer = renderer_for(components, model)
    groups = await rollout_groups(
        problem_groups(components.problems("eval")[:problems], 0),
        samples=1,
        environment=components.task.environment,
        engine=trajectory_engine(components, renderer=renderer, sampler=sampler, temperature=0.0),
        run_seed=0,
        step=-1,
        on_finish=_unobserved,
    )
    played = [trajectory for group in groups for trajectory in group]
    correlations = await compared(
        played, sampler, renderer, tokens=config.rollout.limits.max_context_tokens, layers=layers
    )
    sampler.close()
    return correlations


async def compared(
    played: Sequence[Trajectory],
    sampler: TransformersSampler,
    renderer: Renderer,
    *,
    tokens: int,
    layers: Sequence[int] = (),
) -> Found:
    """The correlation at every turn whose reply followed a history long enough, for all replies and for the last.

    Args:
        played: episodes that were never condensed.
        tokens: most that are read at once.
        layers: that are watched; none: the default.
    """
    from scipy.stats import spearmanr  # here: it takes a second, and every worker of the tests imports this file

    scorer = AttentionScorer(sampler, renderer, layers=layers)
    correlations: Found = defaultdict(lambda: defaultdict(list))
    for trajectory in played:
        for turn, past in histories(trajectory):
            (scores,) = await scorer.score([past], tokens)
            lost = (await losses(sampler, renderer, past, trajectory.turns[turn].output_ids))[:-1]
            for kind in ("every reply", "last reply") if turn == len(trajectory.turns) - 1 else ("every reply",):
                for name, given in (("attention", scores[:-1]), ("recency", range(len(lost)))):
                    if len(set(given)) > 1 and len(set(lost)) > 1:  # else their ranks have no correlation
                        value = float(spearmanr(given, lost).statistic)
                        correlations[f"{name}, {kind}"][trajectory.problem_id].append(value)
    return correlations


def interval(by_problem: Mapping[str, Sequence[float]], *, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean, problems drawn whole."""
    stream = random.Random(seed)
    problems = list(by_problem.values())
    means = sorted(
        statistics.fmean([value for problem in stream.choices(problems, k=len(problems)) for value in problem])
        for _ in range(draws)
    )
    return means[round(0.025 * draws)], means[round(0.975 * draws) - 1]


def histories(trajectory: Trajectory) -> list[tuple[int, History]]:
    """The history before each turn of an episode that was never condensed, from ``LEAST_UNITS`` units on."""
    pinned = trajectory.turns[0].context
    units = [Unit(turn=n, reply=turn.reply, results=turn.observations) for n, turn in enumerate(trajectory.turns)]
    return [(n, History(pinned=pinned, units=tuple(units[:n]))) for n in range(LEAST_UNITS, len(units))]


if __name__ == "__main__":
    main()
