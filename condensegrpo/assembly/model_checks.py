"""Checks of a configuration against the tokenizer, chat template and size of its model. Loads no weights."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.coverage import check_coverage
from condensegrpo.assembly.runtime import renderer_for
from condensegrpo.assembly.scorers import check_models, names_of
from condensegrpo.config.load import HELD_OUT, longest_request
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.errors import CondenseError, ConfigError, ContextOverflow
from condensegrpo.core.failures import Failure, message_of
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.condenser import Budget, ChecksRoom
from condensegrpo.core.protocols.environment import Closes, Environment
from condensegrpo.core.protocols.task import Split
from condensegrpo.core.threads import result_in_thread
from condensegrpo.episodes.boundary import asynchronous, first_messages
from condensegrpo.episodes.chat_template import first_rendering
from condensegrpo.episodes.prompt import check_pinned
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.model_folder import check_heads, check_vocabulary, configuration, positions, sees
from condensegrpo.learner.targets import check_targets_of
from condensegrpo.storage.media import MediaFolder


def check_model(components: Components, source: str) -> None:
    """Check what a configuration needs of its model's tokenizer, chat template and positions. Loads no weights.

    Raises:
        ConfigError: the tokenizer has more ids than the model, the chat template fails, is slow or knows no tool
            results, system message, question and a reply, or a context with its reply, are too long (the message says
            which key to change), the model has no layers for the adapters, or its heads do not divide over the ranks
            that share a row, or a vision tower is to train that there is not, or the weights are quantised.
    """
    check_vocabulary(source)
    if quantised := getattr(configuration(source), "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise ConfigError(
            f"checking model.path: the weights of {source} are quantised ({method}), and the learner and the updates "
            f"of the sampler need plain ones. Use the model that is not quantised, or dequantise it and save it."
        )
    config = components.config
    if config.model.vision == "train" and not sees(configuration(source)):
        raise ConfigError(
            f"checking model.vision: found train, and {source} has no vision tower, or is of no family that is known. "
            f"Set model.vision=frozen."
        )
    if names := names_of(components.condenser):
        tokens = config.rollout.limits.max_context_tokens
        check_models(names, source, pinned=_pinned(components, "train"), tokens=tokens)
    with TemporaryDirectory(prefix="condensegrpo-media-") as folder:
        media = MediaFolder(Path(folder))
        check_prompts(components, lambda varied: renderer_for(varied, source, media), positions=positions(source))
    if config.model.lora is not None:
        check_targets_of(source, config.model.lora.targets, config.model.vision)
    check_heads(source, config.learner.sequence_parallel)


def check_prompts(components: Components, renderer: Callable[[Components], Renderer], positions: int | None) -> None:
    """Check the chat template and the lengths of what a configuration and its evaluations render.

    Raises:
        ConfigError: as ``check_model``.
    """
    config, rendering = components.config, renderer(components)
    pinned = rendering.taken_up(_pinned(components, "train"))
    first_rendering(lambda: rendering.prompt(pinned))
    if components.toolbox.names:
        rendering.check_roles(pinned, components.toolbox.format.result("call_0", components.toolbox.names[0], "0"))
    check_coverage(components, rendering, pinned)
    _check_lengths(components, rendering, pinned)
    for name, varied in components.evaluations.items():
        its_renderer = rendering if varied.toolbox is components.toolbox else renderer(varied)
        its_pinned = its_renderer.taken_up(_pinned(varied, "eval"))
        try:
            if varied.toolbox is not components.toolbox or varied.task is not components.task:
                check_coverage(varied, its_renderer, its_pinned)
            _check_lengths(varied, its_renderer, its_pinned)
        except ConfigError as error:
            if name == HELD_OUT:
                raise
            raise ConfigError(f"checking evaluate.variants.{name}: {error}") from error
    longest = longest_request(config)
    if positions is not None and longest > positions:
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: with rollout.limits.max_output_tokens it makes {longest} "
            f"tokens, and the model has {positions} positions. Lower one of them."
        )


def _check_lengths(components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check the prompts of one configuration, beginning with ``pinned``."""
    rollout = components.config.rollout
    least = rollout.condense.least_budget(rollout.limits.max_context_tokens)
    limits = replace(rollout.limits, max_context_tokens=least)
    try:
        check_pinned(renderer, pinned, limits)
    except ContextOverflow as error:
        raise ConfigError(str(error)) from error
    tokens, reply = renderer.count(pinned), Message(role="assistant", content="0")
    if limits.max_turns > 1 and (with_reply := renderer.count((*pinned, reply))) > least:
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: found {least}; system message and question need {tokens} "
            f"tokens with the chat template, and with a reply of one word {with_reply}. Raise it to at least "
            f"{with_reply}, or set rollout.limits.max_turns=1."
        )
    room = rollout.condense.room(least, draw=0.0)  # of a condensed prompt
    if rollout.condense.to is not None and room < tokens:
        raise ConfigError(
            f"checking rollout.condense.to: found {rollout.condense.to:g}, which leaves a condensed prompt {room} "
            f"tokens; system message and question need {tokens}, which no condenser shortens. Raise it, or "
            f"rollout.limits.max_context_tokens."
        )
    _check_condenser(components, renderer, pinned, least)
    check_confidence(components.config, renderer)


def _pinned(components: Components, split: Split) -> tuple[Message, ...]:
    """How an episode of a split's first problem begins, tools introduced; a ConfigError if the task fails at it."""
    task, problem = components.task, components.problems(split)[0]

    async def begin() -> tuple[Message, ...] | CondenseError:
        environment: Environment | None = None
        try:
            environment = task.environment(problem)
            return await first_messages(environment)
        except CondenseError as error:
            return error
        finally:
            if isinstance(environment, Closes):
                await asynchronous(environment.close(), "close()")

    seconds = components.config.rollout.limits.turn_seconds
    doing = f"starting the problem {problem.id} of the task {type(task).__name__}"
    outcome = result_in_thread(
        lambda: asyncio.run(begin()), name=doing, seconds=seconds, setting="rollout.limits.turn_seconds"
    )
    if isinstance(outcome, CondenseError):
        raise outcome
    if isinstance(outcome, Failure):
        raise ConfigError(f"{outcome}. It would fail in every trajectory: fix the task or its data.")
    return components.toolbox.introduced(outcome)


def _check_condenser(components: Components, renderer: Renderer, pinned: Sequence[Message], most: int) -> None:
    """Check that the condenser has the room that it needs; at the draw of the trigger that leaves it the least.

    Args:
        most: tokens of the smallest context budget.
    """
    if not isinstance(components.condenser, ChecksRoom):
        return
    config = components.config
    room = Budget(
        tokens=config.rollout.condense.room(most, draw=1.0),
        count=renderer.count,
        request_tokens=most,
        reply_tokens=config.rollout.limits.max_output_tokens,
    )
    try:
        components.condenser.check_room(pinned, room)
    except Exception as error:  # the boundary to a condenser
        fault = message_of(error)
        raise ConfigError(f"checking the room of the condenser {config.condenser.name}: {fault}.") from error


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
