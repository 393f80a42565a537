"""Checks of a training run before its folder is made: all that can be known without the weights of its model."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.demonstrations import check_task, corpus_of
from condensegrpo.assembly.held_out import check_disjoint, check_truths
from condensegrpo.assembly.policy import frozen_writers
from condensegrpo.assembly.rehearsal import rehearse
from condensegrpo.assembly.runtime import renderer_for, renderer_with
from condensegrpo.assembly.scorers import check_models
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import is_factory
from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.errors import CondenseError, ConfigError, ModelMissing
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.process import temporary_folder
from condensegrpo.core.protocols.reward import RewardPart, TurnReward
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.task import Task
from condensegrpo.core.trajectory import StopReason
from condensegrpo.core.wording import plural
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.model_folder import (
    attention_of,
    check_divided,
    check_heads,
    check_vocabulary,
    configuration,
    load_tokenizer,
    local_source,
    max_positions,
    sees,
)
from condensegrpo.learner.new_tokenizer import tiny_tokenizer
from condensegrpo.learner.settings import NewModel
from condensegrpo.storage.hub import model_fault
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.run_folder import evaluation_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")
NOT_EVALUATED = (  # keys that train alone reads
    "name",
    "runs_dir",
    "model",
    "sampler",
    "trackers",
    "algorithm",
    "learner",
    "warm_start",
    "train",
)


def check_run(components: Components, *, resumed: bool = False) -> tuple[str, ...]:
    """Check what training on this machine needs beyond what ``build`` checks. Loads no weights.

    Args:
        resumed: the run has a folder, which may have been moved from ``runs_dir``.

    Returns:
        Estimator and dtype with the reasons for them, what came of the rehearsal, and what could not be checked.
    """
    config, name = components.config, components.config.sampler.name
    if not resumed:
        _check_folder(config)
    sampler = config.sampler.plugin(components.objects)
    if overrides(sampler, Sampler.check_training):
        with plugin_code(f"calling check_training of the sampler {name}", ConfigError):
            try:
                sampler.check_training()
            except ValueError as error:
                raise ConfigError(f"checking sampler.name: found {name}, {error}.") from error
    if not is_factory(sampler) and not overrides(sampler, Sampler.update):
        raise ConfigError(
            f"checking sampler.name: found {name}, which has no update(named_tensors, version), so that it cannot take "
            f"the learner's weights{at_definition(sampler)}. Write one, or use it to evaluate only."
        )
    if config.model.attention != "auto":
        from condensegrpo.learner.attention_kernels import check_attention  # imports transformers' attention

        check_attention(config.model.attention, config.model.dtype)
    unchecked = check_settings(components)
    return (*_choices(components), *unchecked)


def check_settings(components: Components) -> tuple[str, ...]:
    """The part of ``check_run`` that does not depend on the machine.

    Returns:
        What came of the rehearsal, what could not be checked, and what is left out of the training data.
    """
    task = with_defaults(components.task, Task)
    if faults := [f"checking {fault}" for check in (_learning, _variants) for fault in check(components)]:
        raise ConfigError("\n".join(faults))
    check_writer_needed(components)
    check_disjoint(components)
    notes = [*check_truths(components), *_check_policy(components)]
    if task.left_out:
        notes.append(f"{plural(task.left_out, 'training problem')} left out: the evaluation data has them too")
    if task.alike:
        notes.append(
            f"{plural(task.alike, 'training problem')} kept with a question of the evaluation data: another column "
            f"differs"
        )
    return tuple(notes)


def check_model(components: Components, source: str, *, trains: bool = False) -> tuple[str, ...]:
    """Check what a configuration needs of a model, and rehearse it with the model's tokenizer. Loads no weights.

    Args:
        trains: whether the rehearsed episodes are given credit and made into rows.

    Returns:
        What came of the rehearsal.
    """
    if trains or components.config.sampler.name not in components.objects:
        check_architecture(components, source)
    else:  # the sampler has its own model, if any
        check_vocabulary(source)
    with temporary_folder("media") as folder:
        media = MediaFolder(folder)
        return rehearse(
            components,
            lambda each: renderer_for(each, source, media),
            max_positions=max_positions(source),
            trains=trains,
        )


def check_architecture(components: Components, source: str) -> None:
    """Check what a configuration needs of a model's vocabulary, weights, tower, layers and heads. Loads no weights."""
    config = components.config
    check_vocabulary(source)
    if quantised := getattr(configuration(source), "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise ConfigError(
            f"checking model.path: the weights of {source} are quantised ({method}), and the learner and the updates "
            f"of the sampler need plain ones. Use the model that is not quantised, or dequantise it and save it."
        )
    if config.model.vision == "train" and not sees(configuration(source)):
        raise ConfigError(
            f"checking model.vision: found train, and {source} has no vision tower, or is of no family that is known. "
            f"Set model.vision=frozen."
        )
    check_models(components.condenser.scorers, source)
    check_writers(components, source)
    if config.model.lora is not None:
        from condensegrpo.learner.lora_targets import check_targets_of

        check_targets_of(source, config.model.lora.targets, config.model.vision)
    check_heads(source, config.learner.sequence_parallel)
    attention_of(configuration(source), config.model.attention)


def check_writer_needed(components: Components) -> None:
    """Check that a writer other than the policy has something to write."""
    config = components.config
    if config.rollout.condense.writer != "policy" and not components.condenser.writes:
        raise ConfigError(
            f"checking rollout.condense.writer: found {config.rollout.condense.writer}, and the condenser "
            f"{config.condenser.name} asks for no text. Set condenser.name=summary or compact, or the writer to policy."
        )


def check_writers(components: Components, source: str | None) -> None:
    """Check that the models that write for condensers are there and have the tokens of the policy, ``source``.

    Args:
        source: None: the policy is yet to be made, and its tokens are not compared.
    """
    try:
        writers = frozen_writers(each.config for each in (components, *components.evaluations.values())).values()
        for writer in writers:
            check_vocabulary(writer)
    except CondenseError as error:
        raise ConfigError(f"checking rollout.condense.writer: {str(error).replace('model.path', 'it')}") from error
    for writer in writers:
        if source is not None and load_tokenizer(writer).get_vocab() != load_tokenizer(source).get_vocab():
            raise ConfigError(
                f"checking rollout.condense.writer: the tokenizer of {writer} is not that of the policy, {source}: a "
                f"token has another id. Name a model with the tokenizer of the policy."
            )


def made_tokenizer(task: Task, new: NewModel) -> "PreTrainedTokenizerFast":
    """The tokenizer of a new model, built from the corpus of its task."""
    from condensegrpo.learner.new_model import new_tokenizer, seeing_tokenizer

    made = _made(task, new, new_tokenizer)
    return made if new.pictures is None else seeing_tokenizer(made)


def _made(task: Task, new: NewModel, make: Callable[..., T]) -> T:
    corpus = corpus_of(task)
    try:
        return make(corpus, kind=new.tokenizer, vocab_size=new.vocab_size)
    except ValueError as error:
        raise ConfigError(f"checking model.new: {error}.") from error


def _new_renderer(task: Task, new: NewModel, folder: Path) -> Callable[[Components], Renderer]:
    """How a new model renders; ``folder``: for what one that sees pictures has beside its weights."""
    if new.pictures is None:
        tiny = cast("PreTrainedTokenizerFast", _made(task, new, tiny_tokenizer))  # has all that a renderer uses
        return lambda each: renderer_with(each, tiny, stop_ids=())
    from condensegrpo.learner.new_model import new_config, save_image_processor

    tokenizer, source = made_tokenizer(task, new), folder / "model"
    tokenizer.save_pretrained(source)
    new_config(new, vocab_size=len(tokenizer)).save_pretrained(source)
    save_image_processor(source, size=new.pictures.size, patch=new.pictures.patch)
    return lambda each: renderer_for(each, str(source), MediaFolder(folder / "media"))


def _choices(components: Components) -> tuple[str, str]:
    """Estimator and dtype, with the reasons for them."""
    config = components.config
    chosen = config.algorithm.advantage.estimator is not None
    why = "set by algorithm.advantage.estimator" if chosen else f"the default where reward.name is {config.reward.name}"
    total = components.estimator.plugin.learns_from == "score" and config.reward.name != "correct"
    dtype_why = "set by model.dtype" if "dtype" in config.model.model_fields_set else "the default on this machine"
    return (
        f"estimator {config.estimator}: {why}{'; its score is the total of the reward' if total else ''}",
        f"model and learner compute in {config.model.dtype}: {dtype_why}",
    )


def _check_folder(config: RunConfig) -> None:
    """Check that the folder of the run can be made."""
    folder = Path(config.runs_dir).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        denied = f"you cannot write to it: {os.strerror(errno.EROFS)}" if read_only else "you may not write to it"
        fault = denied if existing.is_dir() else "it is no folder"
        raise ConfigError(
            f"checking runs_dir={config.runs_dir}: the run is written below {existing}, and {fault}. Set runs_dir to a "
            f"folder that you may write to."
        )


def _learning(components: Components) -> Iterator[str]:
    """Why the estimator cannot learn from all parts of a weighted sum, or a step has nothing to train."""
    from condensegrpo.assembly.learning_signal import turn_reward_estimators

    config, reward = components.config, components.reward
    parts: Sequence[RewardPart] = getattr(reward, "parts", ())
    paying_turns = [part.name for part in parts if isinstance(part.reward, TurnReward)]
    if paying_turns and config.algorithm.advantage.estimator is None:
        yield (
            f"algorithm.advantage.estimator: it is not set, and {', '.join(paying_turns)} in "
            f"reward.options.parts pays single turns, which the default {config.estimator} only logs. Set "
            f"{turn_reward_estimators()}, or {config.estimator} to only log them."
        )
    weight = sum(part.weight for part in parts if part.name not in paying_turns)
    if components.estimator.plugin.learns_from == "score" and weight > 1 + 1e-9:
        yield (
            f"algorithm.advantage.estimator: found {config.estimator}, which takes a score in [0, 1], and the "
            f"weights in reward.options.parts sum to {weight:g}. Set algorithm.advantage.estimator=grpo, or lower the "
            f"weights to a sum of 1."
        )
    size, count = len(components.problems("train")), config.train.problems_per_step
    if config.train.steps and count > size:
        yield (
            f"train.problems_per_step: found {count}, and the task has "
            f"{plural(size, 'training problem')}; a step would sample the same problem several times. Lower it to at "
            f"most {size}, or give more data."
        )
    if config.train.steps and config.rollout.temperature == 0:
        yield (
            "rollout.temperature: found 0, under which all samples of a problem are the same, so that none "
            "has an advantage. Set it above 0; evaluate.temperature=0 evaluates greedily."
        )
    if config.train.steps and all(config.algorithm.stops.of(stop) == "mask" for stop in StopReason):
        yield (
            "algorithm.stops.handling: every stop reason is masked, so that no trajectory ever trains. Set "
            "that of answered to train."
        )


def _variants(components: Components) -> Iterator[str]:
    """Evaluation variants that change what an evaluation does not read, or share a file."""
    config = components.config
    by_file: dict[str, str] = {}
    for name, varied in components.evaluations.items():
        if (other := by_file.setdefault(evaluation_file(name).casefold(), name)) != name:
            yield (
                f"evaluate.variants.{name}: its trajectories would be written over those of {other}, both to "
                f"{evaluation_file(name)}. Give one of them a name that differs in more than capitals or underscores."
            )
        for section in NOT_EVALUATED:
            if getattr(varied.config, section) != getattr(config, section):
                yield (
                    f"evaluate.variants.{name}: it changes {section}, which an evaluation takes from the run. "
                    f"Remove that override; for another {section} start another run, or use condensegrpo eval."
                )


def _check_policy(components: Components) -> Iterator[str]:
    """Check the policy as far as it can be read without weights and without a download, and rehearse the run."""
    config, task = components.config, components.task
    check_task(components)
    if config.model.new is not None:
        heads = config.model.new.heads
        check_writers(components, None)  # before a warm start; their tokens after it
        check_divided("model.new", heads, heads, config.learner.sequence_parallel)
        with temporary_folder("new") as folder:
            yield from rehearse(
                components,
                _new_renderer(task, config.model.new, folder),
                max_positions=config.model.new.max_positions,
                trains=True,
            )
        return
    source = str(config.model.path)
    local = local_source(source)
    if local is not None:
        yield from check_model(components, local, trains=True)
        return
    fault = model_fault(source)
    if fault is not None:
        raise ModelMissing(
            f"looking for model.path={source}: it is no folder and not in the Hub cache, and {fault}. Set model.path "
            f"to a folder with the model, or download it where there is network: hf download {source}."
        )
    yield f"not checked: model {source} is not downloaded yet; the run is rehearsed when training starts"
