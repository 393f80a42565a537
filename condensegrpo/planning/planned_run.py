"""What is planned: a configuration and the devices that it runs on, with the sizes that follow from the two."""

from dataclasses import dataclass, replace
from math import ceil

from condensegrpo.config.schema import RunConfig
from condensegrpo.learner.activation_checkpointing import is_on
from condensegrpo.learner.attention_kernels import planned_kernel
from condensegrpo.learner.dtypes import DTYPES
from condensegrpo.planning.architecture import Architecture
from condensegrpo.planning.formulas import MicroBatch, Weights
from condensegrpo.planning.zero import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A configuration on its devices."""

    config: RunConfig
    model: Architecture
    ranks: int  # devices of the run
    device: Device  # of each
    memory: int | None  # bytes of a GPU, of which vLLM has a share; None: not known, or a CPU

    @property
    def on_gpu(self) -> bool:
        """Whether every rank has a GPU."""
        return self.device == "gpu"

    @property
    def element(self) -> int:
        """Bytes of an element of the learner's weights."""
        return DTYPES[self.config.model.dtype].itemsize

    @property
    def trained(self) -> bool:
        """Whether the model's weights are trained, and not adapters beside them."""
        return self.model.adapters is None

    @property
    def weights(self) -> Weights:
        """The learner's weights: all of them are trained, or adapters beside all of them."""
        adapters, parameters = self.model.adapters, self.model.parameters
        if adapters is None:
            return Weights(trainable=parameters, frozen=0, element=self.element)
        return Weights(trainable=adapters.parameters, frozen=parameters, element=self.element)

    @property
    def kernel(self) -> str:
        """The kernel of ``model.attention`` that memory is counted for."""
        return planned_kernel(self.config.model.attention, gpu=self.on_gpu)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether layers are computed again in backward."""
        return is_on(self.config.learner.checkpoint_activations, gpu=self.on_gpu)

    @property
    def batch(self) -> MicroBatch:
        """A full micro-batch of the longest rows, or all rows of the ranks that share it if these are fewer tokens."""
        limits, train, learner = self.config.rollout.limits, self.config.train, self.config.learner
        problems = train.problems_per_step * learner.sequence_parallel // self.ranks
        rows = problems * train.samples_per_problem * limits.max_turns
        tokens = min(learner.tokens_per_micro_batch, rows * limits.turn_tokens)
        length = min(limits.turn_tokens, tokens)
        outputs = min(length - 1, limits.max_turns * limits.max_output_tokens)
        return MicroBatch(tokens=tokens, length=length, trained=ceil(tokens / length * outputs))

    @property
    def rank_batch(self) -> MicroBatch:
        """A rank's tokens of a micro-batch (``learner.sequence_parallel``)."""
        batch, ranks = self.batch, self.config.learner.sequence_parallel
        return replace(batch, tokens=ceil(batch.tokens / ranks), trained=ceil(batch.trained / ranks))
