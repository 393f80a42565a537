"""Where a run's policy comes from: a folder or Hub id, or a new model; after the warm start if there is one."""

from collections.abc import Callable
from pathlib import Path

from condensegrpo.assembly.assemble import Components
from condensegrpo.config.schema import NewModel, RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols import Demonstrates
from condensegrpo.learner import ranks
from condensegrpo.learner.new_model import new_model, new_tokenizer, save_new
from condensegrpo.storage.run_folder import RunFolder
from condensegrpo.training.warm_start import warm_start


def base_policy(config: RunConfig, components: Components, folder: RunFolder) -> str:
    """The folder or Hub id of the policy before any training. A new model is made once, in ``origin/new``."""
    if config.model.new is None:
        return str(config.model.path)
    made = folder.path / "origin" / "new"
    if ranks.rank() == 0 and not made.is_dir():
        _make(config.model.new, config, components, made)
    ranks.barrier()
    return str(made)


def first_policy(
    config: RunConfig,
    components: Components,
    folder: RunFolder,
    source: str,
    *,
    observer: Observer,
    stopping: Callable[[], bool],
) -> str:
    """The policy that GRPO starts from: ``source``, warmed up once into ``origin/warm`` if so configured."""
    if config.warm_start.steps == 0:
        return source
    warm = folder.path / "origin" / "warm"
    if not warm.is_dir():
        warm_start(config, components, source, warm, observer=observer, stopping=stopping)
    return str(warm)


def _make(new: NewModel, config: RunConfig, components: Components, made: Path) -> None:
    if not isinstance(components.task, Demonstrates):
        raise ConfigError(
            f"making a new model for task {config.task.name!r}: the task has no corpus to build a tokenizer from. "
            f"Set model.path to a model with a tokenizer instead."
        )
    tokenizer = new_tokenizer(components.task.corpus(), kind=new.tokenizer, vocab_size=new.vocab_size)
    model = new_model(
        tokenizer,
        hidden_size=new.hidden_size,
        layers=new.layers,
        heads=new.heads,
        kv_heads=new.heads,
        ffn_size=new.ffn_size,
        initializer_range=new.initializer_range,
        max_position_embeddings=new.max_positions,
        seed=config.seed,
    )
    aside = made.with_name(".new")
    save_new(aside, tokenizer, model)
    aside.rename(made)
