"""What to change when a plan does not fit: the mildest change that fits, found by planning again with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.planning.plan import Plan, plan

MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Overrides of the configuration, on some number of ranks."""

    overrides: tuple[str, ...]
    ranks: int


def remedy(config: RunConfig, planned: Plan, room: int) -> tuple[Change, Plan] | None:
    """The first change of ``_changes`` under which the peak is at most ``room`` bytes; None if there is none."""
    for change in _changes(config, planned):
        again = plan(vary(config, change.overrides), planned.architecture, ranks=change.ranks, device=planned.device)
        if again.peak.bytes <= room:
            return change, again
    return None


def _changes(config: RunConfig, planned: Plan) -> Iterator[Change]:
    """From mild to drastic: smaller batches, then bfloat16, then both, then more devices with everything sharded."""
    smaller = _smaller(config, planned)
    narrow = ("model.dtype=bfloat16",) if config.model.dtype == "float32" else ()
    yield from (Change(overrides=some, ranks=planned.ranks) for some in smaller)
    if narrow:
        yield Change(overrides=narrow, ranks=planned.ranks)
        yield from (Change(overrides=(*narrow, *some), ranks=planned.ranks) for some in smaller)
    least = smaller[-1] if smaller else ()
    ranks = max(2, 2 * planned.ranks)
    while ranks <= MOST_RANKS:
        if config.train.problems_per_step % ranks == 0:
            yield Change(overrides=("learner.zero_stage=3",), ranks=ranks)
            yield Change(overrides=("learner.zero_stage=3", *narrow, *least), ranks=ranks)
        ranks *= 2


def _smaller(config: RunConfig, planned: Plan) -> Sequence[tuple[str, ...]]:
    """Half, a quarter, … of what the largest phase works on at once; of both in the end. No row is ever split."""
    row = config.rollout.limits.max_context_tokens + config.rollout.limits.max_output_tokens
    tokens = [f"learner.tokens_per_micro_batch={size}" for size in _halves(planned.batch.tokens, row)]
    requests = [f"sampler.options.max_batch={size}" for size in _halves(planned.requests, 1)]
    if config.sampler.name != "transformers":
        requests = []
    one = requests if planned.peak.name == "rolling out" else tokens
    both = [(*some, *others) for some in (tokens[-1:],) for others in (requests[-1:],)]
    return [*((override,) for override in one), *(tuple(some) for some in both if len(some) > 1)]


def _halves(size: int, least: int) -> list[int]:
    """Example: 100 and 20 give 50, 25, 20."""
    found = []
    while size > least:
        size = max(least, size // 2)
        found.append(size)
    return found
