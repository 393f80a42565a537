"""Settings of the learner, as the configuration holds them. Imports neither torch nor pydantic.

The ranges are annotations (``annotated_types``): pydantic checks them when a configuration is read.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Lt

TIMEOUT_MINUTES = 120.0  # longest wait of a rank for the others: a rollout, an evaluation, a checkpoint
BUCKET = 500_000_000  # largest number of elements reduced together; DeepSpeed allocates this much for any model size
ALL_LINEAR: Final = "all-linear"
LINEAR = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))  # layers of Llama, Qwen, …

TREE_KERNELS = ("auto", "sdpa", "flex", "flash")  # values of model.attention that compute prefix trees

Dtype = Literal["float32", "bfloat16"]
DtypeName = Literal["float32", "bfloat16", "float16"]  # float16 is of samplers only
Offload = Literal["none", "optimiser", "optimiser_and_weights"]
Switch = bool | Literal["auto"]
Checkpointing = bool | Literal["auto"] | Annotated[int, Ge(0)]  # YAML reads on and off as bool
Targets = tuple[str, ...] | Literal["all-linear"]
Vision = Literal["frozen", "train"]
DecayRate = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """LoRA adapters that train instead of the weights: (alpha/rank)·B·A is added to a frozen weight."""

    rank: Annotated[int, Ge(1)] = 16
    """Rows of A, columns of B."""
    alpha: Annotated[float, Gt(0)] = 32.0
    """Strength: B·A is multiplied by alpha/rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of an adapter's inputs set to 0 during an optimiser step."""
    targets: Targets = LINEAR
    """Linear layers by the last part of their names; all-linear: all but the LM head."""
    sampler: Literal["auto", "native", "merged"] = "auto"
    """The sampler gets the adapters alone (native, vLLM) or merged weights; auto: native in bfloat16 where vLLM can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Gt(0)]
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW decay rates of the first and second moment; each from 0 to below 1."""
    eps: Annotated[float, Gt(0)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Share of a weight, times the learning rate, that a step takes off."""
    grad_clip: Annotated[float, Gt(0)] = 1.0
    """Largest norm of the whole gradient; a larger gradient is scaled down to it."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimiser steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up; cosine falls to 0, which the step after the last one would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """The state that lies in the machine's memory instead of the GPU's."""

    training: Offload = "none"
    """The optimiser needs zero_stage ≥ 1, the weights 3."""
    reference: bool = False
    """Whether the reference model of algorithm.kl lies there while it is not in use; with LoRA there is none."""
    rollouts: bool = False
    """Whether optimiser, fp32 weights and gradients lie there while the sampler samples, which shares the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPictures:
    """How a new model sees: a picture is scaled to a square, and each patch of it is a token."""

    size: Annotated[int, Ge(8)] = 64
    """Pixels of the square's side."""
    patch: Annotated[int, Ge(2)] = 8
    """Pixels of a patch's side."""
    layers: Annotated[int, Ge(1)] = 1
    """Layers of the vision tower, whose width and heads are those of the text model."""
    initializer_range: Annotated[float, Gt(0)] = 0.05
    """Standard deviation of the tower's initial weights."""

    def __post_init__(self) -> None:
        if self.size % self.patch:
            raise ValueError(f"size={self.size} is no multiple of patch={self.patch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """A Qwen3 model made on the spot, with a tokenizer built from the task's own text."""

    tokenizer: Literal["words", "bpe"] = "words"
    """``words``: a token for every word of the task's ``corpus()``, others are ``[UNK]``; ``bpe``: knows every text."""
    vocab_size: Annotated[int, Ge(64)] = 2048
    """Size of a bpe tokenizer; the largest size that a words tokenizer may have."""
    hidden_size: Annotated[int, Ge(8)] = 64
    """Width of the residual stream, a multiple of ``heads``."""
    layers: Annotated[int, Ge(1)] = 2
    """Decoder layers."""
    heads: Annotated[int, Ge(1)] = 4
    """Attention heads."""
    ffn_size: Annotated[int, Ge(8)] = 256
    """Width inside of an MLP."""
    initializer_range: Annotated[float, Gt(0)] = 0.15
    """Standard deviation of the initial weights."""
    max_positions: Annotated[int, Ge(64)] = 4096
    """Longest context in tokens."""
    pictures: NewPictures | None = None
    """A SmolVLM with this text model; null: it sees nothing."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size={self.hidden_size} is no multiple of heads={self.heads}")
