"""The program of rollout workers: builds what the rank has built, once more, and plays what the rank sends."""

import os
from functools import partial
from importlib import import_module
from typing import cast

from condensegrpo.assembly.build import build_components
from condensegrpo.assembly.components import Components, problems
from condensegrpo.assembly.players import PlayerSettings, local_player
from condensegrpo.config.schema import RunConfig
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
    components = build_components(_with_share(settings.config, settings.workers), last)
    if last is None or last.task is not components.task:
        _read_problems(components)
    opened[:] = [components]
    return local_player(components, settings, sampler, model=partial(RemoteSampler, sampler.requests))


def _with_share(config: RunConfig, workers: int) -> RunConfig:
    """A configuration with one worker's share of the calls of the sandbox."""
    calls = config.sandbox.parallel or 2 * len(os.sched_getaffinity(0))
    sandbox = config.sandbox.model_copy(update={"parallel": -(-calls // workers)})
    return config.model_copy(update={"sandbox": sandbox})


def _read_problems(components: Components) -> None:
    """Let a task of a user read its problems, as in the rank: its environments may need what it keeps of them."""
    if not type(components.task).__module__.startswith("condensegrpo."):
        problems(components.task, "train")
        problems(components.task, "eval")
