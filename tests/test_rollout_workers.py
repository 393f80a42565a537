"""Rollouts in worker processes: the same trajectories with any number of them, and a worker that dies costs its own."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from command import ROOT
from talk import counting, problem, said, shown, tokenizer
from tiny import qwen3
from worker_program import World

from condensegrpo.assembly.build import build
from condensegrpo.assembly.players import Players, described_workers
from condensegrpo.config.load import load_config
from condensegrpo.config.resumed import Change
from condensegrpo.core.errors import RolloutError
from condensegrpo.core.observer import Silent
from condensegrpo.core.protocols import Attends, Problem, Reading, Sampler, TokenAttention
from condensegrpo.core.trajectory import Generation, SamplingParams, ScoredTrajectory, Stop
from condensegrpo.evaluation.evaluate import evaluate
from condensegrpo.rollout.group import ProblemGroup, problem_groups
from condensegrpo.rollout.settings import Workers
from condensegrpo.rollout.workers.messages import Played, Setup
from condensegrpo.rollout.workers.pool import WorkerPool
from condensegrpo.rollout.workers.processes import ProcessHost
from condensegrpo.samplers.scripted import ScriptedSampler
from condensegrpo.samplers.transformers import TransformersSampler

STREAM = (0, 7)  # run seed and step
TURN_SECONDS = 5.0


class ByStream:
    """A sampler whose replies depend on prompt and seed alone, and sometimes take a while."""

    version = 3

    def __init__(self) -> None:
        self.kinds: set[type] = set()

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self.kinds.add(type(prompt_ids))
        await asyncio.sleep(params.seed % 7 / 1000)
        reply = said(f"{counting(shown(prompt_ids))} {params.seed % 100}")
        if "fail" in shown(prompt_ids):
            raise KeyError("weights")
        logprobs = tuple(-1 / (1 + place + params.seed % 1000) for place in range(len(reply)))
        return Generation(token_ids=tuple(reply), logprobs=logprobs, finish=finish())

    def update_weights(self, named_tensors: object, version: int) -> None: ...

    def close(self) -> None: ...


def finish():  # noqa: ANN201
    from condensegrpo.core.trajectory import Finish

    return Finish.STOP
