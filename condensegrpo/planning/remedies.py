"""The mildest change of the configuration with which a plan fits, found by planning with each candidate."""

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.devices import device_memory
from condensegrpo.planning.plan import COLOCATED, VLLM, Device, Plan, architecture, config_on_devices

LARGE_BATCH = 4096  # tokens; smaller micro-batches keep a GPU less busy
TOKENS, REQUESTS = "learner.tokens_per_micro_batch", "sampler.options.max_batch"
SHARE = "sampler.options.engine.gpu_memory_utilization"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)  # of a GPU, for vLLM
Overrides = dict[str, str]  # key of the configuration → value


def lines(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as they stand on a command line."""
    return tuple(f"{key}={value}" for key, value in overrides.items())


def advice(planned: Plan, change: tuple[Overrides, Plan] | None) -> str:
    """The overrides of a remedy in words; where there is none, larger changes that the run does not make yet."""
    if change is None:
        lora = "" if planned.config.model.lora else "model.lora, "
        return f"use a smaller model, {lora}a larger device, or lower rollout.limits.max_context_tokens"
    overrides, ranks = " ".join(lines(change[0])), change[1].ranks
    return overrides if ranks == planned.ranks else f"{overrides} on {ranks} devices (--ranks {ranks})"


def advice_for_learner(config: RunConfig, *, ranks: int, device: Device) -> str:
    """Advice where the learner, without its sampler, needed more memory than the plan predicted."""
    alone = vary(config_on_devices(config, ranks=ranks, memory=device_memory()), ("sampler={name: scripted}",))
    planned = Plan(alone, architecture(config.model), ranks=ranks, device=device)
    return advice(planned, remedy(planned, planned.bytes))


def remedy(planned: Plan, room: int) -> tuple[Overrides, Plan] | None:
    """Overrides under which the run fits into ``room`` bytes of each device, and their plan; more devices come last."""
    ranks, start = planned.ranks, dict[str, str]()
    while ranks <= max(64, planned.ranks):
        found = _fitting(planned, start, ranks, room)
        if found is not None:
            return found
        ranks, start = max(2, 2 * ranks), {"learner.zero_stage": "3"}
    return None


def _fitting(original: Plan, start: Overrides, ranks: int, room: int) -> tuple[Overrides, Plan] | None:
    """Candidates that lower the peak until the plan fits, then as few of them as do, the most drastic taken back."""
    overrides, planned = start, _replanned(original, start, ranks)
    while planned is not None and not planned.fits(room):
        for candidate in _candidates(planned):
            changed = _replanned(original, overrides | candidate, ranks)
            if changed is None or changed.refusal is not None:
                continue
            if planned.refusal is not None or changed.total(planned.peak) < planned.bytes:
                overrides, planned = overrides | candidate, changed
                break
        else:
            return None
    if planned is None:
        return None
    for key in [key for _ in overrides for key in reversed(overrides)]:  # again: one may have needed another
        fewer = {other: value for other, value in overrides.items() if other != key}
        changed = _replanned(original, fewer, ranks)
        if key not in start and changed is not None and changed.fits(room):
            overrides, planned = fewer, changed
    return overrides, planned


def _replanned(planned: Plan, overrides: Overrides, ranks: int) -> Plan | None:
    """The plan with these overrides; None: they contradict the rest of the configuration."""
    try:
        varied = vary(planned.config, lines(overrides))
        check_values(varied)
        return Plan(
            varied,
            planned.model,
            ranks=ranks,
            device=planned.device,
            memory=planned.memory,
            per_token=planned.per_token,  # no candidate changes the algorithm
        )
    except ConfigError:
        return None


def _candidates(planned: Plan) -> list[Overrides]:
    """Changes of what a run takes and not of what it learns, from mild to drastic; bfloat16 rounds."""
    config, gpu, vllm = planned.config, planned.on_gpu, planned.config.sampler.name == VLLM
    learner, row, tokens = config.learner, config.rollout.limits.turn_tokens, planned.batch.tokens
    copies_reference = config.algorithm.kl.coefficient and config.model.lora is None
    stage = {"learner.zero_stage": str(max(learner.zero_stage, 2))}  # DeepSpeed's bfloat16 below it moves nothing
    offload, rollouts, turns = "learner.offload.training", "learner.offload.rollouts", not config.rollout.staleness
    halved, large = {TOKENS: str(max(row, tokens // 2))}, {TOKENS: str(max(row, LARGE_BATCH, tokens // 2))}
    table: list[tuple[object, Overrides]] = [  # whether it applies, overrides
        *((vllm and planned.refusal is not None, {SHARE: str(share)}) for share in reversed(SHARES)),
        (tokens > max(row, LARGE_BATCH), large),
        (row < tokens <= LARGE_BATCH // 2, halved),  # it is small already
        (config.sampler.name == COLOCATED and planned.requests > 1, {REQUESTS: str(planned.requests // 2)}),
        *((vllm and gpu, {SHARE: str(share)}) for share in SHARES),
        # these two gather keys, or keep every pair
        (gpu and config.model.attention in ("sdpa", "eager"), {"model.attention": "auto"}),
        (planned.checkpointed < planned.model.layers, {"learner.checkpoint_activations": "on"}),
        (config.model.dtype == "float32", {"model.dtype": "bfloat16"}),
        (tokens > row, halved),
        (gpu and copies_reference, {"learner.offload.reference": "true"}),
        (gpu and learner.offload.training == "none" and turns, {rollouts: "true", **stage}),
        (gpu, {rollouts: "false", offload: "optimiser", **stage}),
        (gpu, {rollouts: "false", offload: "optimiser_and_weights", "learner.zero_stage": "3"}),
    ]
    return [overrides for applies, overrides in table if applies]
