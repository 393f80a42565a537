"""Opens the learner of a configuration. Not in ``assemble``, which a dry run imports without DeepSpeed's seconds."""

from condensegrpo.config import Optimiser as OptimiserSection
from condensegrpo.config import RunConfig
from condensegrpo.learner.deepspeed import DeepSpeedEngine, Optimiser, open_engine
from condensegrpo.learner.policy import load_policy


def open_learner(config: RunConfig, source: str, settings: OptimiserSection, *, total_steps: int) -> DeepSpeedEngine:
    """The policy of a model folder under DeepSpeed, with an optimiser of these settings."""
    return open_engine(
        load_policy(source, dtype=config.model.dtype, attention=config.model.attention),
        zero_stage=config.learner.zero_stage,
        optimiser=Optimiser(**settings.model_dump(), total_steps=max(total_steps, 1)),
        dtype=config.model.dtype,
    )
