"""Where a run's policy comes from: a folder or Hub id, or a new model; after the warm start if there is one."""

from collections.abc import Callable
from pathlib import Path

from condensegrpo.assemble import Cast
from condensegrpo.config import NewModel, RunConfig
from condensegrpo.errors import ConfigError
from condensegrpo.learner import ranks
from condensegrpo.learner.new import new_model, new_tokenizer, save_new
from condensegrpo.observer import Observer
from condensegrpo.protocols import Demonstrates
from condensegrpo.storage import RunFolder
from condensegrpo.warm_start import warm_start


def base_policy(config: RunConfig, cast: Cast, folder: RunFolder) -> str:
    """The folder or Hub id of the policy before any training. A new model is made once, in ``origin/new``."""
    if config.model.new is None:
        return str(config.model.path)
    made = folder.path / "origin" / "new"
    if ranks.rank() == 0 and not made.is_dir():
        _make(config.model.new, config, cast, made)
    ranks.barrier()
    return str(made)


def first_policy(
    config: RunConfig,
    cast: Cast,
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
        warm_start(config, cast, source, warm, observer=observer, stopping=stopping)
    return str(warm)


def _make(new: NewModel, config: RunConfig, cast: Cast, made: Path) -> None:
    if not isinstance(cast.task, Demonstrates):
        raise ConfigError(
            f"making a new model for task {config.task.name!r}: the task has no corpus to build a tokenizer from. "
            f"Set model.path to a model with a tokenizer instead."
        )
    tokenizer = new_tokenizer(cast.task.corpus(), kind=new.tokenizer, vocab_size=new.vocab_size)
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
