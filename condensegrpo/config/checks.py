"""Whether the figures of a configuration fit together. Looks at the configuration alone, and reports all faults."""

from collections.abc import Iterator

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError


def check_values(config: RunConfig) -> None:
    """Check keys against each other."""
    checks = (_lengths, _condensing, _frozen_writer, _learner, _offloaded_rollouts, _probabilities, _answers)
    if faults := [f"checking {fault}" for check in checks for fault in check(config)]:
        raise ConfigError("\n".join(faults))


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


def _lengths(config: RunConfig) -> Iterator[str]:
    """The longest row that a rollout can make is a full context and a full reply after it."""
    longest = config.rollout.limits.turn_tokens
    made_of = f"rollout.limits.max_context_tokens + rollout.limits.max_output_tokens = {longest}"
    room, given = config.learner.tokens_per_micro_batch, config.sampler.options.get("max_model_len")
    if longest > room:
        yield (
            f"learner.tokens_per_micro_batch: found {room}, and a row may have {made_of} tokens. Rows are never split: "
            f"raise it to at least {longest}."
        )
    if isinstance(given, int) and given < longest:
        yield (
            f"sampler.options.max_model_len: found {given}, and a context with its reply may have {made_of} tokens. "
            f"Raise it to at least {longest}, or leave it out."
        )


def _condensing(config: RunConfig) -> Iterator[str]:
    condense, anchors = config.rollout.condense, config.algorithm.advantage.context_anchors
    figures = {"threshold": (condense.threshold, 1.0), "jitter": (condense.jitter, 0.0)}
    idle = [f"rollout.condense.{key}={value}" for key, (value, default) in figures.items() if value != default]
    if condense.when == "every_turn" and idle:
        yield (
            f"{' and '.join(idle)}: rollout.condense.when is every_turn, which condenses at any length. Set "
            f"rollout.condense.when=over_budget, or remove the key."
        )
    if condense.target is not None and condense.target > condense.threshold:
        yield (
            f"rollout.condense.target: found {condense.target}, above rollout.condense.threshold={condense.threshold}; "
            f"a condensed prompt would be condensed again at once. Lower it."
        )
    if anchors is not None and not 0 < anchors[0] < anchors[1]:
        yield (
            f"algorithm.advantage.context_anchors: found {list(anchors)}, wanted two numbers of tokens, the first "
            f"above 0 and the second above the first: the context without cost, and with full cost."
        )


def _frozen_writer(config: RunConfig) -> Iterator[str]:
    """Texts of another writer than the policy never train, and it is a model in this process."""
    aggregation, writer = config.algorithm.aggregation, config.rollout.condense.writer
    if writer == "policy":
        return
    workers, share = config.rollout.workers.processes, aggregation.summary_share
    faults = (
        (workers > 0, "rollout.workers, which reach the policy alone. Set rollout.workers.processes=0"),
        (
            aggregation.turns == "condense",
            "algorithm.aggregation.turns=condense, so that nothing would train. Set it to all or act",
        ),
        (
            share is not None,
            "algorithm.aggregation.summary_share, a share for texts that do not train. Set it to null",
        ),
    )
    for is_fault, found in faults:
        if is_fault:
            yield f"rollout.condense.writer={writer}: found {found}, or set the writer to policy."


def _learner(config: RunConfig) -> Iterator[str]:
    stage, offload = config.learner.zero_stage, config.learner.offload
    least = {"none": 0, "optimiser": 1, "optimiser_and_weights": 3}[offload.training]
    if stage < least:
        yield (
            f"learner.offload.training: found {offload.training}, and learner.zero_stage is {stage}; DeepSpeed takes "
            f"out of the GPU only what ZeRO shares out. Set learner.zero_stage={least}, or "
            f"learner.offload.training=none."
        )
    if offload.reference and config.model.lora is not None:
        yield (
            "learner.offload.reference: found true, and model.lora is set; the reference is then the learner's own "
            "base, and there is no copy to take out of the GPU. Set learner.offload.reference=false."
        )
    if config.learner.compile_layers is True and stage == 3:
        yield (
            "learner.compile_layers: found on, and learner.zero_stage is 3, which gathers weights inside of the "
            "layers, where a compiled graph would break. Set learner.compile_layers=off, or a lower zero_stage."
        )


def _offloaded_rollouts(config: RunConfig) -> Iterator[str]:
    stage, training = config.learner.zero_stage, config.learner.offload.training
    if not config.learner.offload.rollouts:
        return
    found = "learner.offload.rollouts: found true, and"
    if training != "none":
        yield (
            f"{found} learner.offload.training is {training}, which keeps the state in main memory at all times. Set "
            f"one of the two."
        )
    if config.model.dtype == "bfloat16" and stage < 2:
        yield (
            f"{found} learner.zero_stage is {stage} in bfloat16; DeepSpeed can move the state of its optimisers from "
            f"stage 2 on there. Set learner.zero_stage=2, which one GPU takes too, or learner.offload.rollouts=false."
        )
    if config.rollout.staleness:
        yield (
            f"{found} rollout.staleness is {config.rollout.staleness}: the sampler then samples while the learner "
            f"works, and both need the GPU at once. Set learner.offload.rollouts=false, or rollout.staleness=0."
        )


def _probabilities(config: RunConfig) -> Iterator[str]:
    """The trajectories' probabilities are corrected if the policy is older, and those of the whole distribution."""
    staleness, options = config.rollout.staleness, config.sampler.options
    engine = options.get("engine")
    parallel = engine.get("tensor_parallel_size", 1) if isinstance(engine, dict) else 1
    if staleness and parallel != 1:
        yield (
            f"rollout.staleness: found {staleness}, and sampler.options.engine.tensor_parallel_size is {parallel}: "
            f"ranks that sample together while they learn together may wait for each other for ever. Set "
            f"rollout.staleness=0, or use sampler.name=vllm_server."
        )
    if staleness and not config.algorithm.importance.cap:
        yield (
            f"algorithm.importance.cap: found 0, no correction, and rollout.staleness is {staleness}; a batch is then "
            f"sampled by an older policy than the one that learns from it, and that must be corrected. Set "
            f"algorithm.importance.cap=2 (or another bound of at least 1), or rollout.staleness=0."
        )
    for option, default in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        if (value := options.get(option, default)) != default:
            yield (
                f"sampler.options.{option}: found {value}. Where unlikely tokens are cut off, the sampler's "
                f"log-probabilities are those of another distribution than the learner's, and every importance ratio "
                f"is wrong. Leave it out; sharpen with rollout.temperature, which both know of."
            )


def _answers(config: RunConfig) -> Iterator[str]:
    parts = config.reward.options.get("parts")
    listed = parts if isinstance(parts, list) else ()
    names = [part.get("name") if isinstance(part, dict) else part for part in listed]
    if "answer_information" in names and config.rollout.answer_form is None:
        yield (
            "reward.options.parts: answer_information pays what contexts know of the answer, and rollout.answer_form "
            "is null, so that nothing is measured. Set it to the way an answer is written, such as "
            "'<answer>{answer}</answer>'."
        )
