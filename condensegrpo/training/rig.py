"""What lives as long as a training run does: built once, then only handed on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from condensegrpo.assembly import assemble
from condensegrpo.assembly.assemble import Components
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Problem, Sampler, Tracker
from condensegrpo.learner import deepspeed, ranks
from condensegrpo.learner.deepspeed import DeepSpeedEngine
from condensegrpo.learner.reference import Reference, against_base, against_copy, open_reference
from condensegrpo.rollout.episode import Engine
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.storage.trackers import JsonlTracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The parts of a run."""

    config: RunConfig
    folder: RunFolder
    components: Components
    problems: Sequence[Problem]
    source: str  # the folder or Hub id that GRPO starts from
    sampler: Sampler
    engine: Engine  # of trajectories
    learner: DeepSpeedEngine
    reference: Reference | None  # only where a KL term is measured to it
    observer: Observer
    trackers: tuple[Tracker, ...]  # none on any rank but the first


def set_up(config: RunConfig, folder: RunFolder, components: Components, source: str, observer: Observer) -> Rig:
    """Load the policy into sampler and learner, and whatever else a run needs; every rank must call it."""
    observer.phase("loading the policy", None)
    sampler = assemble.sampler(config, source)
    learner = open_learner(
        config,
        source,
        config.learner.optimiser,
        lora=config.model.lora,
        total_steps=config.train.steps * config.algorithm.updates_per_batch,
    )
    if learner.module.without_trees:
        observer.say(f"prefixes that rows share are computed once for every row: {learner.module.without_trees}")
    return Rig(
        config=config,
        folder=folder,
        components=components,
        problems=assemble.problems(components.task, "train"),
        source=source,
        sampler=sampler,
        engine=assemble.engine(
            config,
            components,
            renderer=assemble.renderer(config, components, source),
            sampler=sampler,
            temperature=config.rollout.temperature,
        ),
        learner=learner,
        reference=_reference(config, source, learner) if config.algorithm.kl.coefficient else None,
        observer=observer,
        trackers=(JsonlTracker(folder.metrics), *assemble.trackers(config)) if ranks.rank() == 0 else (),
    )


def take_down(rig: Rig) -> None:
    """Free what the run holds."""
    rig.sampler.close()
    deepspeed.close(rig.learner)
    for tracker in rig.trackers:
        tracker.close()


def _reference(config: RunConfig, source: str, learner: DeepSpeedEngine) -> Reference:
    model, device = config.model, learner.device
    if model.lora is not None:
        return partial(against_base, learner)
    home = "cpu" if config.learner.offload_reference else device
    copy = open_reference(source, dtype=model.dtype, attention=model.attention, device=home)
    return partial(against_copy, copy, device)
