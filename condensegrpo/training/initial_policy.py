"""The policy that GRPO starts from: a folder or Hub id, or a new model; after the warm start if there is one."""

from collections.abc import Callable
from functools import partial

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import demonstrations
from condensegrpo.assembly.open_learner import open_learner
from condensegrpo.assembly.preflight import made_tokenizer
from condensegrpo.assembly.runtime import open_sampler, renderer_for
from condensegrpo.config.resumed import learned_otherwise, store_configuration
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.task import Task
from condensegrpo.learner import ranks
from condensegrpo.learner.atomic_folder import published_folder
from condensegrpo.learner.new_model import new_model, save_new
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.warm_start import Probe, discard_progress, warm_start


def base_policy(config: RunConfig, task: Task, folder: RunFolder) -> str:
    """The folder or Hub id of the policy before any training. A new model is made once, in ``origin/new``.

    Raises:
        ConfigError: a new model is configured, and the task has no corpus for its tokenizer.
    """
    new, made = config.model.new, folder.path / "origin" / "new"
    if new is None:
        return str(config.model.path)
    if ranks.rank() == 0 and not made.is_dir():
        tokenizer = made_tokenizer(task, new)
        model = new_model(tokenizer, new, seed=config.seed)
        with published_folder(made) as aside:
            save_new(aside, tokenizer, model)
    ranks.barrier()
    return str(made)


def first_policy(
    components: Components,
    folder: RunFolder,
    source: str,
    *,
    observer: Observer,
    stopping: Callable[[], bool],
) -> str:
    """The policy that GRPO starts from: ``source``, warmed up once into ``origin/warm`` if so configured.

    Raises:
        ConfigError: the task has no demonstrations.
        Interrupted: ``stopping`` said so during the warm start.
    """
    config = components.config
    settings, warm = config.warm_start, folder.path / "origin" / "warm"
    if settings.steps == 0:
        return source
    if ranks.from_first(warm.is_dir()):  # looked up on rank 0 alone: other nodes' NFS caches would remember its absence
        discard_progress(warm)
        return str(warm)
    if ranks.from_first(learned_otherwise(folder, config)):
        observer.say("the warm start begins again: the configuration was changed")
        discard_progress(warm)
    if ranks.rank() == 0:
        store_configuration(folder, config, first_step=0)
    renderer = renderer_for(components, source, folder.media)
    shown = demonstrations(components, renderer, source)
    warm_start(
        source,
        warm,
        demonstrations=shown,
        open_learner=partial(
            open_learner,
            config,
            optimizer=settings.optimiser,
            lora=None if config.model.new else config.model.lora,  # beside random weights adapters learn very little
            total_steps=settings.steps,
            media=folder.media,
        ),
        settings=settings,
        max_tokens=config.learner.tokens_per_micro_batch,
        probe=Probe(
            demonstrations=shown,
            renderer=renderer,
            stop_strings=components.toolbox.format.stop_strings,
            seed=config.seed,
            open_sampler=partial(open_sampler, config, media=folder.media),
            turns=settings.probe_turns,
            max_output_tokens=config.rollout.limits.max_output_tokens,
            temperature=config.rollout.temperature,
        ),
        observer=observer,
        stopping=stopping,
    )
    return str(warm)
