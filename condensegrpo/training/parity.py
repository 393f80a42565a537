"""Whether a sampler reports the learner's probabilities of its samples: in a trial, and in the first step of a run.

Everything that an importance ratio is made of is compared here on real parts: the configured sampler, the learner under
DeepSpeed, a real optimiser step between them. A sampler whose weights were not synchronised, whose cache answers for
old ones, or whose log-probabilities are of another distribution fails.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from condensegrpo.algorithms.credit import rows_of, trained_turns
from condensegrpo.algorithms.objective import PerToken, supervised
from condensegrpo.algorithms.segments import reply_row
from condensegrpo.assembly.build import build
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.runtime import open_sampler
from condensegrpo.config.load import validate
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import LearnerError
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.scored_trajectory import ScoredTrajectory
from condensegrpo.core.trajectory import Generation, SamplingParams, Segment
from condensegrpo.core.wording import plural
from condensegrpo.learner import ranks
from condensegrpo.learner.engine import DeepSpeedEngine, close_deepspeed, measure_logprobs, optimizer_step
from condensegrpo.learner.weights import all_gathered
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.initial_policy import base_policy
from condensegrpo.training.learn_step import packed, sampled_weights

TEMPERATURES = (1.0, 0.7)
PROMPTS, LONGEST, REPLY = 16, 200, 24  # the longest prompt fills a block of vLLM's cache, 128 tokens on a CPU
MICRO_BATCH = 4096  # tokens
MOVED = 0.01  # nats; a step that moves the samples' log-probabilities by less would prove nothing


class ParityBounds(NamedTuple):
    """How far sampler and learner may be apart."""

    largest_gap: float  # nats
    ratio: float  # of the mean ratio of their probabilities from 1


BOUNDS = {
    ("float32", "cpu"): ParityBounds(1e-4, 1e-3),
    ("float32", "cuda"): ParityBounds(1e-2, 1e-3),  # GPUs multiply fp32 with fewer bits in some kernels
    # measured on a CPU: 0.09 and 7e-4. A missed update is a nat apart
    ("bfloat16", "cpu"): ParityBounds(0.3, 1e-2),
    ("bfloat16", "cuda"): ParityBounds(0.3, 1e-2),
}
# of the first step, by the precision of sampler and learner: it stops a sampler that is off, whatever its kernels
FIRST_STEP = {"float32": ParityBounds(math.log(4), 0.02), "bfloat16": ParityBounds(math.log(50), 0.05)}
CHECKED = 64  # rows of each rank whose tokens are compared in the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What sampler and learner say of one batch of samples."""

    temperature: float
    tokens: int
    largest_gap: float  # nats, of |log π_sampler − log π_learner|
    mean_ratio: float  # of π_learner / π_sampler

    def __str__(self) -> str:
        """The figures, for a log."""
        away = self.mean_ratio - 1
        ratio = f"mean ratio 1 {'−' if away < 0 else '+'} {abs(away):.1e}"
        return (
            f"largest difference from the learner {self.largest_gap:.1e} nats, {ratio}, {plural(self.tokens, 'token')}"
        )

    def holds(self, bounds: ParityBounds) -> bool:
        """Whether an importance ratio may be made of the two; NaN does not hold."""
        return self.largest_gap <= bounds.largest_gap and abs(self.mean_ratio - 1) <= bounds.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityTrial:
    """A sampler before and after an optimiser step whose weights it received."""

    bounds: ParityBounds
    before: tuple[Parity, ...]
    after: tuple[Parity, ...]
    moved: float  # nats, the mean change of the first samples' log-probabilities by the step

    @property
    def moved_enough(self) -> bool:
        """Whether a sampler that missed the step would show."""
        return self.moved >= MOVED

    @property
    def passed(self) -> bool:
        """Whether the sampler followed the learner."""
        return self.moved_enough and all(parity.holds(self.bounds) for parity in (*self.before, *self.after))


def parity_config(sampler: str, options: Mapping[str, Any]) -> RunConfig:
    """A model of a few thousand parameters with tied embeddings, and the sampler in question.

    With ``model.lora`` the step trains adapters, and the sampler gets them as in a run.
    """
    return validate(
        {
            "name": "parity",
            "model": {"new": {"hidden_size": 64, "heads": 2, "ffn_size": 64, "max_positions": 512}},
            "task": {"name": "ledger"},
            "sampler": {"name": sampler, "options": dict(options)},
            "rollout": {"limits": {"max_context_tokens": LONGEST, "max_output_tokens": REPLY}},
            "learner": {"optimiser": {"lr": 0.02}},
        },
        source="parity",
    )


def parity_trial(config: RunConfig, folder: RunFolder) -> ParityTrial:
    """Make the model, sample, take an optimiser step on the samples, send the weights, and sample the same prompts.

    A sampler that can sleep does so during the step, as in a run.
    """
    ranks.join(config.learner.timeout_minutes)  # before the sampler: both live in one process group
    source = base_policy(config, build(config).task, folder)
    learner = open_learner(config, source, config.learner.optimiser, lora=config.model.lora, total_steps=1)
    sampler: Sampler | None = None
    try:
        sampler = open_sampler(config, source, lora=config.model.sampled_lora)
        vocabulary = learner.module.policy.config.get_text_config().vocab_size
        draw, lengths = random.Random(0), [1 + (LONGEST - 1) * index // (PROMPTS - 1) for index in range(PROMPTS)]
        prompts = [tuple(draw.randrange(vocabulary) for _ in range(length)) for length in lengths]
        with all_gathered(sampled_weights(sampler, learner)) as tensors:
            sampler.update(tensors, 0)
        before = _compared(learner, sampler, prompts)
        rows = _samples(sampler, prompts, temperature=1.0)
        batches = learner.module.pack(rows, max_tokens=MICRO_BATCH)
        sampler.sleep(keep_weights=False)
        old_T = torch.cat(measure_logprobs(learner, batches))
        optimizer_step(learner, batches, PerToken(supervised))
        new_T = torch.cat(measure_logprobs(learner, batches))
        with all_gathered(sampled_weights(sampler, learner)) as tensors:
            sampler.update(tensors, 1)
        return ParityTrial(
            bounds=BOUNDS[config.model.dtype, learner.device.type],
            before=before,
            after=_compared(learner, sampler, prompts),
            moved=float((new_T - old_T).abs().mean()),
        )
    finally:
        if sampler is not None:
            sampler.close()
        close_deepspeed(learner)


def _compared(learner: DeepSpeedEngine, sampler: Sampler, prompts: Sequence[tuple[int, ...]]) -> tuple[Parity, ...]:
    """The parity of fresh samples at every temperature."""
    parities = []
    for temperature in TEMPERATURES:
        rows = _samples(sampler, prompts, temperature=temperature)
        batches = learner.module.pack(rows, max_tokens=MICRO_BATCH)
        learner_T = torch.cat(measure_logprobs(learner, batches, temperature=temperature)).cpu()
        gap_T = learner_T - torch.cat([batch.logprobs for batch in batches])
        parities.append(
            Parity(
                temperature=temperature,
                tokens=len(gap_T),
                largest_gap=float(gap_T.abs().max()),
                mean_ratio=float(gap_T.exp().mean()),
            )
        )
    return tuple(parities)


def _samples(sampler: Sampler, prompts: Sequence[tuple[int, ...]], *, temperature: float) -> list[Segment]:
    """A reply to every prompt, as rows in which every sampled token weighs the same."""

    async def replies() -> list[Generation]:
        params = [SamplingParams(max_tokens=REPLY, temperature=temperature, seed=seed) for seed in range(len(prompts))]
        return await asyncio.gather(*map(sampler.sample, prompts, params))

    weight = 1 / (REPLY * len(prompts))
    return [
        reply_row(prompt, reply.token_ids, weight=weight, logprobs=reply.logprobs)
        for prompt, reply in zip(prompts, asyncio.run(replies()), strict=True)
    ]


def check_first_step(
    config: RunConfig, learner: DeepSpeedEngine, scored: Sequence[ScoredTrajectory], *, step: int
) -> Parity | None:
    """Compare the sampler's log-probabilities of a step's tokens with the learner's, before it learns from them.

    Every rank must call it. Turns that were sampled under other weights than the learner's are left out.

    Returns:
        What the two say; None: there is nothing to compare.

    Raises:
        LearnerError: they are too far apart for an importance ratio or a loss that is made of them.
    """
    fresh = [[turn.policy_version == step - 1 for turn in each.trajectory.turns] for each in scored]
    same = [each for each, turns in zip(scored, fresh, strict=True) if turns and all(turns)]
    weight_NK = trained_turns(same, config.algorithm.aggregation.turns).float()
    rows = rows_of(same, torch.ones_like(weight_NK), weight_NK)[:CHECKED]
    batches = packed(learner, rows, max_tokens=config.learner.tokens_per_micro_batch)
    temperature = config.rollout.temperature or 1.0
    learned = measure_logprobs(learner, batches, temperature=temperature)
    tokens, summed, worst = 0, 0.0, (0.0, 0, 0.0)  # of this rank; the largest gap, its token and the sampler's value
    for batch, learner_T in zip(batches, learned, strict=True):
        trained_T = batch.weights > 0
        sampler_T, target_T = batch.logprobs[trained_T], batch.target[trained_T]
        gap_T = learner_T.cpu()[trained_T] - sampler_T
        tokens, summed = tokens + len(gap_T), summed + float(gap_T.double().exp().sum())
        if len(gap_T):
            at = int(gap_T.abs().argmax())
            worst = max(
                worst, (float(gap_T[at]), int(target_T[at]), float(sampler_T[at])), key=lambda each: abs(each[0])
            )
    counts, sums, furthest = zip(*ranks.gather((tokens, summed, worst)), strict=True)
    if not sum(counts):
        return None
    gap, token, sampled = max(furthest, key=lambda each: abs(each[0]))
    parity = Parity(
        temperature=temperature, tokens=sum(counts), largest_gap=abs(gap), mean_ratio=math.fsum(sums) / sum(counts)
    )
    bounds = FIRST_STEP["bfloat16" if config.in_bfloat16 else "float32"]
    if not parity.holds(bounds):
        factor, most = math.exp(min(parity.largest_gap, 99)), math.exp(bounds.largest_gap)
        raise LearnerError(
            f"comparing the sampler {config.sampler.name} with the learner in step {step}: over {parity.tokens} tokens "
            f"the mean ratio of their probabilities is {parity.mean_ratio:.4g}, wanted 1 ± {bounds.ratio:g}; furthest "
            f"apart is the token {token}, whose log-probability is {sampled:.3f} for the sampler and "
            f"{sampled + gap:.3f} for the learner, a factor of {factor:.3g}, wanted at most "
            f"{most:.3g}. What is learned from such samples is wrong: see `condensegrpo doctor "
            f"--gpu`, or set sampler.name=transformers."
        )
    return parity
