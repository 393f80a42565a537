"""The parts of the trajectory engine that a configuration sets by figures alone. Loads no plug-in."""

from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import ConfigError
from condensegrpo.core.protocols import Measures, Sampler
from condensegrpo.rollout.budget import Limits
from condensegrpo.rollout.engine import Confidence, Trigger
from condensegrpo.rollout.information import PLACE, AnswerProbe
from condensegrpo.rollout.render import Renderer


def trigger(config: RunConfig) -> Trigger:
    """When the condenser is asked."""
    rollout = config.rollout
    return Trigger(
        when=rollout.condense,
        share=rollout.condense_share,
        to=rollout.condense_to,
        jitter=rollout.condense_jitter,
    )


def limits(config: RunConfig) -> Limits:
    """What an episode may cost."""
    rollout = config.rollout
    return Limits(
        max_turns=rollout.max_turns,
        max_context_tokens=rollout.max_context_tokens,
        max_output_tokens=rollout.max_output_tokens,
        turn_seconds=rollout.turn_seconds,
    )


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
        f"setting up rollout.answer_form: the sampler {config.sampler.name} cannot say how probable a given reply is. "
        f"Use sampler.name=transformers or vllm, or set rollout.answer_form=null."
    )


def confidence(config: RunConfig, renderer: Renderer) -> Confidence | None:
    """When a draft of the answer ends an episode, if that is asked for.

    Raises:
        ConfigError: what opens an answer alone is as long as a reply may be.
    """
    given = config.rollout.stop_when_confident
    if given is None:
        return None
    before, _, after = given.form.partition(PLACE)
    opening, most = len(renderer.text_ids(before)), config.rollout.max_output_tokens
    if opening >= most:
        raise ConfigError(
            f"checking rollout.stop_when_confident.form: what opens an answer, {before!r}, has {opening} tokens, and "
            f"rollout.max_output_tokens={most} leaves no room for the answer. Raise it."
        )
    return Confidence(
        threshold=given.threshold,
        before=before,
        closing=after.strip(),
        after_turns=given.after_turns,
        max_tokens=min(given.max_tokens, most - opening),
    )
