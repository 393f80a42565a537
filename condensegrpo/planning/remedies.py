"""The mildest change of the configuration with which a plan fits, found by planning with each candidate."""

from collections.abc import Iterator

from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.planning.plan import COLOCATED, Plan, plan

MOST_RANKS = 64
Overrides = tuple[str, ...]  # of the configuration


def remedy(config: RunConfig, planned: Plan, room: int) -> tuple[Overrides, Plan] | None:
    """The first change of ``_changes`` under which the peak is at most ``room`` bytes; None if there is none."""
    for overrides, ranks in _changes(config, planned):
        changed = plan(vary(config, overrides), planned.architecture, ranks=ranks, device=planned.device)
        if changed.peak.bytes <= room:
            return overrides, changed
    return None


def _changes(config: RunConfig, planned: Plan) -> Iterator[tuple[Overrides, int]]:
    """Overrides and ranks, from mild to drastic: smaller batches, bfloat16, both, then more devices with ZeRO 3."""
    smaller = _smaller(config, planned)
    narrow = ("model.dtype=bfloat16",) if config.model.dtype == "float32" else ()
    for overrides in (*smaller, *([narrow, *((*narrow, *size) for size in smaller)] if narrow else [])):
        yield overrides, planned.ranks
    least = smaller[-1] if smaller else ()
    ranks = max(2, 2 * planned.ranks)
    while ranks <= MOST_RANKS:
        if config.train.problems_per_step % ranks == 0:
            yield ("learner.zero_stage=3",), ranks
            yield ("learner.zero_stage=3", *narrow, *least), ranks
        ranks *= 2


def _smaller(config: RunConfig, planned: Plan) -> list[Overrides]:
    """Halves of the batch of the largest phase, down to one row or request; last the smallest of both batches."""
    row = config.rollout.limits.max_context_tokens + config.rollout.limits.max_output_tokens
    tokens = [f"learner.tokens_per_micro_batch={size}" for size in _halves(planned.batch.tokens, row)]
    requests = [f"sampler.options.max_batch={size}" for size in _halves(planned.requests, 1)]
    if config.sampler.name != COLOCATED:
        requests = []
    singles: list[Overrides] = [
        (override,) for override in (requests if planned.peak.name == "rolling out" else tokens)
    ]
    return [*singles, (tokens[-1], requests[-1])] if tokens and requests else singles


def _halves(size: int, least: int) -> list[int]:
    """Example: 100 and 20 give 50, 25, 20."""
    sizes = []
    while size > least:
        size = max(least, size // 2)
        sizes.append(size)
    return sizes
