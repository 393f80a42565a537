"""Opens the learner of a configuration. Apart from ``runtime``, since a dry run does not import DeepSpeed."""

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.pictures import MediaStore
from condensegrpo.core.wording import plural
from condensegrpo.learner.attention_kernels import kernels_on
from condensegrpo.learner.engine import DeepSpeedEngine, open_deepspeed
from condensegrpo.learner.layers import (
    CompileTrial,
    agreed_trial,
    checkpoint_layers,
    checkpointed_layers,
    compile_layers,
    trial_file,
    try_compiling,
)
from condensegrpo.learner.logprobs import heads_of, why_no_trees
from condensegrpo.learner.lora import add_adapters
from condensegrpo.learner.model_folder import load_policy
from condensegrpo.learner.ranks import join, rank
from condensegrpo.learner.settings import TREE_KERNELS, LoraSettings, OptimizerSettings
from condensegrpo.learner.vision_tower import BatchPictures, freeze_tower
from condensegrpo.vision.processor import load_picture_processor


def open_learner(
    config: RunConfig,
    source: str,
    optimizer: OptimizerSettings,
    *,
    lora: LoraSettings | None,
    total_steps: int,
    media: MediaStore | None = None,
    observer: Observer | None = None,
) -> DeepSpeedEngine:
    """The policy of a model folder under DeepSpeed, with an optimiser of these settings.

    With ``lora`` adapters train instead of its weights. The generators of Python and torch, from which the adapters'
    dropout and users' code draw, are seeded for each rank: a run of the same seed draws the same, whatever opening a
    learner draws and whatever was done before in this process.

    Args:
        media: where the pictures of rows are; None: there are none.
        observer: is told what is waited for.
    """
    phase = (observer or Observer()).phase
    phase("loading the policy", None)
    policy = load_policy(source, dtype=config.model.dtype, attention=config.model.attention)
    if config.model.vision == "frozen":
        freeze_tower(policy)
    if lora is not None:
        policy = add_adapters(policy, lora, base=source, seed=config.seed, vision=config.model.vision)
    trial = _compile_trial(config, policy, phase)
    phase("opening the learner", None)
    engine = open_deepspeed(
        policy,
        zero_stage=config.learner.zero_stage,
        optimizer=optimizer,
        total_steps=total_steps,
        dtype=config.model.dtype,
        offload=config.learner.offload.training,
        sequence_parallel=config.learner.sequence_parallel,
    )
    engine.module.kernel = config.model.attention
    processor = None if media is None else load_picture_processor(source, media)
    if processor is not None:
        engine.module.pictures = BatchPictures(processor, policy)
    if trial is not None:
        engine.module.compilation = trial.describe()
    engine.module.compiled = config.learner.compile_layers is True or (trial is not None and trial.fault is None)
    if engine.module.compiled:
        compile_layers(policy)  # not before: DeepSpeed opens a policy that is on the CPU
    if checkpointed := _checkpointed(config, policy):
        checkpoint_layers(policy, checkpointed)
    random.seed(config.seed + rank())
    torch.manual_seed(config.seed + rank())
    return engine


def choices(config: RunConfig, learner: DeepSpeedEngine) -> list[str]:
    """The choices that an open learner made by itself, for the log."""
    notes = [learner.module.describe(learner.device)]
    if checkpointed := _checkpointed(config, learner.module.policy):
        notes.append(
            f"{plural(checkpointed, 'decoder layer')} of {_layers(learner.module.policy)} computed again in backward; "
            f"all of them are a third more computation (learner.checkpoint_activations)"
        )
    if learner.module.compilation:
        notes.append(learner.module.compilation)
    if learner.module.ranks_a_row > 1:
        notes.append(
            f"{learner.module.ranks_a_row} ranks compute every micro-batch together (learner.sequence_parallel)"
        )
    return notes


def _compile_trial(
    config: RunConfig, policy: PreTrainedModel, phase: Callable[[str, None], None]
) -> CompileTrial | None:
    """Whether compiled layers are faster on every rank's device; None: that is not tried. Every rank must call it."""
    settled = config.learner.compile_layers != "auto" or config.learner.zero_stage == 3
    if settled or not torch.cuda.is_available() or config.model.attention not in TREE_KERNELS:
        return None
    join(config.learner.timeout_minutes)
    device = torch.device("cuda", torch.cuda.current_device())
    text = policy.config.get_text_config()
    settings = text.to_dict()
    if why_no_trees(settings, config.model.attention) is None:  # a trial that fails on one rank does not compare them
        phase("compiling and comparing attention kernels", None)
        kernels_on(config.model.attention, heads_of(text, settings), policy.dtype, device)
    file = trial_file(policy.config, policy.dtype, device, kernel=config.model.attention)

    def attempt() -> CompileTrial:
        phase("trying compiled layers", None)
        return try_compiling(policy.config, policy.dtype, device, kernel=config.model.attention)

    return agreed_trial(file, attempt)


def _checkpointed(config: RunConfig, policy: PreTrainedModel) -> int:
    gpu = torch.accelerator.is_available()
    return checkpointed_layers(config.learner.checkpoint_activations, _layers(policy), gpu=gpu)


def _layers(policy: PreTrainedModel) -> int:
    layers: int = policy.config.get_text_config().num_hidden_layers
    return layers
