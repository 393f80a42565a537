"""The parts of the trajectory engine that a configuration sets by numbers alone. Loads no plug-in."""

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.protocols import Measures, Sampler
from condensegrpo.rollout.information import AnswerProbe
from condensegrpo.rollout.render import Renderer


def probe(config: RunConfig, renderer: Renderer, sampler: Sampler) -> AnswerProbe | None:
    """What measures the ground truth behind every prompt, if that is asked for.

    Raises:
        ConfigError: the sampler cannot measure.
    """
    form = config.rollout.answer_form
    if form is None:
        return None
    if not isinstance(sampler, Measures):
        raise _cannot_measure(config)
    return AnswerProbe(model=sampler, renderer=renderer, form=form)


def check_probe(config: RunConfig, sampler: object) -> None:
    """Check that the sampler can measure the ground truth, if that is asked for. Loads nothing.

    Args:
        sampler: its class, or whatever makes one, which is then not looked into.

    Raises:
        ConfigError: it cannot.
    """
    if config.rollout.answer_form is not None and isinstance(sampler, type) and not issubclass(sampler, Measures):
        raise _cannot_measure(config)


def _cannot_measure(config: RunConfig) -> ConfigError:
    return ConfigError(
        f"setting up rollout.answer_form: the sampler {config.sampler.name} cannot measure the probability of a reply. "
        f"Use sampler.name=transformers or vllm, or set rollout.answer_form=null."
    )


def check_confidence(config: RunConfig, renderer: Renderer) -> None:
    """Check that a draft of the answer has room for more than the text that opens it.

    Raises:
        ConfigError: the opening text alone is as long as a reply may be.
    """
    settings, most = config.rollout.stop_when_confident, config.rollout.limits.max_output_tokens
    if settings is None:
        return
    opening = len(renderer.text_ids(settings.opening))
    if opening >= most:
        raise ConfigError(
            f"checking rollout.stop_when_confident.form: the text that opens an answer, {settings.opening!r}, has "
            f"{opening} tokens, and rollout.limits.max_output_tokens={most} leaves no room for the answer. Raise it."
        )
