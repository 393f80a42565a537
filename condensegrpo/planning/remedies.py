"""The mildest change of the configuration with which a plan fits, found by planning with each candidate.

While a plan does not fit, the first candidate in ``_candidates`` that lowers its peak is taken, so that changes that
cost little come first. Overrides that turn out not to be needed are taken back.
"""

from collections.abc import Iterator

from condensegrpo.config.checks import check_values
from condensegrpo.config.load import vary
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.devices import device_memory
from condensegrpo.planning.architecture import architecture
from condensegrpo.planning.plan import COLOCATED, VLLM, Device, Plan, config_on_devices, predict_memory
from condensegrpo.samplers.vllm.settings import ranks_a_copy

MOST_RANKS = 64
LARGE_BATCH = 4096  # tokens; smaller micro-batches keep a GPU less busy
TOKENS, REQUESTS = "learner.tokens_per_micro_batch", "sampler.options.max_batch"
SHARE = "sampler.options.engine.gpu_memory_utilization"
SHARING = "sampler.options.engine.tensor_parallel_size"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)  # of a GPU, for vLLM
Overrides = dict[str, str]  # key of the configuration → value


def lines(overrides: Overrides) -> tuple[str, ...]:
    """Overrides as they stand on a command line."""
    return tuple(f"{key}={value}" for key, value in overrides.items())


def advice(planned: Plan, change: tuple[Overrides, Plan] | None) -> str:
    """The overrides of a remedy in words; where there is none, larger changes that the run does not make yet."""
    if change is None:
        lora = "" if planned.run.config.model.lora else "model.lora, "
        return f"use a smaller model, {lora}a larger device, or lower rollout.limits.max_context_tokens"
    overrides, ranks = change[0], change[1].run.ranks
    where = "" if ranks == planned.run.ranks else f" on {ranks} devices (--ranks {ranks})"
    return f"{' '.join(lines(overrides))}{where}"


def advice_for_learner(config: RunConfig, *, ranks: int, device: Device) -> str:
    """Advice where the learner needed more memory than there was: the plan predicted too little for it."""
    on_devices = config_on_devices(config, ranks=ranks, memory=device_memory())
    alone = vary(on_devices, ("sampler={name: scripted}",))  # its memory is not the learner's
    planned = predict_memory(alone, architecture(config.model), ranks=ranks, device=device)
    return advice(planned, remedy(planned, planned.bytes))


def remedy(planned: Plan, room: int) -> tuple[Overrides, Plan] | None:
    """Overrides under which the run fits into ``room`` bytes of each device, and their plan; None: there are none.

    More devices than ``planned`` has, with ZeRO 3, are the last resort.
    """
    run, ranks = planned.run, planned.run.ranks
    while ranks <= max(MOST_RANKS, run.ranks):
        if run.config.train.problems_per_step % ranks == 0:
            overrides = {} if ranks == run.ranks else {"learner.zero_stage": "3"}
            start = predict_memory(
                vary(run.config, lines(overrides)), run.model, ranks=ranks, device=run.device, memory=run.memory
            )
            fitting = _fitting(run.config, overrides, start, room)
            if fitting is not None:
                return fitting
        ranks = max(2, 2 * ranks)
    return None


def _fitting(config: RunConfig, overrides: Overrides, planned: Plan, room: int) -> tuple[Overrides, Plan] | None:
    """Candidates on top of each other until the plan fits, then as few of them as do, the most drastic taken back."""
    start = overrides
    while not planned.fits(room):
        better = next(_better(config, overrides, planned), None)
        if better is None:
            return None
        overrides, planned = better
    for key in [key for _ in overrides for key in reversed(overrides)]:  # again: one may have needed another
        offloads = any(other.startswith("learner.offload.") for other in overrides)
        if key in start or key not in overrides or (key == "learner.zero_stage" and offloads):  # which need the stage
            continue
        fewer = {other: value for other, value in overrides.items() if other != key}
        changed = _replanned(config, fewer, planned)
        if changed is not None and changed.fits(room):
            overrides, planned = fewer, changed
    return overrides, planned


def _replanned(config: RunConfig, overrides: Overrides, planned: Plan) -> Plan | None:
    """The plan with these overrides; None: they contradict the rest of the configuration."""
    run = planned.run
    try:
        varied = vary(config, lines(overrides))
        check_values(varied)
        return predict_memory(varied, run.model, ranks=run.ranks, device=run.device, memory=run.memory)
    except ConfigError:
        return None


def _better(config: RunConfig, overrides: Overrides, planned: Plan) -> Iterator[tuple[Overrides, Plan]]:
    """The candidates that start where the current plan would not, or lower the phase that is its peak."""
    for candidate in _candidates(planned):
        changed = _replanned(config, overrides | candidate, planned)
        if changed is None or changed.refusal is not None:
            continue
        if planned.refusal is not None or changed.total(planned.peak) < planned.bytes:
            yield overrides | candidate, changed


def _candidates(planned: Plan) -> list[Overrides]:
    """Changes of what a run takes and not of what it learns, from mild to drastic; bfloat16 rounds.

    The last ones share vLLM's copy of the model among ranks, move to main memory the reference, then the optimiser's
    state, and at last the weights, and share rows among ranks, where ranks and heads divide.
    """
    run, config = planned.run, planned.run.config
    learner, decoder, row = config.learner, run.model.decoder, config.rollout.limits.turn_tokens
    gpu, vllm = run.on_gpu, config.sampler.name == VLLM
    tokens, waiting, ranks = run.batch.tokens, planned.requests, 2 * learner.sequence_parallel
    heads_divide = not (decoder.heads % ranks or (decoder.kv_heads % ranks and ranks % decoder.kv_heads))
    copies_reference = config.algorithm.kl.coefficient and config.model.lora is None
    copies = 2 * ranks_a_copy(config.sampler.options)
    shares_copy = vllm and gpu and not (run.ranks % copies or decoder.heads % copies or config.rollout.staleness)
    stage = {"learner.zero_stage": str(max(learner.zero_stage, 2))}  # DeepSpeed's bfloat16 below it moves nothing
    offload, rollouts = "learner.offload.training", "learner.offload.rollouts"
    halved = {TOKENS: str(max(row, tokens // 2))}
    table: list[tuple[object, Overrides]] = [  # whether it applies, overrides
        *((vllm and planned.refusal is not None, {SHARE: str(share)}) for share in reversed(SHARES)),
        (tokens > max(row, LARGE_BATCH), {TOKENS: str(max(row, LARGE_BATCH, tokens // 2))}),
        (row < tokens <= LARGE_BATCH // 2, halved),  # it is small already
        (config.sampler.name == COLOCATED and waiting > 1, {REQUESTS: str(waiting // 2)}),
        *((vllm and gpu, {SHARE: str(share)}) for share in SHARES),
        # these two gather keys, or keep every pair
        (gpu and config.model.attention in ("sdpa", "eager"), {"model.attention": "auto"}),
        (run.checkpointed < decoder.layers, {"learner.checkpoint_activations": "on"}),
        (config.model.dtype == "float32", {"model.dtype": "bfloat16"}),
        (tokens > row, halved),
        *((shares_copy, {SHARING: str(copies), SHARE: str(share)}) for share in SHARES),
        (gpu and copies_reference, {"learner.offload.reference": "true"}),
        (gpu and learner.offload.training == "none" and not config.rollout.staleness, {rollouts: "true", **stage}),
        (gpu, {rollouts: "false", offload: "optimiser", **stage}),
        (gpu, {rollouts: "false", offload: "optimiser_and_weights", "learner.zero_stage": "3"}),
        (gpu and heads_divide and run.ranks % ranks == 0, {"learner.sequence_parallel": str(ranks)}),
    ]
    return [overrides for applies, overrides in table if applies]
