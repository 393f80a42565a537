"""Whether the figures of a configuration fit together. Looks at the configuration alone."""

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError


def check_values(config: RunConfig) -> None:
    """Check keys against each other."""
    anchors = config.algorithm.advantage.context_anchors
    if anchors is not None and not 0 < anchors[0] < anchors[1]:
        raise ConfigError(
            f"checking algorithm.advantage.context_anchors: found {list(anchors)}, wanted two numbers of "
            f"tokens, the first above 0 and the second above the first: the context without cost, and with full cost."
        )
    _check_lengths(config)
    _check_condensing(config)
    _check_learner(config)
    _check_sampling(config)


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Check that the problems of a step divide over so many ranks, and these into groups that share rows."""
    problems, sharing = config.train.problems_per_step, config.learner.sequence_parallel
    if problems % ranks:
        raise ConfigError(
            f"checking train.problems_per_step: found {problems}, which does not divide over {ranks} ranks, and every "
            f"rank rolls out whole groups. Choose a multiple of {ranks}, or another number of ranks."
        )
    if ranks % sharing:
        raise ConfigError(
            f"checking learner.sequence_parallel: found {sharing}, which does not divide the number of ranks, {ranks}. "
            f"Start a multiple of {sharing} ranks, or set a divisor of {ranks}."
        )


def _check_lengths(config: RunConfig) -> None:
    """The longest row that a rollout can make is a full context and a full reply after it."""
    rollout = config.rollout
    longest = rollout.limits.turn_tokens
    made_of = f"rollout.limits.max_context_tokens + rollout.limits.max_output_tokens = {longest}"
    room = config.learner.tokens_per_micro_batch
    if longest > room:
        raise ConfigError(
            f"checking learner.tokens_per_micro_batch: found {room}, and a row may have {made_of} tokens. Rows are "
            f"never split: raise it to at least {longest}."
        )
    given = config.sampler.options.get("max_model_len")
    if isinstance(given, int) and given < longest:
        raise ConfigError(
            f"checking sampler.options.max_model_len: found {given}, and a context with its reply may have {made_of} "
            f"tokens. Raise it to at least {longest}, or leave it out."
        )
    if config.model.new is not None and longest > config.model.new.max_positions:
        raise ConfigError(
            f"checking model.new.max_positions: found {config.model.new.max_positions}, and a context with its reply "
            f"may have {made_of} tokens. Raise it to at least {longest}."
        )


def _check_condensing(config: RunConfig) -> None:
    rollout = config.rollout
    figures = (
        ("rollout.condense.threshold", rollout.condense.threshold, 1.0),
        ("rollout.condense.jitter", rollout.condense.jitter, 0.0),
    )
    idle = [f"{key}={value}" for key, value, default in figures if value != default]
    if rollout.condense.when == "every_turn" and idle:
        raise ConfigError(
            f"checking {' and '.join(idle)}: rollout.condense.when is every_turn, which condenses at any length. "
            f"Set rollout.condense.when=over_budget, or remove the key."
        )
    if rollout.condense.target is not None and rollout.condense.target > rollout.condense.threshold:
        raise ConfigError(
            f"checking rollout.condense.target: found {rollout.condense.target}, above rollout.condense.threshold="
            f"{rollout.condense.threshold}; a condensed prompt would be condensed again at once. Lower it."
        )
    if rollout.condense.writer == "policy":
        return
    # texts of the initial policy never train, and the initial policy is a copy in this process
    aggregation = config.algorithm.aggregation
    faults = (
        (
            config.rollout.workers.processes > 0,
            "rollout.workers, which reach the policy alone. Set rollout.workers.processes=0",
        ),
        (
            aggregation.turns == "condense",
            "algorithm.aggregation.turns=condense, so that nothing would train. Set it to all or act",
        ),
        (
            aggregation.summary_share is not None,
            "algorithm.aggregation.summary_share, a share for texts that do not train. Set it to null",
        ),
    )
    for is_fault, found in faults:
        if is_fault:
            raise ConfigError(f"checking rollout.condense.writer=initial: found {found}, or set the writer to policy.")


def _check_learner(config: RunConfig) -> None:
    stage, offload = config.learner.zero_stage, config.learner.offload.training
    least = {"none": 0, "optimiser": 1, "optimiser_and_weights": 3}[offload]
    if stage < least:
        raise ConfigError(
            f"checking learner.offload.training: found {offload}, and learner.zero_stage is {stage}; DeepSpeed takes "
            f"out of the GPU only what ZeRO shares out. Set learner.zero_stage={least}, or "
            f"learner.offload.training=none."
        )
    if config.learner.offload.reference and config.model.lora is not None:
        raise ConfigError(
            "checking learner.offload.reference: found true, and model.lora is set; the reference is then the "
            "learner's own base, and there is no copy to take out of the GPU. Set learner.offload.reference=false."
        )
    if config.learner.offload.rollouts and offload != "none":
        raise ConfigError(
            f"checking learner.offload.rollouts: found true, and learner.offload.training is {offload}, which keeps "
            f"the state in main memory at all times. Set one of the two."
        )
    if config.learner.offload.rollouts and config.model.dtype == "bfloat16" and stage < 2:
        raise ConfigError(
            f"checking learner.offload.rollouts: found true, and learner.zero_stage is {stage} in bfloat16; DeepSpeed "
            f"can move the state of its optimisers from stage 2 on there. Set learner.zero_stage=2, which one GPU "
            f"takes too, or learner.offload.rollouts=false."
        )
    if config.learner.offload.rollouts and config.rollout.staleness:
        raise ConfigError(
            f"checking learner.offload.rollouts: found true, and rollout.staleness is {config.rollout.staleness}: the "
            f"sampler then samples while the learner works, and both need the GPU at once. Set "
            f"learner.offload.rollouts=false, or rollout.staleness=0."
        )
    if config.learner.compile_layers is True and config.learner.zero_stage == 3:
        raise ConfigError(
            "checking learner.compile_layers: found on, and learner.zero_stage is 3, which gathers weights inside of "
            "the layers, where a compiled graph would break. Set learner.compile_layers=off, or a lower zero_stage."
        )


def _check_sampling(config: RunConfig) -> None:
    """Check the trajectories' probabilities: corrected if the policy is older, measured, of the whole distribution."""
    staleness = config.rollout.staleness
    engine = config.sampler.options.get("engine")
    if staleness and isinstance(engine, dict) and engine.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            f"checking rollout.staleness: found {staleness}, and sampler.options.engine.tensor_parallel_size is "
            f"{engine['tensor_parallel_size']}: ranks that sample together while they learn together may wait for "
            f"each other for ever. Set rollout.staleness=0, or use sampler.name=vllm_server."
        )
    if staleness and not config.algorithm.importance.cap:
        raise ConfigError(
            f"checking algorithm.importance.cap: found 0, no correction, and rollout.staleness is {staleness}; a batch "
            f"is then sampled by an older policy than the one that learns from it, and that must be corrected. Set "
            f"algorithm.importance.cap=2 (or another bound of at least 1), or rollout.staleness=0."
        )
    parts = config.reward.options.get("parts", ())
    listed = parts if isinstance(parts, list) else ()
    names = [part.get("name") if isinstance(part, dict) else part for part in listed]
    if "answer_information" in names and config.rollout.answer_form is None:
        raise ConfigError(
            "checking reward.options.parts: answer_information pays what contexts know of the answer, and "
            "rollout.answer_form is null, so that nothing is measured. Set it to the way an answer is written, such as "
            "'<answer>{answer}</answer>'."
        )
    for option, default in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        value = config.sampler.options.get(option, default)
        if value != default:
            raise ConfigError(
                f"checking sampler.options.{option}: found {value}. Where unlikely tokens are cut off, the sampler's "
                f"log-probabilities are those of another distribution than the learner's, and every importance ratio "
                f"is wrong. Leave it out; sharpen with rollout.temperature, which both know of."
            )
