"""Opens what a run needs besides its components: sampler, trackers, renderer and trajectory engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from condensegrpo.assembly.components import Components
from condensegrpo.assembly.scorers import frozen_model, open_scorers
from condensegrpo.config.load import longest_request
from condensegrpo.config.options import check_plugin
from condensegrpo.config.schema import RunConfig
from condensegrpo.config.use import NO_OBJECTS, Objects, SamplerUse
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, SamplerError
from condensegrpo.core.failures import at_definition, plugin_code
from condensegrpo.core.observer import Observer
from condensegrpo.core.plugins import load_plugin, missing_methods
from condensegrpo.core.protocols.pictures import ExpandsPictures
from condensegrpo.core.protocols.sampler import (
    Sampler,
)
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


COPYING = "transformers"  # the sampler that holds a copy of the initial policy
RENAMED: Mapping[str, Callable[..., object]] = {  # methods by the names that they had
    "update_weights": Sampler.update,
    "stage_weights": Sampler.stage,
    "measure": Sampler.score,
}


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
    """The sampler, with the weights of a model folder. A sampler among ``objects`` stays as it is.

    Args:
        lora: of the adapters that train beside the weights.
        media: where the pictures of prompts are; None: there are none.
        observer: is told what is waited for.
    """
    progress = partial((observer or Observer()).phase, total=None)
    supplied = _sampler_arguments(config, model_path, lora, media) | {"progress": progress}
    sampler = config.sampler.build(objects, **supplied)
    if not isinstance(version := getattr(sampler, "version", None), int):
        raise ConfigError(
            f"setting up the sampler {config.sampler.name}: its version is {version!r:.80}, wanted the number of the "
            f"optimiser step whose weights it has, at first 0{at_definition(type(sampler))}; see "
            f"docs/reference/protocols.md."
        )
    _check_names(sampler, config.sampler.name)  # a function may have made it: no class was checked
    return cast(Sampler, sampler)


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


def open_writer(configs: Iterable[RunConfig], initial: str, media: MediaFolder) -> Sampler | None:
    """The initial policy as the writer of condensers' texts: a copy that never gets other weights.

    Beside another sampler ``transformers`` holds it, since a process has one engine of vLLM. None if none of the
    configurations, of a run and its evaluations, sets ``rollout.condense.writer=initial``.
    """
    config = next((each for each in configs if each.rollout.condense.writer == "initial"), None)
    if config is None:
        return None
    if config.sampler.name != COPYING:
        dtype = config.sampler.options.get("dtype", config.model.dtype)
        config = config.model_copy(update={"sampler": SamplerUse(name=COPYING, options={"dtype": dtype})})
    return open_sampler(config, initial, media=media)


def open_trackers(config: RunConfig) -> tuple[Tracker, ...]:
    """The trackers beside ``metrics.jsonl``."""
    return tuple(tracker.build() for tracker in config.trackers)


def evaluation_temperature(config: RunConfig) -> float:
    """Of the replies of an evaluation: by default as in training."""
    temperature = config.evaluate.temperature
    return config.rollout.temperature if temperature is None else temperature


def provenance(config: RunConfig, *, model: str, step: int | None, evaluation: str | None = None) -> Provenance:
    """What a file of trajectories is for, and what they are sampled with."""
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
    writer: Sampler | None = None,
) -> Engine:
    """The trajectory engine; ``writer``: the initial policy, for ``rollout.condense.writer=initial``."""
    config, scorer_names = components.config, components.condenser.scorers
    form = config.rollout.answer_form
    frozen = config.rollout.condense.writer == "initial"
    if frozen and writer is None:
        raise ConfigError(
            "setting up rollout.condense.writer: found initial, and here is no copy of the initial policy; it is used "
            "in training, evaluation and rollouts. Set it to policy."
        )
    return Engine(
        sampler=sampler,
        writer=writer if frozen else None,
        renderer=renderer,
        condenser=components.condenser,
        condenser_name=config.condenser.name,
        scorers=open_scorers(
            scorer_names,
            sampler=sampler,
            renderer=renderer,
            model=partial(frozen_model, dtype=config.model.dtype),
        ),
        trigger=config.rollout.condense,
        toolbox=components.toolbox,
        limits=config.rollout.limits,
        temperature=temperature,
        probe=None if form is None else AnswerProbe(model=sampler, renderer=renderer, form=form),
        confidence=config.rollout.stop_when_confident,
    )


def _check_names(sampler: object, name: str) -> None:
    """Check that a sampler, or the class of one, has its methods by their names of today."""
    for old, method in RENAMED.items():
        if callable(getattr(sampler, old, None)) and not overrides(sampler, method):
            raise ConfigError(
                f"setting up the sampler {name}: its method {old} is called {method.__name__}{at_definition(sampler)}."
            )


def check_sampler(config: RunConfig, objects: Objects = NO_OBJECTS) -> None:
    """Check the sampler's options, and that it has the methods that the configuration needs. Loads no model."""
    name, lora, sampler = config.sampler.name, config.model.lora, config.sampler.given(objects)
    if sampler is None:
        native = lora is not None and lora.sampler == "native"
        if native and config.model.sampled_lora is None:
            raise ConfigError(
                "checking model.lora.sampler: found native, and with model.vision=train adapters of the vision tower "
                "train too, which no sampler computes. Set model.lora.sampler=merged or auto."
            )
        given = check_plugin("samplers", name, config.sampler.options, _sampler_arguments(config, "", lora))
        if native and "lora" not in given:
            raise ConfigError(
                f"checking model.lora.sampler: found native, and the sampler {name} takes merged weights only. Set "
                f"model.lora.sampler=merged, or sampler.name=vllm or vllm_server."
            )
        sampler = load_plugin("samplers", name)
        if not isinstance(sampler, type):  # a function that makes one
            return
    _check_names(sampler, name)
    if missing := missing_methods(sampler, "sample", "update", "close"):
        raise ConfigError(
            f"setting up the sampler {name}: it has no {' and no '.join(missing)}{at_definition(sampler)}; see "
            f"docs/reference/protocols.md."
        )
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
