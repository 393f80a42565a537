"""The program of rollout workers: builds what the rank has built, once more, and plays what the rank sends."""

import os
from functools import partial
from importlib import import_module
from typing import cast

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.components import Components, problems
from condensegrpo.assembly.players import PlayerSettings, local_player
from condensegrpo.episodes.player import LocalPlayer
from condensegrpo.episodes.workers.worker import OpenPlayer, RemoteSampler

for module in ("transformers.models.auto.tokenization_auto", "condensegrpo.attention.scorer"):
    import_module(module)  # before workers are forked


def open_players() -> OpenPlayer:
    """Start a worker. Returns what makes its players."""
    import numpy

    numpy.random.seed()  # every fork would go on with the same numbers
    opened: list[Components] = []
    return partial(_open_player, opened)


def _open_player(opened: list[Components], given: object, sampler: RemoteSampler) -> LocalPlayer:
    """Build a player; it shares what it can with the components that were opened last."""
    settings = cast(PlayerSettings, given)
    last = opened[-1] if opened else None
    sandbox = settings.config.sandbox
    share = -(-(sandbox.parallel or 2 * len(os.sched_getaffinity(0))) // settings.workers)  # of the sandbox's calls
    config = settings.config.model_copy(update={"sandbox": sandbox.model_copy(update={"parallel": share})})
    components = build_components(config, last)
    is_new = last is None or last.task is not components.task
    if is_new and not type(components.task).__module__.startswith("condensegrpo."):
        problems(components.task, "train")  # a user's environments may need what its task keeps of them
        problems(components.task, "eval")
    opened[:] = [components]
    return local_player(components, settings, sampler, model=partial(RemoteSampler, sampler.requests))
