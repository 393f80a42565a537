"""Checks of a configuration against the tokenizer, chat template and size of its model. Loads no weights."""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import made_turns
from condensegrpo.assembly.runtime import renderer_for
from condensegrpo.assembly.scorers import check_models
from condensegrpo.config.load import HELD_OUT, longest_request
from condensegrpo.config.schema import RunConfig
from condensegrpo.core.condenser import Budget
from condensegrpo.core.defaults import with_defaults
from condensegrpo.core.errors import CondenseError, ConfigError, ContextOverflow
from condensegrpo.core.failures import PluginFailure, message_of
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.environment import Environment
from condensegrpo.core.protocols.task import Demonstrates, Split
from condensegrpo.core.threads import result_in_thread
from condensegrpo.episodes.boundary import called, first_messages
from condensegrpo.episodes.chat_template import first_rendering, tool_text
from condensegrpo.episodes.render import Renderer
from condensegrpo.episodes.toolformats import Native
from condensegrpo.episodes.view import check_pinned
from condensegrpo.learner.model_folder import (
    attention_of,
    check_heads,
    check_vocabulary,
    configuration,
    max_positions,
    sees,
)
from condensegrpo.learner.targets import check_targets_of
from condensegrpo.storage.media import MediaFolder

MOST = 0.03  # of the tokens of a text may be unknown
READ = 64  # problems of each split, and demonstrations, from the first
LARGEST = 1 << 20  # tokens of context that are tried for one that works
NAMED = 8  # unknown words in the message, the most frequent first


def check_coverage(components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check that hardly any token of what the policy reads at first is unknown to its tokenizer.

    Args:
        pinned: how an episode of the first problem begins.
    """
    if not renderer.has_unknown:
        return
    for source, text in _texts(components, pinned):
        tokens, words = renderer.unknown(text)
        unknown = Counter(words)
        if unknown.total() > MOST * tokens:
            new = components.config.model.new is not None
            cure = "Set model.new.tokenizer=bpe, or add them to corpus() of the task" if new else "Use another model"
            raise ConfigError(
                f"checking the tokenizer: it does not know {unknown.total()} of the {tokens} words of {source}, which "
                f"the policy would read as [UNK]; at most {MOST:.0%} may be unknown. The most frequent are "
                f"{', '.join(repr(word) for word, _ in unknown.most_common(NAMED))}. {cure}."
            )


def _texts(components: Components, pinned: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """What the policy reads, by what it is."""
    yield "system message and question", "\n".join(message.text for message in pinned)
    if schemas := components.toolbox.template_schemas:
        yield "the tools that the chat template shows", tool_text(schemas)
    for split in ("train", "eval"):
        problems = components.problems(split)[:READ]
        yield f"the {split} problems", "\n".join(problem.question for problem in problems)
    if components.config.warm_start.steps and isinstance(components.task, Demonstrates):
        turns = islice(made_turns(components.task, components.config.seed), READ)
        texts = (text for turn in turns for text in (*(message.text for message in turn.context), turn.reply))
        yield "the demonstrations", "\n".join(texts)


def check_model(components: Components, source: str) -> str:
    """Check what a configuration needs of its model's tokenizer, chat template and positions. Loads no weights.

    Returns which renderer it uses, and why.
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
    if names := components.condenser.scorers:
        tokens = config.rollout.limits.max_context_tokens
        check_models(names, source, pinned=_pinned(components, "train"), tokens=tokens)
    with TemporaryDirectory(prefix="condensegrpo-media-") as folder:
        media = MediaFolder(Path(folder))
        chosen = check_prompts(
            components, lambda varied: renderer_for(varied, source, media), max_positions=max_positions(source)
        )
    if config.model.lora is not None:
        check_targets_of(source, config.model.lora.targets, config.model.vision)
    check_heads(source, config.learner.sequence_parallel)
    attention_of(configuration(source), config.model.attention)
    return chosen


def check_prompts(components: Components, renderer: Callable[[Components], Renderer], max_positions: int | None) -> str:
    """Check the chat template and the lengths of what a configuration and its evaluations render.

    Returns which renderer it is, and why.
    """
    config, rendering = components.config, renderer(components)
    pinned = rendering.store_media(_pinned(components, "train"))
    first_rendering(lambda: rendering.prompt(pinned))
    if components.toolbox.names:
        if isinstance(components.toolbox.format, Native):
            rendering.check_calls()
        rendering.check_roles(pinned, components.toolbox.format.result("call_0", components.toolbox.names[0], "0"))
    check_coverage(components, rendering, pinned)
    _check_lengths(components, rendering, pinned)
    for name, varied in components.evaluations.items():
        its_renderer = rendering if varied.toolbox is components.toolbox else renderer(varied)
        its_pinned = its_renderer.store_media(_pinned(varied, "eval"))
        try:
            if varied.toolbox is not components.toolbox or varied.task is not components.task:
                check_coverage(varied, its_renderer, its_pinned)
            _check_lengths(varied, its_renderer, its_pinned)
        except ConfigError as error:
            if name == HELD_OUT:
                raise
            raise ConfigError(f"checking evaluate.variants.{name}: {error}") from error
    longest = longest_request(config)
    if max_positions is not None and longest > max_positions:
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: with rollout.limits.max_output_tokens it makes {longest} "
            f"tokens, and the model has {max_positions} positions. Lower one of them."
        )
    return rendering.chosen


def _check_lengths(components: Components, renderer: Renderer, pinned: Sequence[Message]) -> None:
    """Check the prompts of one configuration, beginning with ``pinned``; an error names the smallest context."""

    def fault(most: int) -> ConfigError | None:
        try:
            _check_room(components, renderer, pinned, most)
        except ConfigError as error:
            return error
        return None

    most = components.config.rollout.limits.max_context_tokens
    if error := fault(most):
        larger = range(most + 1, LARGEST)
        works = bisect_left(larger, True, key=lambda tokens: fault(tokens) is None)
        cure = f" The smallest that works is rollout.limits.max_context_tokens={larger[works]}."
        raise ConfigError(f"{error}{cure if works < len(larger) else ''}") from error
    check_confidence(components.config, renderer)


def _check_room(components: Components, renderer: Renderer, pinned: Sequence[Message], most: int) -> None:
    """Check that ``most`` tokens of context have room for a first prompt, a reply and what the condenser needs."""
    rollout = components.config.rollout
    least = rollout.condense.least_budget(most)
    limits = replace(rollout.limits, max_context_tokens=least)
    try:
        check_pinned(renderer, pinned, limits)
    except ContextOverflow as error:
        raise ConfigError(str(error)) from error
    tokens, reply = renderer.count(pinned), Message(role="assistant", content="0")
    if limits.max_turns > 1 and (with_reply := renderer.count((*pinned, reply))) > least:
        raise ConfigError(
            f"checking rollout.limits.max_context_tokens: found {least}; system message and question need {tokens} "
            f"tokens with the chat template, and with a reply of one word {with_reply}. Raise it, or set "
            f"rollout.limits.max_turns=1."
        )
    room = rollout.condense.target_tokens(least, draw=0.0)  # of a condensed prompt
    if rollout.condense.target is not None and room < tokens:
        raise ConfigError(
            f"checking rollout.condense.target: found {rollout.condense.target:g}, which leaves a condensed prompt "
            f"{room} tokens; system message and question need {tokens}, which no condenser shortens. Raise it, or "
            f"rollout.limits.max_context_tokens."
        )
    _check_condenser(components, renderer, pinned, least)


def _pinned(components: Components, split: Split) -> tuple[Message, ...]:
    """How an episode of a split's first problem begins, tools introduced; a ConfigError if the task fails at it."""
    task, problem = components.task, components.problems(split)[0]

    async def begin() -> tuple[Message, ...] | CondenseError:
        environment: object = None
        try:
            environment = task.environment(problem)
            return await first_messages(environment, problem)
        except CondenseError as error:
            return error
        finally:
            await called(with_defaults(environment, Environment).close)

    seconds = components.config.rollout.limits.turn_seconds
    doing = f"starting the problem {problem.id} of the task {type(task).__name__}"
    outcome = result_in_thread(
        lambda: asyncio.run(begin()), name=doing, seconds=seconds, setting="rollout.limits.turn_seconds"
    )
    if isinstance(outcome, CondenseError):
        raise outcome
    if isinstance(outcome, PluginFailure):
        raise ConfigError(f"{outcome}. It would fail in every trajectory: fix the task or its data.")
    return components.toolbox.introduced(outcome)


def _check_condenser(components: Components, renderer: Renderer, pinned: Sequence[Message], most: int) -> None:
    """Check that the condenser has the room that it needs; at the draw of the trigger that leaves it the least.

    Args:
        most: tokens of the smallest context budget.
    """
    config = components.config
    room = Budget(
        tokens=max(config.rollout.condense.target_tokens(most, draw=1.0) - renderer.count(pinned), 0),
        prompt_tokens=most,
        reply_tokens=config.rollout.limits.max_output_tokens,
    )
    try:
        components.condenser.check(pinned, room, renderer.count)
    except Exception as error:  # the boundary to a condenser
        fault = message_of(error)
        raise ConfigError(f"checking the room of the condenser {config.condenser.name}: {fault}.") from error


def check_confidence(config: RunConfig, renderer: Renderer) -> None:
    """Check that a draft of the answer has room for more than the text that opens it."""
    settings, most = config.rollout.stop_when_confident, config.rollout.limits.max_output_tokens
    if settings is None:
        return
    opening = len(renderer.text_ids(settings.opening))
    if opening >= most:
        raise ConfigError(
            f"checking rollout.stop_when_confident.form: the text that opens an answer, {settings.opening!r}, has "
            f"{opening} tokens, and rollout.limits.max_output_tokens={most} leaves no room for the answer. Raise it."
        )
