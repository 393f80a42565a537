"""Opens what a run needs besides its components: sampler, trackers, renderer and trajectory engine."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.policy import in_use, model_of
from condensegrpo.assembly.scorers import frozen_model, open_scorers
from condensegrpo.config.load import longest_request
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import NO_OBJECTS, Objects, SamplerUse, is_factory
from condensegrpo.core.condenser import UnitScorer
from condensegrpo.core.defaults import overrides, with_defaults
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.core.protocols.tracker import Tracker
from condensegrpo.episodes.engine import AnswerProbe, Engine
from condensegrpo.episodes.families import renderer_for_model
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.model_folder import configuration, end_ids, load_tokenizer
from condensegrpo.learner.settings import LoraSettings
from condensegrpo.storage.media import MediaFolder
from condensegrpo.storage.trajectories import Provenance
from condensegrpo.vision.processor import load_picture_processor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WRITER_SAMPLER = "transformers"  # that holds a writer other than the policy


def use_threads(config: RunConfig) -> None:
    """Give torch as many CPU threads as the configuration says; null: as many as it had at first."""
    import torch

    at_first = _threads_at_first()
    torch.set_num_threads(config.learner.threads or at_first)


@cache
def _threads_at_first() -> int:
    import torch

    return torch.get_num_threads()


def open_sampler(
    config: RunConfig,
    model_path: str,
    *,
    lora: LoraSettings | None = None,
    objects: Objects = NO_OBJECTS,
    media: MediaFolder | None = None,
    observer: Observer | None = None,
) -> Sampler:
    """The sampler, with the weights of a model folder, or one among ``objects``, with the defaults of ``Sampler``.

    Args:
        lora: of the adapters that train beside the weights.
        media: where the pictures of prompts are; None: there are none.
        observer: is told what is waited for.
    """
    progress = partial((observer or Observer()).phase, total=None)
    supplied = _sampler_arguments(config, model_path, lora, media) | {"progress": progress}
    sampler: object = config.sampler.build(objects, **supplied)
    if not isinstance(version := getattr(sampler, "version", None), int):
        raise ConfigError(
            f"setting up the sampler {config.sampler.name}: its version is {version!r:.80}, wanted the number of the "
            f"optimiser step whose weights it has, at first 0{at_definition(type(sampler))}; see "
            f"docs/reference/protocols.md."
        )
    return with_defaults(sampler, Sampler)


def close_sampler(sampler: Sampler, observer: Observer) -> None:
    """Close a sampler; what that raises is only said, since the work with it is done, or failed with its own error."""
    try:
        with plugin_code("closing the sampler", SamplerError):
            sampler.close()
    except SamplerError as error:
        observer.notice(str(error))


def _sampler_arguments(
    config: RunConfig, model_path: str, lora: LoraSettings | None, media: MediaFolder | None = None
) -> dict[str, object]:
    return {
        "model_path": model_path,
        "dtype": config.model.dtype,
        "max_model_len": longest_request(config),
        "lora": lora,
        "media": media,
    }


def open_writers(configs: Iterable[RunConfig], initial: str, media: MediaFolder) -> dict[str, Sampler]:
    """The writers of condensers' texts besides the policy, by ``rollout.condense.writer``: none gets other weights.

    Beside another sampler ``transformers`` holds them, since a process has one engine of vLLM.

    Args:
        configs: of a run and its evaluations.
        initial: the model folder or Hub id of the writer ``initial``.
    """
    opened = dict[str, Sampler]()
    for name, config in {config.rollout.condense.writer: config for config in configs}.items():
        if name == "policy":
            continue
        if config.sampler.name != WRITER_SAMPLER:
            dtype = config.sampler.options.get("dtype", config.model.dtype)
            config = config.model_copy(update={"sampler": SamplerUse(name=WRITER_SAMPLER, options={"dtype": dtype})})
        from condensegrpo.learner.checkpoint import verify_model  # imports torch and DeepSpeed, in seconds

        model = initial if name == "initial" else model_of(name)
        with in_use(model):  # until it is read: another run may be training it
            verify_model(Path(model))
            opened[name] = open_sampler(config, model, media=media)
    return opened


def open_trackers(config: RunConfig) -> tuple[Tracker, ...]:
    """The trackers beside ``metrics.jsonl``."""
    return tuple(tracker.build() for tracker in config.trackers)


def evaluation_temperature(config: RunConfig) -> float:
    """The temperature of the replies of an evaluation, by default that of training."""
    temperature = config.evaluate.temperature
    return config.rollout.temperature if temperature is None else temperature


def provenance(config: RunConfig, *, model: str, step: int | None, evaluation: str | None = None) -> Provenance:
    """The purpose of a file of trajectories, and the settings that they are sampled with."""
    most = config.rollout.limits.max_context_tokens
    return Provenance(
        evaluation=evaluation,
        step=step,
        model=model,
        condenser=config.condenser.name,
        max_context_tokens=config.rollout.condense.budget(most, -1 if evaluation or step is None else step),
        temperature=config.rollout.temperature if evaluation is None else evaluation_temperature(config),
        seed=config.seed,
    )


def renderer_for(components: Components, source: str, media: MediaFolder | None = None) -> Renderer:
    """The renderer for a model folder or Hub id; ``media``: where it has pictures from, None: it refuses them."""
    tokenizer = load_tokenizer(source)  # first: it says what a missing model is
    pictures = None if media is None else load_picture_processor(source, media)
    try:
        model_type = str(getattr(configuration(source), "model_type", ""))
    except ConfigError:  # a proxy renders with the tokenizer alone
        model_type = ""
    return renderer_with(components, tokenizer, stop_ids=end_ids(source), pictures=pictures, model_type=model_type)


def renderer_with(
    components: Components,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    stop_ids: Sequence[int],
    pictures: ExpandsPictures | None = None,
    model_type: str = "",
) -> Renderer:
    """The renderer with a tokenizer, and with the schemas of the tools if its chat template is to show them."""
    rollout = components.config.rollout
    return renderer_for_model(
        tokenizer,
        choice=components.config.model.renderer,
        model_type=model_type,
        tools=components.toolbox.template_schemas,
        tool_format=components.toolbox.format,
        template_options=rollout.template_options,
        stop_ids=stop_ids,
        pictures=pictures,
    )


def trajectory_engine(
    components: Components,
    *,
    renderer: Renderer,
    sampler: Sampler,
    temperature: float,
    writers: Mapping[str, Sampler] = {},
    scorers: Mapping[str, UnitScorer] | None = None,
) -> Engine:
    """The trajectory engine.

    Args:
        writers: as of ``open_writers``.
        scorers: of the condenser, by name; None: they are opened.
    """
    config = components.config
    if scorers is None:
        frozen = partial(frozen_model, dtype=config.model.dtype)
        scorers = open_scorers(components.condenser.scorers, sampler=sampler, renderer=renderer, open_model=frozen)
    form = config.rollout.answer_form
    writer = config.rollout.condense.writer
    if writer != "policy" and writer not in writers:
        raise ConfigError(
            f"setting up rollout.condense.writer: found {writer}, and here the policy alone writes; others write in "
            f"training, evaluation and rollouts. Set it to policy."
        )
    return Engine(
        sampler=sampler,
        writer=writers.get(writer),
        renderer=renderer,
        condenser=components.condenser,
        condenser_name=config.condenser.name,
        scorers=scorers,
        condense=config.rollout.condense,
        toolbox=components.toolbox,
        limits=config.rollout.limits,
        temperature=temperature,
        probe=None if form is None else AnswerProbe(sampler=sampler, renderer=renderer, form=form),
        confidence=config.rollout.stop_when_confident,
    )


def check_sampler(config: RunConfig, objects: Objects = NO_OBJECTS) -> None:
    """Check the sampler's options, and that it has the methods that the configuration needs. Loads no model."""
    name, lora = config.sampler.name, config.model.lora
    native = lora is not None and lora.sampler == "native" and config.sampler.given(objects) is None
    if native and config.model.sampled_lora is None:
        raise ConfigError(
            "checking model.lora.sampler: found native, and with model.vision=train adapters of the vision tower "
            "train too, which no sampler computes. Set model.lora.sampler=merged or auto."
        )
    arguments = config.sampler.check(objects, **_sampler_arguments(config, "", lora))
    if native and "lora" not in arguments:
        raise ConfigError(
            f"checking model.lora.sampler: found native, and the sampler {name} takes merged weights only. Set "
            f"model.lora.sampler=merged, or sampler.name=vllm or vllm_server."
        )
    sampler = config.sampler.plugin(objects)
    if name not in objects and is_factory(sampler):
        return
    if config.rollout.answer_form is not None and not overrides(sampler, Sampler.score):
        raise ConfigError(
            f"setting up rollout.answer_form: the sampler {name} cannot measure the probability of a reply. Use "
            f"sampler.name=transformers or vllm, or set rollout.answer_form=null."
        )
    if config.rollout.stop_when_confident is not None and overrides(sampler, Sampler.reply):
        raise ConfigError(
            f"setting up rollout.stop_when_confident: the sampler {name} knows no probability of a draft. Set it to "
            f"null."
        )
