"""Opens the scorers that a condenser requires: the policy's attention, a frozen model's, or the oracle.

A name may select the layers whose attention is captured, counted from 0: ``policy@0`` or ``path/to/model@14,18``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

from condensegrpo.attention.scorer import AttentionScorer, LeaveOneOut
from condensegrpo.core.condenser import UnitScorer
from condensegrpo.core.defaults import overrides
from condensegrpo.core.errors import ConfigError, RolloutError
from condensegrpo.core.messages import Message
from condensegrpo.core.protocols.sampler import Sampler
from condensegrpo.episodes.render import Renderer
from condensegrpo.learner.model_folder import check_vocabulary, configuration, end_ids, load_tokenizer, max_positions

if TYPE_CHECKING:
    from condensegrpo.samplers.transformers import TransformersSampler

POLICY, ORACLE = "policy", "leave_one_out"  # any other name is the folder or Hub id of a frozen model
LAYERS = re.compile(r"(?P<model>.+)@(?P<layers>\d+(,\d+)*)")
NEEDED: Mapping[str, Callable[..., object]] = {POLICY: Sampler.attend, ORACLE: Sampler.score}  # of the sampler


def check_scorers(names: Sequence[str], sampler: object, sampler_name: str) -> None:
    """Check that the sampler has the methods that the scorers need. Loads nothing.

    Args:
        sampler: its class; any other factory is not checked.
    """
    for name in names:
        model, _ = split_layers(name)
        if model in NEEDED and isinstance(sampler, type) and not overrides(sampler, NEEDED[model]):
            lacking = "capture its model's attention" if model == POLICY else "measure the probability of a reply"
            able = "transformers" if model == POLICY else "transformers or vllm"
            raise ConfigError(
                f"setting up the scorer {name!r} of the condenser: the sampler {sampler_name} cannot {lacking}. "
                f"Use sampler.name={able}, or name a frozen model: its folder or Hub id as the scorer."
            )


def check_models(names: Sequence[str], source: str) -> None:
    """Check that attention can be captured from the models that score. Loads no weights.

    Args:
        source: the policy's folder or Hub id.
    """
    from condensegrpo.attention.capture import check_layers, check_supported  # imports transformers

    for name in names:
        model, layers = split_layers(name)
        if model == ORACLE:
            continue
        try:
            shape = configuration(source if model == POLICY else model).get_text_config()
            check_supported(shape.model_type)
            check_layers(layers, shape.num_hidden_layers)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"setting up the scorer {name!r} of the condenser: {error}") from error
        if model != POLICY:
            check_vocabulary(model)


def check_frozen(name: str, pinned: Sequence[Message], tokens: int) -> None:
    """Check that the chat template of a scorer's frozen model renders a conversation, and that it has the positions.

    Args:
        pinned: system message and question of some problem.
        tokens: of the longest prompt.
    """
    path, _ = split_layers(name)
    if path in NEEDED:
        return
    rendering = Renderer(load_tokenizer(path), stop_ids=end_ids(path))
    turn = (Message(role="assistant", content="so"), Message(role="user", content="and"))
    try:
        rendering.count((*pinned, *turn))
    except RolloutError as error:
        raise ConfigError(
            f"setting up the scorer {name!r} of the condenser: {error} Name a model whose chat template renders it."
        ) from error
    room = max_positions(path)
    if room is not None and room < tokens:
        raise ConfigError(
            f"setting up the scorer {name!r} of the condenser: it has {room} positions, and prompts up to {tokens} "
            f"tokens (rollout.limits.max_context_tokens). Name a model with a longer context."
        )


def split_layers(name: str) -> tuple[str, tuple[int, ...]]:
    """The model of a scorer and its layers; () means the default layers: policy@0,1 ─▶ policy, (0, 1)."""
    match = LAYERS.fullmatch(name)
    return (match["model"], tuple(map(int, match["layers"].split(",")))) if match else (name, ())


def open_scorers(
    names: Sequence[str], *, sampler: Sampler, renderer: Renderer, open_model: Callable[[str], Sampler]
) -> dict[str, UnitScorer]:
    """The scorers by name.

    Args:
        sampler: holds the policy's weights, and gets the learner's after every step.
        renderer: with the policy's tokenizer.
        open_model: opens a frozen model by its folder or Hub id.
    """
    check_scorers(names, type(sampler), type(sampler).__name__)
    opened = dict[str, UnitScorer]()
    for name in names:
        source, layers = split_layers(name)
        if source == POLICY:
            opened[name] = AttentionScorer(sampler, renderer, layers=layers)
        elif source == ORACLE:
            opened[name] = LeaveOneOut(sampler, renderer)
        else:
            opened[name] = frozen_scorer(source, layers, open_model)
    return opened


def frozen_scorer(path: str, layers: tuple[int, ...], open_model: Callable[[str], Sampler]) -> AttentionScorer:
    """A scorer by the attention of a frozen model."""
    renderer = Renderer(load_tokenizer(path), stop_ids=end_ids(path))
    return AttentionScorer(open_model(path), renderer, layers=layers)


@cache
def frozen_model(path: str, dtype: Literal["float32", "bfloat16"]) -> "TransformersSampler":
    """A model that is never updated; a process holds it once, for training and evaluations."""
    from condensegrpo.samplers.transformers import TransformersSampler

    return TransformersSampler(path, dtype=dtype)
