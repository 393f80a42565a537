"""A sampler that shares a device with the learner, as far as a CPU goes: it writes down who needs the device when.

`sampler.name=tests/sharing_sampler.py:SharingSampler sampler.options.log=FILE`
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from condensegrpo.core.protocols.sampler import NamedTensors
from condensegrpo.core.protocols.task import Problem
from condensegrpo.core.trajectory import Generation, SamplingParams, Trajectory
from condensegrpo.learner.deepspeed_import import DeepSpeedEngine
from condensegrpo.samplers.transformers import TransformersSampler


class SharingSampler(TransformersSampler):
    """The default sampler; its log has its own calls and those that move DeepSpeed's state, repeated ones once."""

    def __init__(self, model_path: str, *, log: str) -> None:
        super().__init__(model_path)
        self.log, self.last = Path(log), ""
        for name in ("offload_states", "reload_states", "step"):
            setattr(DeepSpeedEngine, name, self._logged(name, getattr(DeepSpeedEngine, name)))

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """As the default."""
        self.note("sample")
        return await super().sample(prompt_ids, params)

    def update(self, named_tensors: NamedTensors, version: int) -> None:
        """As the default."""
        self.note("update")
        super().update(named_tensors, version)

    def sleep(self, *, keep_weights: bool) -> None:
        """Frees nothing."""
        self.note("sleep, weights kept" if keep_weights else "sleep")

    def note(self, event: str) -> None:
        """Append an event that is not the last one."""
        if event != self.last:
            with self.log.open("a") as log:
                log.write(f"{event}\n")
        self.last = event

    def _logged(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def logged(*arguments: Any, **options: Any) -> Any:
            self.note(name)
            return method(*arguments, **options)

        return logged


class Alternating:
    """A reward for which even a policy that knows nothing has something to learn: every second sample succeeds."""

    def __call__(self, trajectory: Trajectory, problem: Problem) -> dict[str, float]:
        """1 or 0."""
        return {"second": float(trajectory.sample % 2)}
